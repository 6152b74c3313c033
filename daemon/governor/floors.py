"""Queueing floors: how many cache blocks each device needs so that its queue of requests stays finite.

By Little's law (J. D. C. Little, "A proof for the queuing formula L = λW", Operations Research 9(3), 1961) λ · E[S]
requests are served at once on average, if λ requests arrive a second and each is served for E[S] seconds. They hold
λ · E[S] · E[blocks] blocks. If fewer blocks than that and a margin are kept, evicted blocks have to be computed again.
That raises E[S], and the queue grows.

Requests are counted of devices that have a gauge or entries. A device without a report in the window is forgotten.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ...errors import NoGauge
from ...ipc.messages import control as messages

WINDOW_S: Final = 60
MARGIN: Final = 1.15
"""The floor divided by the mean need. The margin is there because requests do not arrive evenly."""
COVERED_S_MIN: Final = 4
"""λ is computed over at least so many seconds. Otherwise the first few requests would be a high rate."""


@dataclass(slots=True)
class DeviceRequests:
    """The requests of one device, the first of which was reported at `began`. `seconds`: arrivals, completions, service
    time and blocks, by second."""

    began: float
    reported_at: float
    seconds: dict[int, Counter[str]] = field(default_factory=dict)

    def add(self, now: float, **counts: int) -> None:
        self.reported_at = now
        while self.seconds and (first := next(iter(self.seconds))) <= int(now) - WINDOW_S:
            del self.seconds[first]
        self.seconds.setdefault(int(now), Counter()).update(counts)

    def floor(self, now: float) -> int:
        """ceil(λ · E[S] · E[blocks] · 1.15). 0 if no request was completed in the window, which ends now."""
        first, sums = int(now) - WINDOW_S + 1, Counter[str]()
        for second, counts in self.seconds.items():
            if second >= first:
                sums.update(counts)
        covered_s = max(now - max(self.began, first), COVERED_S_MIN)
        completions = max(sums["completions"], 1)
        mean_s, mean_blocks = sums["service_us"] / 1e6 / completions, sums["blocks"] / completions
        # A product of floats may lie a rounding error above a whole number.
        return math.ceil(round(sums["arrivals"] / covered_s * mean_s * mean_blocks * MARGIN, 6))


class Floors:
    """The reported inference requests by device. `known`: whether a device has a gauge or entries."""

    def __init__(self, known: Callable[[str], bool]) -> None:
        self._known = known
        self._devices: dict[str, DeviceRequests] = {}

    def devices(self) -> set[str]:
        return set(self._devices)

    def arrived(self, client: int, message: messages.RequestsArrived, now: float) -> None:
        """Counts arrived requests. Raises NoGauge for a device that has neither a gauge nor entries."""
        self._add(message.device, now, arrivals=message.count)

    def completed(self, client: int, message: messages.RequestCompleted, now: float) -> None:
        """Counts a completed request. Raises NoGauge as `arrived`."""
        service_us = round(message.service_s * 1e6)
        self._add(message.device, now, completions=1, service_us=service_us, blocks=message.blocks)

    def forget(self, now: float) -> None:
        """Drops devices without a report in the window: they have no floor."""
        begins = now - WINDOW_S
        self._devices = {device: each for device, each in self._devices.items() if each.reported_at > begins}

    def blocks(self, device: str, now: float) -> int:
        """The number of blocks that a device's entries must keep; 0 if no requests were reported."""
        return self._devices[device].floor(now) if device in self._devices else 0

    def _add(self, device: str, now: float, **counts: int) -> None:
        if device not in self._devices and not self._known(device):
            raise NoGauge(f"device {device!r} has neither a gauge nor entries, so its requests are not counted")
        self._devices.setdefault(device, DeviceRequests(now, now)).add(now, **counts)
