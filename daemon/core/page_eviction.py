"""Which entries to let go so that whole pages of the ring can be given back, by policy and for no more than is wanted.

Pure arithmetic over the ring's map: what a span's end would free, holes, and spans already chosen beside it included.
A span that is large goes alone, in the policy's order. One so small that it frees no page, or next to none, goes with
its neighbours, the colder first, until CLUSTER_PAGES are free in one piece: the ring is not to be riddled.

Invariants: nothing is chosen that frees no page; nothing within `spared`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ...shm.allocator import SpanAllocator

CLUSTER_PAGES: Final = 16


class PageEviction:
    """Spans that are to go, as `add` chose them, and the whole pages that this gives."""

    def __init__(
        self, ring: SpanAllocator, may_go: Callable[[int], bool], warmth: Callable[[int], Any], spans_max: int
    ) -> None:
        """`may_go` and `warmth` (lower is colder) take a span's offset."""
        self._ring = ring
        self._may_go = may_go
        self._warmth = warmth
        self._spans_max = spans_max
        self._high_of: dict[int, int] = {}
        self._low_of: dict[int, int] = {}
        self.spans: dict[int, None] = {}
        self.freed_bytes = 0

    def add(self, offset: int, want_bytes: int) -> None:
        """Chooses the span at `offset`, with neighbours if it is small; nothing where they free no page."""
        if offset in self.spans:
            return
        goal_bytes = min(want_bytes, CLUSTER_PAGES * self._ring.page_bytes)
        spans = [offset]
        low, high, had = self._widened(offset, offset + self._ring.size_at(offset), 0)
        room = self._spans_max - len(self.spans)
        while self._ring.pages_in(low, high) - had < goal_bytes and len(spans) < room:
            left, right = self._neighbour(self._ring.span_before(low)), self._neighbour(high)
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

    def _neighbour(self, offset: int | None) -> int | None:
        return offset if offset is not None and self._ring.is_span(offset) and self._may_go(offset) else None

    def _widened(self, low: int, high: int, had: int) -> tuple[int, int, int]:
        """With what is free, or chosen, at the edges; and `had`, the pages that were free there anyhow, with theirs."""
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
