"""A source for GPUs from the reports of clients, which read their device's memory through torch.

The daemon does not use torch itself. That needs a GPU context, which takes hundreds of megabytes of the watched memory.

Owns: the latest report of each device. Does not own the sending of reports (the client). Thread-safe: reports come from
another thread than the one that reads.

Invariants: at most `devices_max` devices are known. A report is as old as the client's reading, not as its message:
what was allocated in between is not in it.
"""

from __future__ import annotations

import threading
from typing import Final

from ....ipc.messages.modes import Tier
from ...governor.forms.events import OWNERS_EVERY_S
from ...governor.forms.limits import DEVICES_MAX
from ..reading import GaugeFailed, Reading, Result, Source, offer

_LATE: Final = 3
_FORGOTTEN: Final = 60


class OwnersSource(Source):
    """The last reports of owners about their devices.

    Args:
        every_s: the interval of reports. A device without a report for 3 intervals is a failure. After 60 intervals it
            is no longer a gauge, because its owners have ended.
        devices_max: the most devices that are known at once.
    """

    name: Final = "owners"

    def __init__(self, every_s: float, devices_max: int) -> None:
        self._late_s = _LATE * every_s
        self._forgotten_s = _FORGOTTEN * every_s
        self._devices_max = devices_max
        self._reports: dict[str, tuple[float, Reading | GaugeFailed]] = {}
        self._lock = threading.Lock()

    def report(self, device: str, used_bytes: int, total_bytes: int, read_at: float) -> bool:
        """Takes a client's reading of `device`, which began at `read_at`. An older one than the last changes nothing.
        May be called from any thread.

        Returns:
            False if there would be more devices than devices_max. Then nothing has changed.
        """
        try:
            reading: Reading | GaugeFailed = Reading(used_bytes, total_bytes, began_at=read_at)
        except GaugeFailed as failed:
            reading = failed
        with self._lock:
            if device not in self._reports and len(self._reports) >= self._devices_max:
                return False
            if device not in self._reports or self._reports[device][0] <= read_at:
                self._reports[device] = read_at, reading
            return True

    def read(self, now: float) -> Result:
        """As in Source. `began_at` of a reading is the time at which its client began to read."""
        with self._lock:
            reports = {each: report for each, report in self._reports.items() if now - report[0] <= self._forgotten_s}
            self._reports = dict(reports)
        return {
            device: reading if now - at <= self._late_s else GaugeFailed(f"no client has read it for {now - at:.3g} s")
            for device, (at, reading) in reports.items()
        }


offer(OwnersSource.name, Tier.DEVICE, 3, lambda root: OwnersSource(OWNERS_EVERY_S, DEVICES_MAX))
