"""Chooses entries to evict, by policy, so that whole pages of the ring become free, and few more than needed.

Works on the ring's map alone. The gain of a span counts the pages that its end frees, together with adjacent holes and
adjacent chosen spans. A large span is chosen alone, in the policy's order. A span that would free no page, or almost
none, is chosen together with its neighbours, the colder neighbour first, until CLUSTER_PAGES are free in one piece.
That keeps the number of withdrawn extents small.

Owns the chosen spans and their sum. Does not own which spans are evictable, nor the withdrawal of pages (`residency`).

Invariant: every chosen group of spans frees at least one page.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

from ...shm.allocator import SpanAllocator

CLUSTER_PAGES: Final = 16
"""Small spans are evicted together until this number of pages is free in one piece."""


class PageEviction:
    """The spans chosen by `add`, and the whole pages that their end frees."""

    def __init__(
        self,
        ring: SpanAllocator,
        may_go: Callable[[int, Collection[int]], bool],
        warmth: Callable[[int], Any],
        spans_max: int,
    ) -> None:
        """`may_go` takes a span's offset, and the offsets of the spans that end with it or before it; `warmth` takes a
        span's offset. A lower warmth is colder."""
        self._ring = ring
        self._may_go = may_go
        self._warmth = warmth
        self._spans_max = spans_max
        self._high_of: dict[int, int] = {}
        self._low_of: dict[int, int] = {}
        self.spans: dict[int, None] = {}
        self.freed_bytes = 0

    def add(self, offset: int, want_bytes: int) -> None:
        """Chooses the span at `offset`, with neighbours if it is small. Chooses nothing if that frees no page."""
        if offset in self.spans:
            return
        goal_bytes = min(want_bytes, CLUSTER_PAGES * self._ring.page_bytes)
        spans = [offset]
        low, high, had = self._widened(offset, offset + self._ring.size_at(offset), 0)
        room = self._spans_max - len(self.spans)
        while self._ring.pages_in(low, high) - had < goal_bytes and len(spans) < room:
            left = self._neighbour(self._ring.span_before(low), spans)
            right = self._neighbour(high, spans)
            if left is not None and (right is None or self._warmth(left) < self._warmth(right)):
                spans.append(left)
                low, high, had = self._widened(left, high, had)
            elif right is not None:
                spans.append(right)
                low, high, had = self._widened(low, right + self._ring.size_at(right), had)
            else:
                break
        gained = self._ring.pages_in(low, high) - had
        if gained > 0:
            self._choose(spans, low, high)
            self.freed_bytes += gained

    def _neighbour(self, offset: int | None, spans: list[int]) -> int | None:
        if offset is None or not self._ring.is_span(offset):
            return None
        return offset if self._may_go(offset, {*self.spans, *spans}) else None

    def _widened(self, low: int, high: int, had: int) -> tuple[int, int, int]:
        """The stretch [low, high) extended by adjacent holes and chosen stretches, and `had` increased by the pages
        that are free in them anyway."""
        below = self._low_of.get(low)
        if below is None:
            below = self._ring.hole_before(low)
        if below is not None:
            had += self._ring.pages_in(below, low)
            low = below
        above = self._high_of.get(high)
        if above is None:
            above = high + self._ring.hole_bytes(high)
        had += self._ring.pages_in(high, above)
        return low, above, had

    def _choose(self, spans: list[int], low: int, high: int) -> None:
        self.spans.update(dict.fromkeys(spans))
        self._high_of[low] = high
        self._low_of[high] = low
