"""A priority queue of spans whose ranks only rise, such as the time of the last use or the number of uses.

A heap has each span once, with the rank that the span had when it was added. That is a lower bound of its current rank.
So a use costs nothing here. An entry of the heap is corrected when it reaches the top.

Owns: the set of spans that may be evicted, and the heap. Does not own the ranks.

Invariant: the heap has at most about twice as many places as there are spans that may be evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush, heapreplace
from typing import Final

from .thinning import thin

SPAN_BITS: Final = 64
SPAN: Final = (1 << SPAN_BITS) - 1


class Ranked:
    """The spans that may be evicted. An operation is O(log n) amortised."""

    def __init__(self, rank: Callable[[int], int]) -> None:
        """`rank`: gives the rank of a span. No two spans have the same rank."""
        self._rank = rank
        self._heap: list[int] = []
        self._may_go: dict[int, bool] = {}
        self._count = 0
        self._thinned = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, span_id: int) -> bool:
        return self._may_go.get(span_id, False)

    def add(self, span_id: int) -> None:
        """Adds a span, which could not be evicted before."""
        assert span_id not in self, span_id
        if span_id not in self._may_go:
            heappush(self._heap, self._place(span_id))
        self._may_go[span_id] = True
        self._count += 1

    def discard(self, span_id: int) -> None:
        """Removes a span, if it is there. Its place in the heap stays until a later operation looks at it."""
        if span_id not in self:
            return
        self._may_go[span_id] = False
        self._count -= 1
        if len(self._heap) > 2 * self._count + 64:
            self._thinned = thin(self._heap, self._thinned, self._keeps)

    def lowest(self) -> int | None:
        """The lowest rank; None if there are no spans."""
        self._correct_top()
        return self._heap[0] >> SPAN_BITS if self._heap else None

    def __iter__(self) -> Iterator[int]:
        """Places, the lowest rank first: `rank << SPAN_BITS | span_id`. Lazy: valid until the next change."""
        self._correct_top()
        # Walks the heap in order without changing it: after each place, its two children become candidates.
        heap, ahead = self._heap, [(self._heap[0], 0)] if self._heap else []
        while ahead:
            place, at = heappop(ahead)
            if at >= 0:
                for below in (2 * at + 1, 2 * at + 2):
                    if below < len(heap):
                        heappush(ahead, (heap[below], below))
            span_id = place & SPAN
            if not self._may_go[span_id]:
                continue
            now = self._place(span_id)
            if now == place:
                yield place
            else:
                heappush(ahead, (now, -1))

    def check_invariants(self) -> None:
        """Asserts that each span is in the heap once, with a rank not above its current one."""
        spans = [place & SPAN for place in self._heap]
        assert len(spans) == len(set(spans)) and set(spans) == self._may_go.keys()
        assert self._count == sum(self._may_go.values())
        assert all(place <= self._place(place & SPAN) for place in self._heap if self._may_go[place & SPAN])

    def _place(self, span_id: int) -> int:
        return self._rank(span_id) << SPAN_BITS | span_id

    def _correct_top(self) -> None:
        heap = self._heap
        while heap:
            if not self._keeps(heap[0]):
                heappop(heap)
            elif (now := self._place(heap[0] & SPAN)) != heap[0]:
                heapreplace(heap, now)
            else:
                return

    def _keeps(self, place: int) -> bool:
        """True if the span at the place may be evicted. If not, forgets the span; the caller removes the place."""
        if self._may_go[place & SPAN]:
            return True
        del self._may_go[place & SPAN]
        return False
