"""The rows of a store: one for each stretch of the ring that is in use, as columns of numbers.

    row → state, span id, offset, size, slot, …        rows in the order of their offsets: ⇄ next, before

A row is an entry, a grant, or a span that waits for a scan. There is no object for it: a put writes a dozen numbers.
A span id says its row: id = epoch, then a count of uses of the row, then the row. So the ids in access logs and pins
lead to rows without a table.

Owns: the columns, the rows that are free, the order of rows by offset, and the row of each key. Does not own: the bytes
between rows (`room`), the index's slots (`slots`), nor what a state means to a put.

Invariants: a row is in the order of offsets exactly while its state is not FREE. Rows in use do not overlap. A span id
is never used twice: the count of a row rises with each use, and the epoch with each daemon. A key has at most one row
in state LIVE or VICTIM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from ...shm.ring.layout import EPOCH_MAX, SPAN_COUNTER_BITS

FREE: Final = 0
LIVE: Final = 1
"""A published entry."""
VICTIM: Final = 2
"""An entry that was unpublished to make room: a scan ends it, or has it published again if it is pinned."""
ENDED: Final = 3
"""A span whose entry is gone: free after a scan that finds no pin."""
LENT: Final = 4
"""A grant: a client may write there."""
REVOKED: Final = 5
"""A grant that was taken back: free after a scan that finds no pin."""
WITHDRAWN: Final = 6
"""Whole pages that the system has, or gets now (daemon/host_memory)."""

EDGE: Final = 0
"""The row before the first and behind the last one: the edges of the ring."""
ROW_BITS_MAX: Final = 26

Array = np.ndarray[Any, Any]
U2: TypeAlias = memoryview
U4: TypeAlias = memoryview
U8: TypeAlias = memoryview
F4: TypeAlias = "memoryview[float]"
F8: TypeAlias = "memoryview[float]"
"""Columns, by their kinds of numbers: `RowTable.__annotations__` says the kind of each column."""


class RowTable:
    """The rows of one store. `row_bits`: there are 2 ** row_bits rows, of which row 0 is the edge.

    Each column is a memoryview for single numbers; `column(name)` is the same memory as an array, for batches. Pages of
    a column take memory once they are written.
    """

    span_ids: U8
    offsets: U8
    sizes: U8  # bytes of the ring, with the span's header
    payloads: U8
    digests: U8  # of the key, for the policy
    befores: U8  # bytes of the ancestors
    ends: F8  # when to look whether the entry has expired; 0: never (daemon/lifetimes/expiry)
    costs: F4  # ms
    tokens: U4
    slots: U4
    nexts: U4
    prevs: U4
    parents: U4
    children: U4  # published ones
    firsts: U4  # the newest child, and its neighbours in the list of children (families)
    olders: U4
    newers: U4
    namespaces: U4
    records: U4  # bytes of the block's record; 0: no block
    owners: U2
    agents: U2
    depths: U2

    def __init__(self, row_bits: int, epoch: int) -> None:
        assert 0 < row_bits <= ROW_BITS_MAX and 0 < epoch <= EPOCH_MAX, (row_bits, epoch)
        self.row_mask = (1 << row_bits) - 1
        self.row_bits = row_bits
        self._arrays: dict[str, Array] = {}
        for name, kind in RowTable.__annotations__.items():
            array = self._arrays[name] = np.zeros(1 << row_bits, kind.lower())
            setattr(self, name, array.data)
        self.states = bytearray(1 << row_bits)
        self.by_key: dict[bytes, int] = {}
        self._own: dict[int, int] = {}
        """The last ids of their own of rows that have the span id of a moved entry: of its old place."""
        self._epoch = epoch << SPAN_COUNTER_BITS
        self._free: list[int] = []
        self._never_used = 1
        self.count = 0
        """Rows in use."""

    @property
    def top(self) -> int:
        """Above all rows that were ever in use."""
        return self._never_used

    def column(self, name: str) -> Array:
        """A column as an array, (rows,)."""
        return self._arrays[name]

    def row_of(self, span_id: int) -> int:
        """The row of a span id; EDGE if there is none, or the entry has moved since."""
        row = span_id & self.row_mask
        return row if self.span_ids[row] == span_id else EDGE

    def add(self, state: int, offset: int, size: int, before: int) -> int:
        """Takes a row for [offset, offset + size), which stands behind the row `before`, and gives it a new span id.
        Returns the row; EDGE if all are in use."""
        if self._free:
            row = self._free.pop()
        elif self._never_used <= self.row_mask:
            row = self._never_used
            self._never_used += 1
        else:
            return EDGE
        nexts, prevs = self.nexts, self.prevs
        after = nexts[before]
        nexts[before] = prevs[after] = row
        nexts[row], prevs[row] = after, before
        self.states[row] = state
        self.offsets[row], self.sizes[row] = offset, size
        self.renew(row)
        self.count += 1
        return row

    def renew(self, row: int) -> int:
        """Gives a row in use a span id that was never used, and returns it."""
        used: int = self.span_ids[row] + self.row_mask + 1
        if self._own or used <= self._epoch:
            used = self.next_id(row)
            self._own.pop(row, None)
        self.span_ids[row] = used
        return used

    def renew_all(self, rows: Array) -> Array:
        """`renew` of different rows, (n,) uint64."""
        ids = self.column("span_ids")
        used: Array = ids[rows] + np.uint64(self.row_mask + 1)
        if self._own or (used <= self._epoch).any():
            return np.array([self.renew(row) for row in rows.tolist()], np.uint64)
        ids[rows] = used
        return used

    def next_id(self, row: int) -> int:
        """The span id that `renew` gives the row next."""
        last: int = self._own.get(row) or self.span_ids[row]
        return max(last, self._epoch | row) + self.row_mask + 1

    def swap(self, row: int, place: int) -> None:
        """An entry moves: `row` gets the bytes of `place`, and its next span id; `place` gets the bytes that the entry
        had, with the span id that readers have pinned."""
        nexts, prevs, offsets, span_ids = self.nexts, self.prevs, self.offsets, self.span_ids
        assert self.sizes[row] == self.sizes[place]
        next_id, last_id = self.next_id(row), span_ids[row]
        self._own.pop(row, None)
        self._own[place] = span_ids[place]
        span_ids[row], span_ids[place] = next_id, last_id
        offsets[row], offsets[place] = offsets[place], offsets[row]
        first, second = (place, row) if nexts[place] == row else (row, place)
        before, after = prevs[first], nexts[second]
        if nexts[first] == second:
            nexts[second], prevs[first] = first, second
        else:
            behind, ahead = nexts[first], prevs[second]
            nexts[second], prevs[first] = behind, ahead
            prevs[behind], nexts[ahead] = second, first
        prevs[second], nexts[first] = before, after
        nexts[before], prevs[after] = second, first

    def remove(self, row: int) -> None:
        """Frees a row. Its span id stays in the column, so that the next use of the row has another."""
        nexts, prevs = self.nexts, self.prevs
        before, after = prevs[row], nexts[row]
        nexts[before], prevs[after] = after, before
        self.states[row] = FREE
        self._free.append(row)
        self.count -= 1

    def remove_run(self, rows: Sequence[int]) -> None:
        """`remove` of neighbours, in their order."""
        before, after = self.prevs[rows[0]], self.nexts[rows[-1]]
        self.nexts[before], self.prevs[after] = after, before
        for row in rows:
            self.states[row] = FREE
        self._free += rows
        self.count -= len(rows)

    def reserve(self, used: Array) -> None:
        """Takes the rows that are marked in `used`, (rows,) bool, for a recovery, which fills and orders them."""
        last = int(np.flatnonzero(used)[-1])
        self._never_used = last + 1
        self._free = np.flatnonzero(~used[: last + 1])[::-1].tolist()

    def gaps(self, low: int, high: int, before: int) -> list[tuple[int, int, int]]:
        """The stretches of [low, high) that no row has: (low, high, the row before). `before`: a row that ends at or
        before `low`, or the edge; the search begins there."""
        found, at = [], low
        row: int = self.nexts[before]
        while row != EDGE and self.offsets[row] < high:
            if self.offsets[row] > at:
                found.append((at, self.offsets[row], before))
            at, before = max(at, self.end(row)), row
            row = self.nexts[row]
        if at < high:
            found.append((at, high, before))
        return found

    def end(self, row: int) -> int:
        end: int = self.offsets[row] + self.sizes[row]
        return end

    def in_order(self) -> Iterator[int]:
        """The rows in use in the order of their offsets. For recovery and tests."""
        row: int = self.nexts[EDGE]
        while row != EDGE:
            yield row
            row = self.nexts[row]

    def check_invariants(self) -> None:
        rows = list(self.in_order())
        assert sorted(rows) == [row for row, state in enumerate(self.states) if state != FREE]
        assert len(rows) == self.count == len({self.span_ids[row] for row in rows})
        for before, row in zip([EDGE, *rows], [*rows, EDGE], strict=True):
            assert self.prevs[row] == before
            assert row == EDGE or self.offsets[row] >= self.end(before), "rows overlap"
        for row in rows:
            assert self.sizes[row] > 0
            assert self.row_of(self.span_ids[row]) == (EDGE if row in self._own else row)
        assert set(self.by_key.values()) == {row for row in rows if self.states[row] == LIVE}
