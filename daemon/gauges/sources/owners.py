"""A source for GPUs from the reports of clients, which read their device's memory through torch.

The daemon does not use torch itself. That needs a GPU context, which takes hundreds of megabytes of the watched memory.

Thread-safe: reports come from another thread than the one that reads.

Invariants: at most DEVICES_MAX devices are known. A report is as old as the client's reading, not as its message:
what was allocated in between is not in it.
"""

from __future__ import annotations

import threading
from typing import Final

from ....ipc.messages.modes import HOST_GAUGE, Tier
from ...governor.forms.events import OWNERS_EVERY_S
from ...governor.forms.limits import DEVICES_MAX
from ..reading import OFFERED, GaugeFailed, Offer, Reading, Result, Source

_LATE_S: Final = 3 * OWNERS_EVERY_S
_FORGOTTEN_S: Final = 60 * OWNERS_EVERY_S


class OwnersSource(Source):
    """The last reports of owners about their devices. A device without a report for 3 intervals is a failure. After 60
    intervals it is no longer a gauge, because its owners have ended."""

    name: Final = "owners"

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, Reading | GaugeFailed]] = {}
        self._lock = threading.Lock()

    def report(self, device: str, used_bytes: int, total_bytes: int, read_at: float) -> None:
        """Takes a client's reading of `device`, which began at `read_at`. Ignored if it is older than the last one, or
        of a device that no client could open: the host, or one too many. May be called from any thread."""
        try:
            reading: Reading | GaugeFailed = Reading(used_bytes, total_bytes, began_at=read_at)
        except GaugeFailed as failed:
            reading = failed
        with self._lock:
            known = self._reports.get(device)
            new = known is None and len(self._reports) < DEVICES_MAX and device != HOST_GAUGE
            if new or (known is not None and known[0] <= read_at):
                self._reports[device] = read_at, reading

    def read(self, now: float) -> Result:
        """As in Source. `began_at` of a reading is the time at which its client began to read."""
        with self._lock:
            reports = {each: report for each, report in self._reports.items() if now - report[0] <= _FORGOTTEN_S}
            self._reports = dict(reports)
        return {
            device: reading if now - at <= _LATE_S else GaugeFailed(f"no client has read it for {now - at:.3g} s")
            for device, (at, reading) in reports.items()
        }


OFFERED[OwnersSource.name] = Offer(Tier.DEVICE, 3, lambda root: OwnersSource())
