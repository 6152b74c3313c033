"""Policies that rank rows: a pool of the coldest rows, from which victims are taken.

    fill: rank many rows as arrays → the coldest, in order, and a limit → victims from the front, until it is used up
    a row that becomes colder than the limit (its last child went; it was put or used) → `late`, merged in by its rank

A pool is filled from all rows, by a threshold that a sample gives (`lru`), or from a sample (`hazard`). A parent
follows its last child: it has a rank of its own from then on, also within one batch of victims.

Owns: the pools, one for each set of owners that was asked for lately. Does not own ranks (the policies).

Invariants: a pool is in order. A row that is not in a pool, and could have been when the pool was filled, is not colder
than the pool's limit. A row of the window that is colder than the limit waits in `protected`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

import numpy as np

from .replacement import HELD, KNOWN, OUT, Facts, Item, Rank, Replacement
from .window import Array

POOLS_MAX: Final = 16
SAMPLE: Final = 2048
"""Rows of a sample; a store of fewer rows is ranked as a whole."""
RUN: Final = 16
"""A sample has runs of this many rows that follow one another: they are in the same lines of the processor's cache."""
FIRST: Final[Rank] = (float("-inf"), 0.0)
LAST: Final[Rank] = (float("inf"), 0.0)


@dataclass(slots=True, eq=False)
class Pool:
    """Ranks and rows in order, from place `at` on not looked at; and what came since. `limit`: the rank from which on
    rows need not be here."""

    worths: Array
    orders: Array
    rows: Array
    limit: Rank
    at: int = 0
    late: list[Item] = field(default_factory=list)
    """A heap."""
    protected: list[tuple[int, Item]] = field(default_factory=list)
    """A heap of rows in the window, the one that was put first at the top: (put_at, item)."""


@dataclass(slots=True, eq=False)
class _Order:
    """A batch of victims while it is chosen. `left`: by parent, the children that are not chosen. `freed`: a heap of
    parents without such children that are not chosen yet."""

    owners: Array | None
    chosen: list[int] = field(default_factory=list)
    left: dict[int, int] = field(default_factory=dict)
    freed: list[Item] = field(default_factory=list)


class Pooled(Replacement):
    """A policy with ranks: a row with a lower rank goes first."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._pools: dict[tuple[int, ...] | None, Pool] = {}
        self._chance = np.random.default_rng(1)
        self._density = 1.0
        """The share of rows that may go and are outside the window, in the last sample."""

    # ---- what a policy implements

    @abstractmethod
    def _ranks(self, rows: Array) -> tuple[Array, Array]:
        """The ranks of known rows, as if none were in the window."""

    @abstractmethod
    def _are_current(self, rows: Array, worths: Array, orders: Array) -> Array:
        """Which ranks of a pool are still those of the rows, (n,) bool."""

    @abstractmethod
    def _filled(self, most: int, owners: Array | None) -> Pool:
        """A new pool with at least `most` rows that may go and are not in the window, if there are as many."""

    def _begin_round(self) -> None:
        """Called before ranks are used."""
        return

    # ---- victims

    def standings(self, rows: Sequence[int] | Array) -> list[tuple[bool, Rank]]:
        self.take_in()
        at = np.asarray(rows, np.int64)
        worths, orders = self._ranks(at)
        inside = self.are_in_window(at)
        return list(zip(inside.tolist(), zip(worths.tolist(), orders.tolist(), strict=True), strict=True))

    def _victims(self, most: int, owners: Array | None) -> list[int]:
        self._begin_round()
        who = None if owners is None else tuple(owners.tolist())
        order = _Order(owners)
        pool = self._pools.get(who)
        if pool is not None:
            self._take(pool, most, order)
        if len(order.chosen) < most:
            self._flags[order.chosen] |= OUT
            if len(self._pools) >= POOLS_MAX:
                self._pools.clear()
            pool = self._pools[who] = self._filled(most - len(order.chosen), owners)
            self._take(pool, most, order)
        if len(order.chosen) < most:
            self._merge(order, [], most, self.window.begins(self._bytes), LAST)
        if len(order.chosen) < most:
            self._flags[order.chosen] |= OUT
            rows = self._rows_of(np.flatnonzero(self._flags[: self._top] == KNOWN), owners)
            rows = rows[self._is_free(rows)]
            self._merge(order, self._items(rows, len(rows)), most, 0, LAST)
        return order.chosen

    def _take(self, pool: Pool, most: int, order: _Order) -> None:
        """Chooses the coldest rows of a pool that may go and are not in the window, until `most` are chosen."""
        begins, more = self.window.begins(self._bytes), most - len(order.chosen)
        while pool.protected and pool.protected[0][0] <= begins:
            heappush(pool.late, heappop(pool.protected)[1])
        items: list[Item] = []
        while len(items) < more and pool.at < len(pool.rows):
            part = slice(pool.at, pool.at + max(2 * (more - len(items)), 32))
            worths, orders, rows = pool.worths[part], pool.orders[part], pool.rows[part]
            may = self._is_free(rows) & self._are_current(rows, worths, orders)
            inside = may & (self.window.put_at[rows] > begins)
            found = np.flatnonzero(may & ~inside)[: more - len(items)]
            passed = len(rows) if len(items) + len(found) < more else int(found[-1]) + 1
            for at in np.flatnonzero(inside[:passed]).tolist():
                item = (float(worths[at]), float(orders[at]), int(rows[at]))
                heappush(pool.protected, (int(self.window.put_at[rows[at]]), item))
            items += zip(worths[found].tolist(), orders[found].tolist(), rows[found].tolist(), strict=True)
            pool.at += passed
        if pool.late:
            items = self._with_late(pool, items, more, begins)
        if not order.freed and not (items and self._facts.parents[[item[2] for item in items]].any()):
            order.chosen += [item[2] for item in items]
            return
        for item in self._merge(order, items, most, begins, pool.limit):
            heappush(pool.late, item)

    def _with_late(self, pool: Pool, items: list[Item], most: int, begins: int) -> list[Item]:
        """The coldest `most` of some items and of those that came later."""
        late, seen = pool.late, {item[2] for item in items}
        more: list[Item] = []
        some: list[Item] = []

        def is_wanted() -> bool:
            return bool(late) and (len(items) + len(more) + len(some) < most or (bool(items) and late[0] < items[-1]))

        while is_wanted():
            while is_wanted():
                some.append(heappop(late))
            worths, orders, rows = map(np.array, zip(*some, strict=True))
            may = self._is_free(rows) & self._are_current(rows, worths, orders)
            places = self.window.put_at[rows].tolist()
            for item, it_may, put_at in zip(some, may.tolist(), places, strict=True):
                if not it_may or item[2] in seen:
                    continue
                if put_at > begins:
                    heappush(pool.protected, (put_at, item))
                    continue
                seen.add(item[2])
                more.append(item)
            some.clear()
        items = sorted(items + more)
        for item in items[most:]:
            heappush(late, item)
        return items[:most]

    def _merge(self, order: _Order, items: Sequence[Item], most: int, begins: int, limit: Rank) -> Sequence[Item]:
        """Chooses rows of `items`, coldest first, until `most` are chosen, with each parent merged in by its own rank
        once all of its children are chosen. Parents warmer than `limit` are left for later. `begins`: of the window; 0
        if it does not protect.

        Returns:
            The items that were not chosen.
        """
        parents, children, flags, put_at = self._facts.parents, self._facts.children, self._flags, self.window.put_at
        left, freed, owners = order.left, order.freed, order.owners
        at = 0
        while len(order.chosen) < most:
            if freed and (freed[0] < items[at] if at < len(items) else freed[0][:2] <= limit):
                row = heappop(freed)[2]
            elif at < len(items):
                row = items[at][2]
                at += 1
            else:
                break
            order.chosen.append(row)
            above = int(parents[row])
            if above and flags[above] == KNOWN and not (begins and put_at[above] > begins):
                left[above] = left.get(above, int(children[above])) - 1
                if not left[above] and (owners is None or self._facts.owners[above] in owners):
                    heappush(freed, self._items(np.array([above]), 1)[0])
        return items[at:]

    # ---- changes

    def _may_go_again(self, rows: Array) -> None:
        if not self._pools or not len(rows):
            return
        rows = rows[self._is_free(rows)]
        if not len(rows):
            return
        worths, orders = self._ranks(rows)
        for who, pool in self._pools.items():
            colder = (worths < pool.limit[0]) | ((worths == pool.limit[0]) & (orders < pool.limit[1]))
            if who is not None:
                colder &= self._are_theirs(rows, np.array(who, np.int64))
            for at in np.flatnonzero(colder).tolist():
                heappush(pool.late, (float(worths[at]), float(orders[at]), int(rows[at])))

    # ---- rows and ranks

    def _coldest_item(self) -> Item | None:
        """The next victim, which stays where it is; None if all rows that may go are in the window."""
        self._begin_round()
        pool, order = self._pools.get(None), _Order(None)
        if pool is not None:
            self._take(pool, 1, order)
        if not order.chosen:
            pool = self._pools[None] = self._filled(1, None)
            self._take(pool, 1, order)
        if pool is None or not order.chosen:
            return None
        item = self._items(np.array(order.chosen), 1)[0]
        heappush(pool.late, item)
        return item

    def _items(self, rows: Array, most: int) -> list[Item]:
        """The coldest `most` rows with their ranks, in order."""
        worths, orders, rows = self._coldest(rows, most)
        return list(zip(worths.tolist(), orders.tolist(), rows.tolist(), strict=True))

    def _coldest(self, rows: Array, most: int) -> tuple[Array, Array, Array]:
        """The ranks and the rows of the coldest `most` rows, in order."""
        worths, orders = self._ranks(rows)
        if most < len(rows):
            # Not np.partition: with many equal worths it takes four times as long as to sort them.
            limit = np.sort(worths)[most - 1]
            below, equal = np.flatnonzero(worths < limit), np.flatnonzero(worths == limit)
            if (left := most - len(below)) < len(equal):
                equal = equal[np.argpartition(orders[equal], left - 1)[:left]]
            near = np.concatenate([below, equal])
            worths, orders, rows = worths[near], orders[near], rows[near]
        first = np.lexsort((orders, worths))
        return worths[first], orders[first], rows[first]

    def _sample(self, count: int, owners: Array | None) -> tuple[Array, float]:
        """About `count` rows that may go and are outside the window, all if there are not many more; and the share of
        all such rows that they are, about."""
        looks = count / self._density if owners is None else count
        if self._top > 2 * looks:
            runs = int(looks) // RUN
            # One run in each of as many equal ranges of the table.
            width = self._top / runs
            starts = (np.arange(runs) * width + self._chance.random(runs) * (width - RUN)).astype(np.int64)
            rows = (starts[:, None] + np.arange(RUN)).ravel()
            found = self._outside(rows[self._flags[rows] == KNOWN], owners)
            if len(found) >= count // 8:
                if owners is None:
                    self._density = len(found) / len(rows)
                return found, len(rows) / self._top
        found = self._outside(np.flatnonzero(self._flags[: self._top] == KNOWN), owners)
        if owners is None:
            self._density = max(len(found), 1) / max(self._top, 1)
        if len(found) <= 2 * count:
            return found, 1.0
        some = np.sort(self._chance.choice(len(found), count, replace=False, shuffle=False))
        return found[some], count / len(found)

    def _outside(self, rows: Array, owners: Array | None) -> Array:
        """Those of known rows, neither held nor handed out, that are childless and outside the window."""
        may = (self._facts.children[rows] == 0) & (self.window.put_at[rows] <= self.window.begins(self._bytes))
        return self._rows_of(rows[may], owners)

    def _rows_of(self, rows: Array, owners: Array | None) -> Array:
        return rows if owners is None else rows[self._are_theirs(rows, owners)]

    def _are_theirs(self, rows: Array, owners: Array) -> Array:
        # Not np.isin: its first call in a process loads numpy.ma, which takes 15 ms.
        wanted = np.zeros(1 << 16, np.bool_)
        wanted[owners] = True
        theirs: Array = wanted[self._facts.owners[rows]]
        return theirs

    def check_invariants(self) -> None:
        super().check_invariants()
        assert not (self._flags & HELD & OUT).any()
        for pool in self._pools.values():
            ranks = list(zip(pool.worths.tolist(), pool.orders.tolist(), strict=True))
            assert ranks == sorted(ranks) and (not ranks or ranks[-1] <= pool.limit)
