"""Least recently used: the row that was used longest ago is the coldest, whatever the number of rows.

A pool is filled from all rows with a rank up to a threshold, which a sample gives: one pass over the columns (about
3 ms for a million rows) for 1/POOL_SHARE of the rows.

Owns: the numbers of the last uses. It saves nothing for the next daemon, which learns their order from the store.
Invariants: no two rows have the same rank. With no row in the window, victims come exactly in the order of their ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify
from typing import Final

import numpy as np

from .known import KNOWN, Array, Batches, Facts
from .replacement import LAST, SAMPLE, Pool, Replacement

POOL_SHARE: Final = 64
POOL_MIN: Final = 64


class LRU(Replacement):
    """The worth is the number of the row's last use: all puts and uses are numbered from 1."""

    name = "lru"
    weighs = False

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._last_uses = np.zeros(len(facts.sizes))
        self._uses = 0

    def _put(self, rows: Array, batches: Batches) -> None:
        self._number(rows)

    def _used(self, rows: Array, now: float, agents: Sequence[int] | Array | int) -> None:
        self._number(rows)

    def _number(self, rows: Array) -> None:
        first = self._uses + 1
        self._uses += len(rows)
        self._last_uses[rows] = np.arange(first, self._uses + 1)

    def _forget(self, rows: Array, evicted: bool) -> None:
        self._last_uses[rows] = 0

    def _ranks(self, rows: Array) -> tuple[Array, Array]:
        last_uses = self._last_uses[rows]
        return last_uses, np.zeros_like(last_uses)

    def _are_current(self, rows: Array, worths: Array, orders: Array) -> Array:
        current: Array = self._last_uses[rows] == worths
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
            cold = self._last_uses[: self._top] <= limit[0]
            rows = np.flatnonzero((self._flags[: self._top] == KNOWN) & cold)
            rows = self._rows_of(rows[self._facts.children[rows] == 0], owners)
            inside = self.put_at[rows] > self._window_begins()
            outside = len(rows) - int(np.count_nonzero(inside))
            if limit == LAST or outside >= most // 2:
                break
            most *= 2
        pool = self._pool(rows[~inside], min(most, outside))
        items = self._items(rows[inside], len(rows) - outside)
        pool.protected = [(int(self.put_at[item[2]]), item) for item in items if item[:2] < pool.limit]
        heapify(pool.protected)
        return pool
