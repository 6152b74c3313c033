"""A source for GPUs from the reports of clients, which read their device's memory through torch.

The daemon does not use torch itself. That needs a GPU context, which takes hundreds of megabytes of the watched memory.

Thread-safe: reports come from another thread than the one that reads.

Invariants: at most DEVICES_MAX devices have reported since the last reading. A report is as old as the client's
reading, not as its message: what was allocated in between is not in it.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final

from ....ipc.messages.modes import HOST_GAUGE
from ...governor.forms.limits import DEVICES_MAX
from ..reading import DeviceSource, Reading, Result


class OwnersSource(DeviceSource):
    """What owners have reported of their devices since the last reading of this source."""

    name: Final = "owners"
    preference = 4

    def __init__(self, _root: Path = Path("/")) -> None:
        self._reports: dict[str, Reading] = {}
        self._lock = threading.Lock()

    def report(self, device: str, used_bytes: int, total_bytes: int, read_at: float) -> None:
        """Takes a client's reading of `device`, which began at `read_at`. Ignored if it is older than another one, or
        of a device that no client could open: the host, or one too many. May be called from any thread."""
        reading = Reading(used_bytes, total_bytes, began_at=read_at)
        with self._lock:
            known = self._reports.get(device)
            if device == HOST_GAUGE or (known is None and len(self._reports) >= DEVICES_MAX):
                return
            if known is None or (known.began_at or 0.0) <= read_at:
                self._reports[device] = reading

    def read(self, now: float) -> Result:
        """As in Source. `began_at` of a reading is the time at which its client began to read."""
        with self._lock:
            reports, self._reports = self._reports, {}
        return dict(reports)
