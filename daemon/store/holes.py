"""The free bytes of the ring: the holes between rows, found by their size.

A hole is named by the row before it, which may be the edge. Best fit: the smallest hole that is large enough, the first
one of equal ones in the order of their rows.

Owns: the holes of a table, and the rows that are put into them. Does not own: the rows in use, nor which are freed.

Invariant: the bytes between two rows in order, if any, are one hole; so no two holes touch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from ...shm.ring.layout import ALIGN_BYTES
from .table import EDGE, FREE, ROW_BITS_MAX, Array, RowTable


class Holes:
    """The holes of a ring of `capacity_bytes`, all of which is free."""

    def __init__(self, table: RowTable, capacity_bytes: int) -> None:
        assert table.count == 0 and capacity_bytes % ALIGN_BYTES == 0
        self._table = table
        self.capacity_bytes = capacity_bytes
        self._by_size: list[int] = []
        """A number for each hole, in order: its bytes, then the row before it."""
        self.total_bytes = 0
        self._put(EDGE, capacity_bytes)

    def __len__(self) -> int:
        return len(self._by_size)

    @property
    def largest_bytes(self) -> int:
        return next(self.largest_first(), (EDGE, 0))[1]

    def take(self, size: int, state: int) -> int:
        """Makes a row of `size` bytes at the beginning of the hole that fits best. Returns the row; EDGE if no hole is
        large enough, or no row is free."""
        rows = self.take_run(size, 1, state)
        return rows[0] if rows else EDGE

    def take_run(self, size: int, most: int, state: int) -> list[int]:
        """Makes up to `most` rows of `size` bytes, one behind the other, in the hole that fits one of them best."""
        at = bisect_left(self._by_size, size << ROW_BITS_MAX)
        if at == len(self._by_size):
            return []
        before = self._by_size.pop(at) & (1 << ROW_BITS_MAX) - 1
        left, low = self.behind(before), self._table.end(before)
        self.total_bytes -= left
        rows: list[int] = []
        while left >= size and len(rows) < most and (row := self._table.add(state, low, size, before)):
            rows.append(row)
            left, low, before = left - size, low + size, row
        self._put(before, left)
        return rows

    def take_behind(self, before: int, size: int, state: int, skipped: int = 0) -> int:
        """`take` in the hole behind a row, whose first `skipped` bytes stay free."""
        hole = self.behind(before)
        left = hole - skipped - size
        assert skipped >= 0 and left >= 0
        row = self._table.add(state, self._table.end(before) + skipped, size, before)
        if row != EDGE:
            self._drop(before, hole)
            self._put(before, skipped)
            self._put(row, left)
        return row

    def largest_first(self) -> Iterator[tuple[int, int]]:
        """The holes: (the row before it, bytes)."""
        for word in reversed(self._by_size):
            yield word & (1 << ROW_BITS_MAX) - 1, word >> ROW_BITS_MAX

    def free(self, row: int) -> None:
        """Frees a row in use. Its bytes and the holes beside it become one hole."""
        table = self._table
        before = table.prevs[row]
        size = table.sizes[row] + self._drop(row, self.behind(row)) + self._drop(before, self.behind(before))
        table.remove(row)
        self._put(before, size)

    def free_all(self, rows: Sequence[int]) -> None:
        """`free` of different rows. Of neighbours one hole is made at once."""
        table, at = self._table, np.array(rows, np.int64)
        at = at[np.argsort(table.column("offsets")[at])]
        behind = self._behind_all(at)
        begins = np.flatnonzero(np.append(True, table.column("prevs")[at[1:]] != at[:-1]))
        for first, last in zip(begins.tolist(), [*begins[1:].tolist(), len(at)], strict=True):
            run: list[int] = at[first:last].tolist()
            before = table.prevs[run[0]]
            self._drop(before, self.behind(before))
            for place in np.flatnonzero(behind[first:last]).tolist():
                self._drop(run[place], int(behind[first + place]))
            table.remove_run(run)
            self._put(before, self.behind(before))

    def cut(self, row: int, size: int) -> None:
        """Frees the bytes of a row behind its first `size`."""
        more = self._table.sizes[row] - size
        assert more >= 0 and size > 0
        self._put(row, more + self._drop(row, self.behind(row)))
        self._table.sizes[row] = size

    def renamed(self, row: int, to: int) -> None:
        """The row `to` ends now where `row` did."""
        self._put(to, self._drop(row, self.behind(to)))

    def swapped(self, row: int, other: int) -> None:
        """Two rows of one size are about to change places."""
        behind, behind_other = self.behind(row), self.behind(other)
        self._drop(row, behind)
        self._drop(other, behind_other)
        self._put(row, behind_other)
        self._put(other, behind)

    def behind(self, row: int) -> int:
        """The bytes of the hole behind a row; 0 if there is none."""
        after = self._table.nexts[row]
        high: int = self._table.offsets[after] if after else self.capacity_bytes
        return high - self._table.end(row)

    def fits(self, sizes: Sequence[int], without: Collection[int]) -> list[bool]:
        """Which of these sizes, given the largest first, find a place if `take` takes one after the other. `without`:
        the rows before holes that are left out."""
        if not sizes:
            return []
        left, rows = self._by_size.copy(), np.fromiter(without, np.int64, len(without))
        behind = self._behind_all(rows)
        for at in np.flatnonzero(behind).tolist():
            del left[bisect_left(left, int(behind[at]) << ROW_BITS_MAX | int(rows[at]))]
        found = []
        for size in sizes:
            at = bisect_left(left, size << ROW_BITS_MAX)
            found.append(at < len(left))
            if at < len(left) and (more := left.pop(at) - (size << ROW_BITS_MAX)) >> ROW_BITS_MAX:
                insort(left, more)
        return found

    def grow(self, capacity_bytes: int) -> None:
        last = self._table.prevs[EDGE]
        self._drop(last, self.behind(last))
        self.capacity_bytes = capacity_bytes
        self._put(last, self.behind(last))

    def found(self, rows: Array, starts: Array, ends: Array) -> None:
        """Finds all holes anew. `rows`: all rows in use, in order, as an earlier daemon left them; and the offsets
        where they start and end."""
        before, low = np.append(EDGE, rows), np.append(0, ends)
        high = np.append(starts, self.capacity_bytes)
        at = np.flatnonzero(high > low)
        sizes = (high[at] - low[at]).tolist()
        self._by_size = sorted(size << ROW_BITS_MAX | row for size, row in zip(sizes, before[at].tolist(), strict=True))
        self.total_bytes = sum(sizes)

    def _behind_all(self, rows: Array) -> Array:
        """`behind` of many rows, (n,) int64."""
        table = self._table
        offsets, after = table.column("offsets"), table.column("nexts")[rows]
        highs = np.where(after == EDGE, np.uint64(self.capacity_bytes), offsets[after])
        found: Array = (highs - offsets[rows] - table.column("sizes")[rows]).astype(np.int64)
        return found

    def _put(self, before: int, size: int) -> None:
        if size:
            insort(self._by_size, size << ROW_BITS_MAX | before)
            self.total_bytes += size

    def _drop(self, before: int, size: int) -> int:
        """Removes the hole of this size behind a row, if it is not 0; returns it."""
        if size:
            del self._by_size[bisect_left(self._by_size, size << ROW_BITS_MAX | before)]
            self.total_bytes -= size
        return size

    def check_invariants(self) -> None:
        table = self._table
        expected = {before: high - low for low, high, before in table.gaps(0, self.capacity_bytes, EDGE)}
        assert self._by_size == sorted(size << ROW_BITS_MAX | row for row, size in expected.items())
        assert self.total_bytes == sum(expected.values())
        assert not any(table.states[row] == FREE for row in expected if row != EDGE)
