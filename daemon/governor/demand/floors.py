"""Queueing floors: how many blocks each device needs so that its queue of requests stays bounded.

Owns one queueing controller for each device, created at the first report about its requests, and a second one while a
changed window fills. Does not own the formula (`policy.queueing`), nor what a floor forbids (devices).

A client may report requests of any name. A device that is not known otherwise is forgotten after a window without a
report, when its floor is 0, and makes room for a known device at once.

Invariants: a changed window lowers no floor before its whole length was observed. Devices are in the order of their
latest reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ....errors import LimitReached
from ....ipc.messages import control as messages
from ..forms.limits import GovernorLimits
from .queueing import QueueingController


@dataclass(slots=True)
class Floor:
    """One device's floor. `former` counts by the earlier window, until `since` + window_s."""

    controller: QueueingController
    former: QueueingController | None = None
    since: float = 0.0
    reported_at: float = 0.0


class Floors:
    """The reported inference requests by device. `known`: whether a device has a gauge or entries."""

    def __init__(self, limits: GovernorLimits, known: Callable[[str], bool]) -> None:
        self._limits = limits
        self._known = known
        self._floors: dict[str, Floor] = {}

    def change_limits(self, limits: GovernorLimits, now: float) -> None:
        """Starts a changed window beside the present one."""
        if limits.window_s != self._limits.window_s:
            for floor in self._floors.values():
                former = floor.former or floor.controller
                floor.former, floor.controller, floor.since = former, QueueingController(limits.window_s), now
        self._limits = limits

    def devices(self) -> set[str]:
        """The devices with reported requests."""
        return set(self._floors)

    def arrived(self, message: messages.RequestsArrived, now: float) -> None:
        """Counts arrived requests. Raises LimitReached for one device too many."""
        for controller in self._controllers(message.device, now):
            controller.record_request_arrival(now, message.count)

    def completed(self, message: messages.RequestCompleted, now: float) -> None:
        """Counts a completed request. Raises LimitReached for one device too many."""
        for controller in self._controllers(message.device, now):
            controller.record_request_completion(now, message.service_s, message.blocks)

    def forget(self, now: float) -> None:
        """Drops devices that are not known otherwise, had no report within the window, and have no floor."""
        for device, floor in list(self._floors.items()):
            if floor.reported_at > now - self._limits.window_s:
                break
            if not self._known(device) and not self.blocks(device, now):
                del self._floors[device]

    def blocks(self, device: str, now: float) -> int:
        """The number of blocks that a device's entries must keep; 0 if no requests were reported."""
        floor = self._floors.get(device)
        if floor is None:
            return 0
        blocks = floor.controller.get_minimum_stable_blocks(now)
        if floor.former is None or now >= floor.since + self._limits.window_s:
            return blocks
        return max(blocks, floor.former.get_minimum_stable_blocks(now))

    def metrics(self, device: str, capacity_blocks: int, now: float) -> dict[str, Any]:
        """For status; empty without reported requests."""
        floor = self._floors.get(device)
        return {} if floor is None else dict(floor.controller.export_metrics(now, capacity_blocks or None))

    def check_invariants(self) -> None:
        """Asserts that each controller's counts agree."""
        for floor in self._floors.values():
            floor.controller.check_invariants()
        assert len(self._floors) <= self._limits.devices_max
        reported = [floor.reported_at for floor in self._floors.values()]
        assert reported == sorted(reported)

    def _controllers(self, device: str, now: float) -> Iterator[QueueingController]:
        if device not in self._floors:
            self._make_room(device, now)
        floor = self._floors.pop(device, None) or Floor(QueueingController(self._limits.window_s))
        floor.reported_at = now
        self._floors[device] = floor
        if floor.former is not None and now >= floor.since + self._limits.window_s:
            floor.former = None
        yield floor.controller
        if floor.former is not None:
            yield floor.former

    def _make_room(self, device: str, now: float) -> None:
        most = self._limits.devices_max
        if len(self._floors) >= most:
            self.forget(now)
        if len(self._floors) >= most and self._known(device):
            unknown = next((each for each in self._floors if not self._known(each)), None)
            if unknown is not None:
                del self._floors[unknown]
        if len(self._floors) >= most:
            raise LimitReached(
                f"requests of {len(self._floors)} devices are counted, and {most} may be (a fixed limit): "
                f"those of {device!r} are not"
            )
