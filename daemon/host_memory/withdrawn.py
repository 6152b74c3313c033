"""The stretches of the ring that the system has: rows in state WITHDRAWN, which are whole pages.

    hole ── withdraw_some ──→ WITHDRAWN row ── restore ──→ hole

Invariants: a WITHDRAWN row has whole pages; no two of them touch. `size_bytes` is their sum.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ...shm.ring.layout import PAGE_BYTES
from ..store.holes import Holes
from ..store.table import EDGE, WITHDRAWN, RowTable

LOOKS_MAX: Final = 256
"""Holes smaller than two pages that one search for a whole page examines."""


def page_at(offset: int) -> int:
    """Where the page of a byte begins."""
    return offset // PAGE_BYTES * PAGE_BYTES


def paged(size_bytes: int) -> int:
    """Rounded up to whole pages."""
    return page_at(size_bytes + PAGE_BYTES - 1)


def pages_in(low: int, high: int) -> int:
    """Total bytes of the whole pages within [low, high)."""
    return max(0, page_at(high) - paged(low))


class Withdrawn:
    """The withdrawn rows of one ring."""

    def __init__(self, table: RowTable, holes: Holes) -> None:
        self._table = table
        self._holes = holes
        self.rows: dict[int, None] = {}
        self.size_bytes = 0

    def found(self) -> None:
        """Takes over the rows that a recovery left."""
        states = np.frombuffer(self._table.states, np.uint8)
        for row in np.flatnonzero(states == WITHDRAWN).tolist():
            self.size_bytes += self._table.sizes[row]
            self.rows[row] = None
            self._merge(row)

    def withdraw_some(self, most_bytes: int, spared: tuple[int, int]) -> tuple[int, int] | None:
        """Withdraws up to `most_bytes` in whole pages from the largest hole, if possible next to a withdrawn row, and
        nothing in the range [low, high) `spared`. Returns (offset, bytes), or None if no examined hole has such a page.
        """
        table, looks = self._table, 0
        for before, size in self._holes.largest_first():
            if size < PAGE_BYTES or looks >= LOOKS_MAX:
                return None
            looks += size < 2 * PAGE_BYTES
            start = table.end(before)
            low, high = self._outside(start, start + size, spared)
            if low >= high:
                continue
            take = min(high - low, most_bytes)
            if table.states[table.nexts[before]] == WITHDRAWN and high == table.offsets[table.nexts[before]]:
                low = high - take
            row = self._holes.take_behind(before, take, WITHDRAWN, skipped=low - start)
            if row == EDGE:
                return None
            self.rows[row] = None
            self.size_bytes += take
            self._merge(row)
            return low, take
        return None

    def restore(self, offset: int, size_bytes: int) -> None:
        """Makes withdrawn bytes a hole again. The caller has allocated their pages again."""
        table = self._table
        row = next(row for row in self.rows if table.offsets[row] <= offset < table.end(row))
        end, before = table.end(row), row
        assert offset + size_bytes <= end, f"{offset} is not withdrawn"
        if offset == table.offsets[row]:
            before = table.prevs[row]
            del self.rows[row]
            self._holes.free(row)
        else:
            self._holes.cut(row, offset - table.offsets[row])
        if end > offset + size_bytes:
            skipped = offset + size_bytes - table.end(before)
            rest = self._holes.take_behind(before, end - offset - size_bytes, WITHDRAWN, skipped)
            assert rest != EDGE, "no row is free for withdrawn pages"
            self.rows[rest] = None
        self.size_bytes -= size_bytes

    def restorable(self, most_bytes: int) -> tuple[int, int] | None:
        """Up to `most_bytes` of the smallest withdrawn row, as the next bytes to restore: (offset, bytes), or None if
        nothing is withdrawn. Few large ones remain."""
        table = self._table
        row = min(self.rows, key=lambda row: (table.sizes[row], row), default=EDGE)
        if row == EDGE:
            return None
        take = min(table.sizes[row], most_bytes)
        # Next to a hole, if there is one.
        begins = table.end(table.prevs[row]) < table.offsets[row]
        return (table.offsets[row] if begins else table.end(row) - take), take

    def within(self, low: int, high: int) -> list[tuple[int, int]]:
        """(offset, bytes) of the withdrawn pages of [low, high), in order, in whole pages."""
        table = self._table
        parts = [(max(table.offsets[row], page_at(low)), min(table.end(row), paged(high))) for row in self.rows]
        return sorted((first, last - first) for first, last in parts if first < last)

    def window(self, size_bytes: int) -> tuple[int, int] | None:
        """The narrowest range of at least `size_bytes` that has only withdrawn rows and holes; None if there is
        none."""
        table, found = self._table, None
        for first in self.rows:
            if table.prevs[first] in self.rows:
                continue
            last = first
            while table.nexts[last] in self.rows:
                last = table.nexts[last]
            after = table.nexts[last]
            low, high = table.end(table.prevs[first]), table.offsets[after] if after else self._holes.capacity_bytes
            if high - low >= size_bytes and (found is None or high - low < found[1] - found[0]):
                found = low, high
        return found

    def narrowed(self, low: int, high: int, size_bytes: int) -> tuple[int, int]:
        """The part of [low, high) that has `size_bytes`, and the fewest withdrawn pages."""
        pages = self.within(low, high)
        begins = {low, high - size_bytes, *(at + size for at, size in pages), *(at - size_bytes for at, _ in pages)}
        parts = [
            (max(low, page_at(at)), min(high, paged(at + size_bytes)))
            for at in sorted(begins)
            if low <= at <= high - size_bytes
        ]
        return min(parts, key=lambda part: sum(size for _, size in self.within(*part)))

    def _merge(self, row: int) -> None:
        table = self._table
        for first, second in ((row, table.nexts[row]), (table.prevs[row], row)):
            if first in self.rows and second in self.rows and table.end(first) == table.offsets[second]:
                table.sizes[first] += table.sizes[second]
                table.remove(second)
                self._holes.renamed(second, first)
                del self.rows[second]

    def _outside(self, low: int, high: int, spared: tuple[int, int]) -> tuple[int, int]:
        """The whole pages of the larger part of [low, high) outside `spared`."""
        parts = [(paged(low), page_at(min(high, spared[0]))), (paged(max(low, spared[1])), page_at(high))]
        return max(parts, key=lambda part: part[1] - part[0])

    def check_invariants(self) -> None:
        table = self._table
        assert set(self.rows) == {row for row in table.in_order() if table.states[row] == WITHDRAWN}
        assert self.size_bytes == sum(table.sizes[row] for row in self.rows)
        for row in self.rows:
            assert table.sizes[row] % PAGE_BYTES == table.offsets[row] % PAGE_BYTES == 0
            assert table.nexts[row] not in self.rows or table.end(row) < table.offsets[table.nexts[row]]
