"""Deadlines by name: one deadline for each name, which may be changed at any time.

A heap with lazy deletion: a changed deadline leaves its old heap entry behind, which is skipped when it reaches the
top. Once most of the heap is outdated, each change removes some outdated entries. Every operation is O(log n): of many
outdated entries at the top, one call removes OUTDATED_MAX and leaves the rest to later calls.

Owns the deadlines. Does not own the clock nor what a deadline causes.

Invariant: every deadline is in the heap.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heappop, heappush
from typing import Final, Generic, TypeVar

from .thinning import thin

OUTDATED_MAX: Final = 16
"""Outdated entries that one call removes."""

Name = TypeVar("Name", bound=Hashable)


class Deadlines(Generic[Name]):
    """Deadlines in seconds, by name."""

    def __init__(self) -> None:
        self._places: dict[Name, tuple[float, int, Name]] = {}
        self._heap: list[tuple[float, int, Name]] = []
        self._changes = 0
        self._thinned = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: Name) -> bool:
        return name in self._places

    def set(self, name: Name, when: float) -> None:
        """Sets the name's deadline."""
        self._changes += 1
        place = self._places[name] = (when, self._changes, name)
        heappush(self._heap, place)
        self._thin()

    def drop(self, name: Name) -> None:
        """Removes the name's deadline, if it has one."""
        self._places.pop(name, None)
        self._thin()

    def when(self, name: Name) -> float | None:
        """The name's deadline; None if it has none."""
        place = self._places.get(name)
        return None if place is None else place[0]

    def next_timer(self) -> float | None:
        """When to call `pop_due` next: at the earliest deadline, or earlier while outdated entries are at the top."""
        self._drop_outdated()
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> Name | None:
        """Removes one name whose deadline is not after `now`, the earliest first. None if there is none, or if outdated
        entries are at the top; `next_timer` is not after `now` then."""
        self._drop_outdated()
        if not self._heap or self._heap[0][0] > now or not self._is_live(self._heap[0]):
            return None
        name = heappop(self._heap)[2]
        del self._places[name]
        return name

    def check_invariants(self) -> None:
        """Asserts that every deadline can still come up."""
        assert set(self._places.values()) <= set(self._heap), "a deadline is not in the heap"

    def _is_live(self, place: tuple[float, int, Name]) -> bool:
        return self._places.get(place[2]) is place

    def _drop_outdated(self) -> None:
        for _ in range(OUTDATED_MAX):
            if not self._heap or self._is_live(self._heap[0]):
                return
            heappop(self._heap)

    def _thin(self) -> None:
        if len(self._heap) > 2 * len(self._places) + 64:
            self._thinned = thin(self._heap, self._thinned, self._is_live)
