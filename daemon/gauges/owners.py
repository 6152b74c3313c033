"""GPUs as the processes see them that hold tensors there, through torch.

The daemon could ask torch itself, but only with a GPU context, hundreds of megabytes of the memory that it watches.

Owns: the last report of each device. Reports come from another thread than readings.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

from ...ipc.modes import Tier
from ..core.governor.events import OWNERS_EVERY_S
from .offers import offer
from .reading import GaugeFailed, Reading, Result

_LATE: Final = 3
_FORGOTTEN: Final = 60


@dataclass(frozen=True, slots=True)
class _Report:
    used_bytes: int
    total_bytes: int
    at: float


class OwnersSource:
    """What owners last said of their devices.

    Args:
        every_s: how often they say something. A device of which nothing was heard for three times as long fails; one
            of which nothing was heard for sixty times as long is not a gauge any more: its owners have gone.
        devices_max: so many devices are known at once.
    """

    name: Final = "owners"

    def __init__(self, every_s: float, devices_max: int) -> None:
        self._late_s = _LATE * every_s
        self._forgotten_s = _FORGOTTEN * every_s
        self._devices_max = devices_max
        self._reports: dict[str, _Report] = {}
        self._lock = threading.Lock()

    def report(self, device: str, used_bytes: int, total_bytes: int, now: float) -> bool:
        """Takes what an owner of tensors on `device` was told by its driver; from any thread.

        Returns:
            False: it is of one device more than devices_max, and nothing has changed.
        """
        with self._lock:
            if device not in self._reports and len(self._reports) >= self._devices_max:
                return False
            self._reports[device] = _Report(used_bytes, total_bytes, now)
            return True

    def read(self, now: float) -> Result:
        """As in Source. A reading began when its report came, not now: what was freed since cannot show in it."""
        with self._lock:
            for device, report in list(self._reports.items()):
                if now - report.at > self._forgotten_s:
                    del self._reports[device]
            reports = dict(self._reports)
        return {device: self._reading(report, now) for device, report in reports.items()}

    def close(self) -> None:
        """As in Source."""

    def _reading(self, report: _Report, now: float) -> Reading | GaugeFailed:
        if now - report.at > self._late_s:
            return GaugeFailed(f"no owner of tensors there has reported for {now - report.at:.3g} s")
        try:
            return Reading(report.used_bytes, report.total_bytes, began_at=report.at)
        except GaugeFailed as failed:
            return failed


offer(
    "owners",
    Tier.DEVICE,
    lambda given: OwnersSource(OWNERS_EVERY_S, given.devices_max),
    auto=4,
    says="what the tensors' owners see through torch",
)
