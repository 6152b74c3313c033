"""Queueing floors: how many blocks each device needs so that its queue of requests stays bounded.

Owns one queueing controller for each device, created at the first report about its requests. Does not own the formula
(`queueing`), nor what a floor forbids (devices).

A client may report requests of any name. A device that is not known otherwise is forgotten after WINDOW_S without a
report, when its floor is 0, and makes room for a known device at once.

Invariant: devices are in the order of their latest reports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ....errors import LimitReached
from ....ipc.messages import control as messages
from .queueing import QueueingController

WINDOW_S: Final = 60.0
"""The time over which arrivals and completions of requests are counted."""


class Floors:
    """The reported inference requests by device. `known`: whether a device has a gauge or entries."""

    def __init__(self, devices_max: int, known: Callable[[str], bool]) -> None:
        self._devices_max = devices_max
        self._known = known
        self._floors: dict[str, tuple[QueueingController, float]] = {}  # with the time of the latest report

    def devices(self) -> set[str]:
        """The devices with reported requests."""
        return set(self._floors)

    def arrived(self, message: messages.RequestsArrived, now: float) -> None:
        """Counts arrived requests. Raises LimitReached for one device too many."""
        self._controller(message.device, now).record_request_arrival(now, message.count)

    def completed(self, message: messages.RequestCompleted, now: float) -> None:
        """Counts a completed request. Raises LimitReached for one device too many."""
        self._controller(message.device, now).record_request_completion(now, message.service_s, message.blocks)

    def forget(self, now: float) -> None:
        """Drops devices that are not known otherwise, had no report within WINDOW_S, and have no floor."""
        for device, (_, reported_at) in list(self._floors.items()):
            if reported_at > now - WINDOW_S:
                break
            if not self._known(device) and not self.blocks(device, now):
                del self._floors[device]

    def blocks(self, device: str, now: float) -> int:
        """The number of blocks that a device's entries must keep; 0 if no requests were reported."""
        return self._floors[device][0].floor(now) if device in self._floors else 0

    def means(self, device: str, now: float) -> dict[str, float]:
        """For status; empty without reported requests."""
        return self._floors[device][0].means(now) if device in self._floors else {}

    def check_invariants(self) -> None:
        """Asserts that each controller's counts agree."""
        for controller, _ in self._floors.values():
            controller.check_invariants()
        assert len(self._floors) <= self._devices_max
        reported = [reported_at for _, reported_at in self._floors.values()]
        assert reported == sorted(reported)

    def _controller(self, device: str, now: float) -> QueueingController:
        if device not in self._floors:
            self._make_room(device, now)
        known = self._floors.pop(device, None)
        controller = QueueingController(WINDOW_S) if known is None else known[0]
        self._floors[device] = controller, now
        return controller

    def _make_room(self, device: str, now: float) -> None:
        if len(self._floors) >= self._devices_max:
            self.forget(now)
        if len(self._floors) >= self._devices_max and self._known(device):
            unknown = next((each for each in self._floors if not self._known(each)), None)
            if unknown is not None:
                del self._floors[unknown]
        if len(self._floors) >= self._devices_max:
            raise LimitReached(
                f"requests of {len(self._floors)} devices are counted, and {self._devices_max} may be (a fixed limit): "
                f"those of {device!r} are not"
            )
