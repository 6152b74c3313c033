"""Queueing floors: how many blocks each device needs so that its requests do not queue up without end.

Owns: one queueing controller a device, made when a client first says something of its requests; a second one while a
changed window fills. Does not own the formula (`policy.queueing`), nor what a floor forbids (devices).

Invariant: a changed window lowers no floor before it has been seen for its whole length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ....errors import LimitReached
from ....ipc import messages
from ...policy.queueing import QueueingController
from .limits import GovernorLimits


@dataclass(slots=True)
class Floor:
    """One device's. `former` counts by the window of before, until `since` + window_s."""

    controller: QueueingController
    former: QueueingController | None = None
    since: float = 0.0


class Floors:
    """What clients say of their inference requests, by device."""

    def __init__(self, limits: GovernorLimits) -> None:
        self._limits = limits
        self._floors: dict[str, Floor] = {}

    def change_limits(self, limits: GovernorLimits, now: float) -> None:
        """Another window begins beside the one that there is."""
        if limits.window_s != self._limits.window_s:
            for floor in self._floors.values():
                former = floor.former or floor.controller
                floor.former, floor.controller, floor.since = former, QueueingController(limits.window_s), now
        self._limits = limits

    def devices(self) -> set[str]:
        """Those of which clients have said something."""
        return set(self._floors)

    def arrived(self, message: messages.RequestsArrived, now: float) -> None:
        """Raises LimitReached for one device too many; devices_max is named."""
        for controller in self._controllers(message.device, now):
            controller.record_request_arrival(now, message.count)

    def completed(self, message: messages.RequestCompleted, now: float) -> None:
        """Raises LimitReached for one device too many; devices_max is named."""
        for controller in self._controllers(message.device, now):
            controller.record_request_completion(now, message.service_s, message.blocks)

    def blocks(self, device: str, now: float) -> int:
        """Fewer than so many a device's entries must not take up; 0: nothing is known."""
        floor = self._floors.get(device)
        if floor is None:
            return 0
        blocks = floor.controller.get_minimum_stable_blocks(now)
        if floor.former is None or now >= floor.since + self._limits.window_s:
            return blocks
        return max(blocks, floor.former.get_minimum_stable_blocks(now))

    def metrics(self, device: str, capacity_blocks: int, now: float) -> dict[str, Any]:
        """For status; empty where nothing is known."""
        floor = self._floors.get(device)
        return {} if floor is None else dict(floor.controller.export_metrics(now, capacity_blocks or None))

    def check_invariants(self) -> None:
        """Asserts that each controller's counts agree."""
        for floor in self._floors.values():
            floor.controller.check_invariants()

    def _controllers(self, device: str, now: float) -> Iterator[QueueingController]:
        floor = self._floors.get(device)
        if floor is None:
            if len(self._floors) >= self._limits.devices_max:
                raise LimitReached(
                    f"requests of {len(self._floors)} devices are counted, and devices_max is "
                    f"{self._limits.devices_max}: those of {device!r} are not"
                )
            floor = self._floors[device] = Floor(QueueingController(self._limits.window_s))
        if floor.former is not None and now >= floor.since + self._limits.window_s:
            floor.former = None
        yield floor.controller
        if floor.former is not None:
            yield floor.former
