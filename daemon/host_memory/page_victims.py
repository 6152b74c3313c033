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

from ..store.holes import Holes
from ..store.table import EDGE, LIVE, RowTable
from .withdrawn import Withdrawn

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
        withdrawn: Withdrawn,
        may_go: Callable[[int, Collection[int]], bool],
        warmth: Callable[[int], Any],
        rows_max: int,
    ) -> None:
        self._table = table
        self._holes = holes
        self._pages_in = withdrawn.pages_in
        self._page_bytes = withdrawn.page_bytes
        self._may_go = may_go
        self._warmth = warmth
        self._rows_max = rows_max
        self._stretch_at: dict[int, tuple[int, int]] = {}
        """By its first and by its last row: a chosen stretch, as its first and last rows."""
        self.rows: dict[int, None] = {}
        self.freed_bytes = 0

    def add(self, row: int, want_bytes: int) -> None:
        """Chooses a row, with neighbours if it is small. Chooses nothing if that frees no page."""
        if row in self.rows:
            return
        goal_bytes = min(want_bytes, CLUSTER_PAGES * self._page_bytes)
        chosen = [row]
        first, last, had = self._widened(row, row, self._hole_pages(row))
        room = self._rows_max - len(self.rows)
        while self._free_if(first, last) - had < goal_bytes and len(chosen) < room:
            left = self._neighbour(self._table.prevs[first], chosen)
            right = self._neighbour(self._table.nexts[last], chosen)
            if left != EDGE and (right == EDGE or self._warmth(left) < self._warmth(right)):
                chosen.append(left)
                had += self._hole_before(left)
                first, last, had = self._widened(left, last, had)
            elif right != EDGE:
                chosen.append(right)
                had += self._hole_behind(right)
                first, last, had = self._widened(first, right, had)
            else:
                break
        gained = self._free_if(first, last) - had
        if gained > 0:
            self.rows.update(dict.fromkeys(chosen))
            self._stretch_at[first] = self._stretch_at[last] = first, last
            self.freed_bytes += gained

    def _neighbour(self, row: int, chosen: list[int]) -> int:
        if row == EDGE or self._table.states[row] != LIVE or not self._may_go(row, {*self.rows, *chosen}):
            return EDGE
        return row

    def _widened(self, first: int, last: int, had: int) -> tuple[int, int, int]:
        """The rows from `first` to `last` with adjacent chosen stretches, and `had` increased by the pages that these
        free anyway. The holes around them are counted already at one of their sides."""
        before, behind = self._table.prevs[first], self._table.nexts[last]
        if before in self.rows:
            begin, _ = self._stretch_at[before]
            had += self._free_if(begin, before) - self._hole_before(first)
            first = begin
        if behind in self.rows:
            _, end = self._stretch_at[behind]
            had += self._free_if(behind, end) - self._hole_behind(last)
            last = end
        return first, last, had

    def _hole_pages(self, row: int) -> int:
        return self._hole_before(row) + self._hole_behind(row)

    def _hole_before(self, row: int) -> int:
        return self._pages_in(self._table.end(self._table.prevs[row]), self._table.offsets[row])

    def _hole_behind(self, row: int) -> int:
        return self._pages_in(self._table.end(row), self._high(row))

    def _free_if(self, first: int, last: int) -> int:
        """Bytes of whole pages that are free once the rows from `first` to `last` have gone."""
        return self._pages_in(self._table.end(self._table.prevs[first]), self._high(last))

    def _high(self, row: int) -> int:
        """Where the row behind `row` begins."""
        after = self._table.nexts[row]
        begins: int = self._table.offsets[after] if after != EDGE else self._holes.capacity_bytes
        return begins
