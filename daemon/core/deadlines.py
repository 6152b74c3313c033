"""When something is due: one deadline a name, changed as often as one likes.

A heap that is corrected lazily: a changed deadline leaves its old entry behind, which is skipped when it comes up. Once
most of the heap is such leftovers, each change takes some of them out. Every operation is O(log n): where many
leftovers come up at once, each takes out LEFTOVERS_MAX and leaves the others to the next.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heappop, heappush
from typing import Final, Generic, TypeVar

from ..policy.thinning import thin

LEFTOVERS_MAX: Final = 16

Name = TypeVar("Name", bound=Hashable)


class Deadlines(Generic[Name]):
    """Times (seconds) by name."""

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
        """The name's deadline from now on."""
        self._changes += 1
        place = self._places[name] = (when, self._changes, name)
        heappush(self._heap, place)
        self._thin()

    def drop(self, name: Name) -> None:
        """The name has no deadline any more; it may have had none."""
        self._places.pop(name, None)
        self._thin()

    def when(self, name: Name) -> float | None:
        """The name's deadline."""
        place = self._places.get(name)
        return None if place is None else place[0]

    def next_timer(self) -> float | None:
        """When to call `pop_due` next: at the earliest deadline, or before it while leftovers are in the way."""
        self._skip_leftovers()
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> Name | None:
        """Takes one name whose deadline is not after `now`, the earliest first. None if there is none, or leftovers are
        in the way: then `next_timer` is not after `now` either."""
        self._skip_leftovers()
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

    def _skip_leftovers(self) -> None:
        for _ in range(LEFTOVERS_MAX):
            if not self._heap or self._is_live(self._heap[0]):
                return
            heappop(self._heap)

    def _thin(self) -> None:
        if len(self._heap) > 2 * len(self._places) + 64:
            self._thinned = thin(self._heap, self._thinned, self._is_live)
