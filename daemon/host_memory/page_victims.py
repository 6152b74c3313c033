"""Chooses entries to evict, by policy, so that whole pages of the ring become free, and few more than needed.

The gain of a row counts the pages that its end frees, together with adjacent holes and adjacent chosen rows. A large
row is chosen alone, in the policy's order. A row that would free no page, or almost none, is chosen together with its
neighbours, the colder neighbour first, until CLUSTER_PAGES are free in one piece. That keeps the number of withdrawn
rows small.

Owns: the chosen rows and their sum. Does not own which rows are evictable, nor the withdrawal of pages (`residency`).

Invariant: every chosen group of rows frees at least one page.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

from ...shm.ring.layout import PAGE_BYTES
from ..store.holes import Holes
from ..store.table import EDGE, LIVE, RowTable
from .withdrawn import pages_in

CLUSTER_PAGES: Final = 16
"""Small rows are evicted together until this number of pages is free in one piece."""


class PageVictims:
    """The rows chosen by `add`, and the whole pages that their end frees.

    Args:
        may_go: takes a row, and the rows that end with it or before it.
        warmth: of a row; lower is colder.
    """

    def __init__(
        self,
        table: RowTable,
        holes: Holes,
        may_go: Callable[[int, Collection[int]], bool],
        warmth: Callable[[int], Any],
        rows_max: int,
    ) -> None:
        self._table = table
        self._holes = holes
        self._may_go = may_go
        self._warmth = warmth
        self._rows_max = rows_max
        self.rows: dict[int, None] = {}
        self.freed_bytes = 0

    def add(self, row: int, want_bytes: int) -> None:
        """Chooses a row, with neighbours if it is small. Chooses nothing if that frees no page."""
        if row in self.rows:
            return
        goal_bytes = min(want_bytes, CLUSTER_PAGES * PAGE_BYTES)
        table, chosen = self._table, {row}
        first, last = self._widened(row, row)
        self.rows[row] = None
        while len(self.rows) < self._rows_max and self._gain(first, last, chosen, goal_bytes) < goal_bytes:
            left, right = self._neighbour(table.prevs[first]), self._neighbour(table.nexts[last])
            if left == right == EDGE:
                break
            if left != EDGE and (right == EDGE or self._warmth(left) < self._warmth(right)):
                row, (first, last) = left, self._widened(left, last)
            else:
                row, (first, last) = right, self._widened(first, right)
            chosen.add(row)
            self.rows[row] = None
        gained = self._gain(first, last, chosen)
        if gained > 0:
            self.freed_bytes += gained
        else:
            for row in chosen:
                del self.rows[row]

    def _neighbour(self, row: int) -> int:
        return row if row != EDGE and self._table.states[row] == LIVE and self._may_go(row, self.rows) else EDGE

    def _widened(self, first: int, last: int) -> tuple[int, int]:
        """The rows from `first` to `last` with adjacent rows that were chosen before."""
        table = self._table
        while table.prevs[first] in self.rows:
            first = table.prevs[first]
        while table.nexts[last] in self.rows:
            last = table.nexts[last]
        return first, last

    def _gain(self, first: int, last: int, chosen: set[int], least: int = 0) -> int:
        """Bytes of whole pages from the row before `first` to the one behind `last` that come free with `chosen`, and
        are not free without. 0 if they are fewer than `least` for sure."""
        table, after = self._table, self._table.nexts[last]
        low, high = table.end(table.prevs[first]), table.offsets[after] if after != EDGE else self._holes.capacity_bytes
        all_bytes, had_bytes, row = pages_in(low, high), 0, first
        if all_bytes < least:
            return 0
        while True:
            if row in chosen:
                had_bytes += pages_in(low, table.offsets[row])
                low = table.end(row)
            if row == last:
                return all_bytes - had_bytes - pages_in(low, high)
            row = table.nexts[row]
