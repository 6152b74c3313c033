"""Spans in order of a rank that only rises, as of last use or of a count of uses.

A heap holds each span once, at the rank that it had when it came: a lower bound of the rank that it has now. So a use
costs nothing here; a place is corrected when it comes to the top.

Owns: which spans may go. Bounded by twice as many places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush, heapreplace
from typing import Final

from .thinning import thin

SPAN_BITS: Final = 64
SPAN: Final = (1 << SPAN_BITS) - 1


class Ranked:
    """Spans that may go. An operation is O(log n) amortised."""

    def __init__(self, rank: Callable[[int], int]) -> None:
        """`rank`: of a span that may go; no two have the same."""
        self._rank = rank
        self._heap: list[int] = []
        self._may_go: dict[int, bool] = {}
        self._standing = 0
        self._thinned = 0

    def __len__(self) -> int:
        return self._standing

    def __contains__(self, span_id: int) -> bool:
        return self._may_go.get(span_id, False)

    def add(self, span_id: int) -> None:
        """The span, which could not go before, may go."""
        assert span_id not in self, span_id
        if span_id not in self._may_go:
            heappush(self._heap, self._place(span_id))
        self._may_go[span_id] = True
        self._standing += 1

    def discard(self, span_id: int) -> None:
        """The span may not go, or is gone. Its place stays until it is looked at."""
        if span_id not in self:
            return
        self._may_go[span_id] = False
        self._standing -= 1
        if len(self._heap) > 2 * self._standing + 64:
            self._thinned = thin(self._heap, self._thinned, self._keeps)

    def lowest(self) -> int | None:
        """The lowest rank."""
        self._correct_top()
        return self._heap[0] >> SPAN_BITS if self._heap else None

    def __iter__(self) -> Iterator[int]:
        """Places, the lowest rank first: `rank << SPAN_BITS | span_id`. Lazy: valid until the next change."""
        self._correct_top()
        # The heap is read in its order without being changed: behind each place come the two below it.
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
        """Asserts that each span that may go stands once, and no higher than its rank."""
        spans = [place & SPAN for place in self._heap]
        assert len(spans) == len(set(spans)) and set(spans) == self._may_go.keys()
        assert self._standing == sum(self._may_go.values())
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
        """Whether the place's span may go. If not, the place is about to be taken out."""
        if self._may_go[place & SPAN]:
            return True
        del self._may_go[place & SPAN]
        return False
