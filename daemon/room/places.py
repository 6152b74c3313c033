"""The free places of a ring: what is left under the limits, places that are ready to be lent, and how many to make.

    freed rows ─ of a size that was lent lately → places, lent again as they are: no search, no hole is cut
               └ of any other size, or while a request waits for a hole → holes

As much is kept free as was asked for since the last round, twice over: at most 1/AHEAD_SHARE of the ring. Entries of
one size need no more. With mixed sizes, more is made when a request finds no hole (`ways`).

Owns: the places, and the amounts to keep free. Does not own: holes (`Holes`), limits, nor who gets a place.

Invariant: a place is a row in state ENDED without a slot, which no owner has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final

import numpy as np

from ..forms.limits import RingBudget
from ..store.entries import Entries, OverEntries
from ..store.table import EDGE, ENDED

AHEAD_SHARE: Final = 128
LARGE_SHARE: Final = 32
"""Or one place of a size that was asked for, of up to 1/LARGE_SHARE of the ring. For larger ones room is made when
they are asked for."""
FULL_SHARE: Final = 16
"""With less than 1/FULL_SHARE free, a store is full. More than what a round frees."""
TWICE_SHARE: Final = 90
"""Or two of a size, together up to 1/TWICE_SHARE of the ring: one round makes both."""
AHEAD_MAX: Final = 256
"""Entries that are kept free."""
SIZES_MAX: Final = 8
"""Sizes whose places are kept as they are."""


class FreePlaces(OverEntries):
    """The free places of one ring. `budget`: the limits in force; others change it. `withdrawn`: the bytes of the ring
    that the system has."""

    def __init__(self, entries: Entries, budget: RingBudget, withdrawn: Callable[[], int]) -> None:
        super().__init__(entries)
        self._budget = budget
        self._withdrawn = withdrawn
        self._ready: dict[int, list[int]] = {}
        """Rows by size."""
        self.ready_bytes = 0
        self._sizes: dict[int, None] = {}
        """The sizes that were lent lately."""
        self._asked_bytes = self._asked = 0
        """Since the last round began."""
        self.ahead_bytes = self.ahead = 0
        """What is to be free: bytes, and entries."""
        self.owner = 0
        """The owner that asked last."""
        self.keeps = True
        """Whether freed rows may stay as they are: no request waits for a hole."""

    @property
    def used_bytes(self) -> int:
        """Bytes of the ring that are not free: of entries, of grants, and of what waits for a scan."""
        holes = self._holes
        return holes.capacity_bytes - holes.total_bytes - self.ready_bytes - self._withdrawn()

    @property
    def left_bytes(self) -> int:
        """Bytes that can be lent now, as far as limits are concerned."""
        return min(self._holes.total_bytes + self.ready_bytes, self._budget.put_bytes_max - self.used_bytes)

    @property
    def left_entries(self) -> int:
        """Entries that can be stored besides those of all grants."""
        table = self._table
        left = self._budget.max_entries - self._tenants.total_entries - self._grants.lent
        return min(left, table.row_mask - table.count)

    @property
    def is_full(self) -> bool:
        """Whether there is little more room than is made ahead of requests: what is stored now costs other entries."""
        limit_bytes = min(self._holes.capacity_bytes, self._budget.put_bytes_max)
        return self.left_bytes * FULL_SHARE <= limit_bytes or self.left_entries * FULL_SHARE <= self._budget.max_entries

    @property
    def largest_bytes(self) -> int:
        """Of the stretches that are free: places and the holes beside them count as one."""
        table, holes, ready = self._table, self._holes, {row for some in self._ready.values() for row in some}
        most = holes.largest_bytes
        for row in ready:
            before, last = table.prevs[row], row
            if before not in ready:
                while table.nexts[last] in ready:
                    last = table.nexts[last]
                most = max(most, table.end(last) + holes.behind(last) - table.end(before))
        return most

    def asked(self, sizes: Sequence[int], owner: int) -> None:
        """An owner asks for places of these sizes; so the next round makes as much room again."""
        capacity = self._holes.capacity_bytes
        if max(sizes) > capacity // LARGE_SHARE:
            return
        self.owner = owner
        self._asked += len(sizes)
        self._asked_bytes += sum(sizes)
        largest = max(sizes)
        most = max(capacity // AHEAD_SHARE, largest * (2 if 2 * largest * TWICE_SHARE <= capacity else 1))
        self.ahead_bytes = min(max(self.ahead_bytes, 2 * self._asked_bytes), most)
        self.ahead = min(max(self.ahead, 2 * self._asked), self._budget.max_entries // AHEAD_SHARE, AHEAD_MAX)

    def take(self, size: int) -> int:
        """A row of `size` bytes in state ENDED, which the caller lends, or frees. Returns EDGE if a limit is reached,
        or no hole is large enough."""
        if size > self.left_bytes or self.left_entries <= 0:
            return EDGE
        if rows := self._ready.get(size):
            self.ready_bytes -= size
            return rows.pop()
        row = self._holes.take(size, ENDED)
        if not row and self.ready_bytes:
            self.join()
            row = self._holes.take(size, ENDED)
        if row:
            self._sizes.pop(size, None)
            self._sizes[size] = None
            if len(self._sizes) > SIZES_MAX:
                del self._sizes[next(iter(self._sizes))]
        return row

    def take_all(self, sizes: Sequence[int], most_bytes: int) -> list[int]:
        """`take` of further places, of `most_bytes` together, as long as they are there. The first one is not lent
        yet."""
        found: list[int] = []
        left, entries = min(most_bytes, self.left_bytes), self.left_entries - 1
        for size, alike in groupby(sizes):
            # As many of one size as are wanted in a row, at once.
            count = len([*alike])
            wanted = min(count, left // size, entries - len(found))
            ready = self._ready.get(size, [])
            rows = ready[-wanted:] if wanted > 0 else []
            del ready[len(ready) - len(rows) :]
            self.ready_bytes -= size * len(rows)
            while len(rows) < wanted and (more := self._holes.take_run(size, wanted - len(rows), ENDED)):
                rows += more
            found += rows
            left -= size * len(rows)
            if len(rows) < count:
                break
        return found

    def free(self, rows: Sequence[int]) -> None:
        """Rows in state ENDED, without slots, are free: of sizes that are asked for, they stay as they are."""
        if not rows:
            return
        by_size: dict[int, list[int]] = {}
        sizes = self._table.column("sizes")[np.array(rows, np.int64)]
        if (sizes == sizes[0]).all():
            by_size[int(sizes[0])] = [*rows]
        else:
            for row, size in zip(rows, sizes.tolist(), strict=True):
                by_size.setdefault(size, []).append(row)
        for size, some in by_size.items():
            if self.keeps and size in self._sizes and self.ready_bytes <= self.ahead_bytes:
                self._ready[size] = self._ready.get(size, []) + some
                self.ready_bytes += size * len(some)
            else:
                self._holes.free_all(some)

    def join(self) -> None:
        """Turns all places into holes, so that those beside one another become one."""
        places, self._ready, self.ready_bytes = self._ready, {}, 0
        for rows in filter(None, places.values()):
            self._holes.free_all(rows)

    def lacking(self) -> tuple[int, int]:
        """The bytes and entries that a round has to evict for later requests: none before something was asked for
        since the last round. The limits may be lower than when it was asked for."""
        if not self._asked:
            return 0, 0
        left_bytes, left, budget = self.left_bytes, self.left_entries, self._budget
        ahead_bytes = min(self.ahead_bytes, min(self._holes.capacity_bytes, budget.put_bytes_max) // LARGE_SHARE)
        ahead = min(self.ahead, budget.max_entries // AHEAD_SHARE)
        return (
            # Below 0, memory is given back, and nothing is made free for requests.
            ahead_bytes - left_bytes if 0 <= left_bytes < ahead_bytes // 2 else 0,
            ahead - left if left < ahead // 2 else 0,
        )

    def begin_round(self) -> None:
        """A round begins, which makes what is to be free."""
        # Less, if less was asked for.
        self.ahead_bytes = max(min(self._asked_bytes, self.ahead_bytes), self.ahead_bytes // 2)
        self.ahead = max(min(self._asked, self.ahead), self.ahead // 2)
        self._asked_bytes = self._asked = 0

    def check_invariants(self) -> None:
        table, rows = self._table, [row for some in self._ready.values() for row in some]
        assert len({*rows}) == len(rows) and all(table.states[row] == ENDED for row in rows)
        assert self.ready_bytes == sum([table.sizes[row] for row in rows])
        assert all(table.sizes[row] == size for size, some in self._ready.items() for row in some)
