"""Deadlines by name: one deadline for each name, which may be changed at any time.

A heap with lazy deletion: a changed deadline leaves its old heap entry behind, which is skipped when it reaches the
top. Once more than half of the heap is outdated it is built anew, so every operation is O(log n) on average.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeVar

OUTDATED_MIN: Final = 64
"""Outdated entries below which the heap is not built anew."""

Name = TypeVar("Name", bound=Hashable)


class Deadlines(Generic[Name]):
    """Deadlines in seconds, by name."""

    def __init__(self) -> None:
        self._places: dict[Name, tuple[float, int, Name]] = {}
        self._heap: list[tuple[float, int, Name]] = []
        self._changes = 0

    def __len__(self) -> int:
        return len(self._places)

    def set(self, name: Name, when: float) -> None:
        self._changes += 1
        place = self._places[name] = (when, self._changes, name)
        heappush(self._heap, place)
        self._thin()

    def drop(self, name: Name) -> None:
        self._places.pop(name, None)
        self._thin()

    def when(self, name: Name) -> float | None:
        place = self._places.get(name)
        return None if place is None else place[0]

    def next_timer(self) -> float | None:
        """When to call `pop_due` next: at the earliest deadline."""
        while self._heap and self._places.get(self._heap[0][2]) is not self._heap[0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> Name | None:
        """Removes one name whose deadline is not after `now`, the earliest first. None if there is none."""
        due = self.next_timer()
        if due is None or due > now:
            return None
        name = heappop(self._heap)[2]
        del self._places[name]
        return name

    def _thin(self) -> None:
        if len(self._heap) > 2 * len(self._places) + OUTDATED_MIN:
            self._heap = list(self._places.values())
            heapify(self._heap)
