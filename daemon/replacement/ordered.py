"""Policies whose ranks only a use changes: an exact order, whatever the number of rows.

A rank is two columns of numbers. A pool is filled from all rows with a rank up to a threshold, which a sample gives:
one pass over the columns (about 3 ms for a million rows) for 1/POOL_SHARE of the rows.

Owns: the columns, and the filling of pools. Does not own what a rank is (`lru`, `lfu`, `sieve`).

Invariant: with no row in the window, victims come exactly in the order of their ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify
from typing import Final

import numpy as np

from .pooled import FIRST, LAST, SAMPLE, Pool, Pooled
from .replacement import KNOWN, Facts
from .window import Array

POOL_SHARE: Final = 64
POOL_MIN: Final = 64


class Ordered(Pooled):
    """Ranks in columns: `_worths`, and `_orders` among equal worths. A row with a used rank is numbered anew."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._worths = np.zeros(len(facts.sizes))
        self._orders = np.zeros(len(facts.sizes))
        self._uses = 0
        """All puts and uses are numbered from 1."""

    def worth(self, rows: Sequence[int] | Array) -> Array:
        self.take_in()
        return self._worths[np.asarray(rows, np.int64)]

    def _numbers(self, rows: Array) -> Array:
        """The numbers of as many further uses."""
        first = self._uses + 1
        self._uses += len(rows)
        return np.arange(first, self._uses + 1, dtype=np.float64)

    def _forget(self, rows: Array, evicted: bool) -> None:
        self._worths[rows] = self._orders[rows] = 0

    def _ranks(self, rows: Array) -> tuple[Array, Array]:
        return self._worths[rows], self._orders[rows]

    def _are_current(self, rows: Array, worths: Array, orders: Array) -> Array:
        current: Array = (self._worths[rows] == worths) & (self._orders[rows] == orders)
        return current

    def _filled(self, most: int, owners: Array | None) -> Pool:
        most = max(most, POOL_MIN, self._top // POOL_SHARE)
        while True:
            sample, share = self._sample(SAMPLE, owners)
            near = int(1.25 * most * share) + 1
            limit = LAST
            if share < 1 and near < len(sample):
                worths, orders, _ = self._coldest(sample, near)
                limit = (float(worths[-1]), float(orders[-1]))
            rows = np.flatnonzero((self._flags[: self._top] == KNOWN) & self._up_to(limit))
            rows = self._rows_of(rows[self._facts.children[rows] == 0], owners)
            inside = self.window.put_at[rows] > self.window.begins(self._bytes)
            outside = len(rows) - int(np.count_nonzero(inside))
            if limit == LAST or outside >= most // 2:
                break
            most *= 2
        coldest = self._coldest(rows[~inside], min(most, outside))
        limit = (float(coldest[0][-1]), float(coldest[1][-1])) if len(coldest[2]) else FIRST
        pool = Pool(*coldest, limit)
        items = self._items(rows[inside], len(rows) - outside)
        pool.protected = [(int(self.window.put_at[item[2]]), item) for item in items if item[:2] < limit]
        heapify(pool.protected)
        return pool

    def _up_to(self, limit: tuple[float, float]) -> Array:
        worths, orders = self._worths[: self._top], self._orders[: self._top]
        found: Array = (worths < limit[0]) | ((worths == limit[0]) & (orders <= limit[1]))
        return found

    def _saved(self, *columns: Array) -> Iterator[bytes]:
        """The digests of all known rows, and the columns at these rows."""
        self.take_in()
        rows = np.flatnonzero(self._flags[: self._top] & KNOWN)
        yield self._facts.digests[rows].tobytes()
        for column in columns:
            yield column[rows].tobytes()

    def _restored(self, data: Sequence[bytes], kinds: Sequence[str]) -> tuple[Array, list[Array]]:
        """The rows that are known and were saved, and their values of the columns.

        Raises:
            ValueError: the columns do not have equal lengths.
        """
        saved = np.frombuffer(data[0], np.uint64)
        values = [np.frombuffer(part, kind) for part, kind in zip(data[1:], kinds, strict=True)]
        if any(len(value) != len(saved) for value in values):
            raise ValueError("columns of unequal lengths")
        return matched(saved, values, self._facts.digests, np.flatnonzero(self._flags[: self._top] & KNOWN))


def matched(saved: Array, values: Sequence[Array], digests: Array, rows: Array) -> tuple[Array, list[Array]]:
    """Those of `rows` whose digests are among the saved ones, and the saved values for each."""
    order = np.argsort(saved, kind="stable")
    if not len(order):
        return rows[:0], [value[:0] for value in values]
    wanted = digests[rows]
    at = order[np.minimum(np.searchsorted(saved[order], wanted), len(order) - 1)]
    found = saved[at] == wanted
    return rows[found], [value[at[found]] for value in values]
