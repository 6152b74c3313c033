"""The base class of replacement policies: which rows of the store are evicted next.

    puts ── was_put ────────┐
    access logs ── used ────┤→ policy → victims(most) ─ fence, scan ─┬→ removed(evicted=True)
    ends ── removed ────────┘                                        └→ may_go(rows, True)    of a row that is pinned

    fill: rank many rows as arrays → the coldest, in order, and a limit → victims from the front, until it is used up
    a row that becomes colder than the limit (its last child went; it was put or used) → `late`, merged in by its rank

A policy ranks the rows of the store's table; everything comes in batches, as arrays, and no Python object is made for
an entry. A pool is filled from all rows, by a threshold that a sample gives (`lru`), or from a sample (`hazard`). A
parent follows its last child: it has a rank of its own from then on, also within one batch of victims.

Owns: the pools, one for each set of owners that was asked for lately. Does not own which rows may go (`known`), nor
ranks (the policies).

Invariants: `victims` never gives a row that has children which are not victims before it, that is held or handed out
already, or, while others may go, that is in the window. A row that `victims` gave is given again only after `may_go`. A
pool is in order. A row that is not in a pool, and could have been when the pool was filled, is not colder than the
pool's limit. A row of the window that is colder than the limit waits in `protected`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import ClassVar, Final

import numpy as np

from .known import HELD, KNOWN, OUT, Array, Explained, Facts, KnownRows, Turn, parts

Rank = tuple[float, float]
"""The warmth of a row, lower is colder; two numbers, so that few rows are equal."""
Item = tuple[float, float, int]
"""A rank and its row."""

POOLS_MAX: Final = 16
SAMPLE: Final = 2048
"""Rows of a sample; a store of fewer rows is ranked as a whole."""
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


class Replacement(KnownRows):
    """One store's policy."""

    name: ClassVar[str]
    weighs: ClassVar[bool] = True
    """Whether worths may be added up, for each byte. If not, they only order the rows."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._pools: dict[tuple[int, ...] | None, Pool] = {}

    # ---- what the store says

    def recovering(self, by_use: Array, by_put: Array, uses: Array, now: float) -> Iterator[None]:
        """Takes over the rows that an earlier daemon left, in the order of their last uses, and in that of their puts:
        once, before the first put, in steps of a few milliseconds. The policy is asked nothing until the last. `uses`:
        by row, how often it was used after its put."""
        there = np.zeros(len(self._flags), np.bool_)
        there[by_use] = True
        rows = np.flatnonzero(there)
        yield
        for part in parts(rows):
            self._know(part)
            yield
        for part in parts(by_put):
            self._place(part)
            yield
        yield from self._recovering(rows, by_use, uses, now)

    def used(self, rows: Sequence[int] | Array, now: float, agents: Sequence[int] | Array | int = 0) -> None:
        """Stored rows were used until `now`, in this order, a row perhaps several times. `agents`: the numbers of the
        agents that used them, or of the one that used all."""
        self.take_in()
        if len(rows):
            self._used(np.asarray(rows, np.int64), now, agents)

    def may_go(self, rows: Sequence[int] | Array, it_may: bool) -> None:
        """Says whether stored rows may be evicted from now on. A row that was handed out as a victim, and stays
        because a reader holds it, is either held until the reader has ended, or may go again. Children need no
        call: the policy reads their number."""
        self.take_in()
        at = np.asarray(rows, np.int64)
        if not len(at):
            return
        assert (self._flags[at] & KNOWN).all(), "a row that is not stored"
        self._flags[at] = KNOWN if it_may else KNOWN | HELD
        if it_may:
            self._may_go_again(at)

    def removed(self, rows: Sequence[int] | Array, *, evicted: bool) -> None:
        """Stored rows were removed, for room (`evicted`) or for another reason. The store's columns still describe
        them, and their parents' numbers of children are lowered already."""
        self.take_in()
        at = np.asarray(rows, np.int64)
        if not len(at):
            return
        assert (self._flags[at] & KNOWN).all(), "a row that is not stored"
        self._count -= len(at)
        self._bytes -= int(self._facts.sizes[at].sum())
        self._forget(at, evicted)
        self._flags[at] = 0
        self.put_at[at] = 0
        parents = self._facts.parents[at].astype(np.int64)
        if parents.any():
            parents = parents[self._is_free(parents)]
            if len(parents):
                self._may_go_again(np.unique(parents))

    def turn(self, agent: int, state: Turn, now: float) -> None:
        """A client has reported the state of an agent. Default: the policy ignores it."""
        return

    # ---- what the store asks

    def victims(self, most: int, owners: Collection[int] | None = None) -> list[int]:
        """Up to `most` rows to evict, coldest first, children before their parents; with `owners` only rows of these
        owners. They are handed out: each is removed, or kept with `may_go`. A victim that is kept keeps its ancestors
        among the victims too."""
        self.take_in()
        self._begin_round()
        who = None if owners is None else tuple(sorted(owners))
        order = _Order(None if who is None else np.array(who, np.uint16))
        pool = self._pools.get(who)
        if pool is not None:
            self._take(pool, most, order)
        if len(order.chosen) < most:
            self._flags[order.chosen] |= OUT
            if len(self._pools) >= POOLS_MAX:
                self._pools.clear()
            pool = self._pools[who] = self._filled(most - len(order.chosen), order.owners)
            self._take(pool, most, order)
        if len(order.chosen) < most:
            self._merge(order, [], most, self._window_begins(), LAST)
        if len(order.chosen) < most:
            self._flags[order.chosen] |= OUT
            rows = self._rows_of(np.flatnonzero(self._flags[: self._top] == KNOWN), order.owners)
            rows = rows[self._is_free(rows)]
            self._merge(order, self._items(rows, len(rows)), most, 0, LAST)
        self._flags[order.chosen] |= OUT
        return order.chosen

    def coldest(self, most: int, owners: Collection[int] | None = None) -> list[int]:
        """As `victims`, but the rows are not handed out."""
        rows = self.victims(most, owners)
        self.may_go(rows, True)
        return rows

    def admits(self, digest: int, size: int, parent: int, cost: float = 0.0, tokens: int = 0, agent: int = 0) -> bool:
        """Whether a child of the row `parent`, which is not stored yet, is worth as much as the next victim. The store
        asks when it has no room without evicting. The numbers are those of `Facts`. Default: true."""
        return True

    def worth(self, rows: Sequence[int] | Array) -> Array:
        """The worths of stored rows. Of two rows outside the window, the one with the lower worth is evicted first."""
        self.take_in()
        return self._ranks(np.asarray(rows, np.int64))[0]

    def standings(self, rows: Sequence[int] | Array) -> list[tuple[bool, Rank]]:
        """Of stored rows, whether each is in the window, and its rank: the lowest is evicted first."""
        self.take_in()
        at = np.asarray(rows, np.int64)
        worths, orders = self._ranks(at)
        inside = self.are_in_window(at)
        return list(zip(inside.tolist(), zip(worths.tolist(), orders.tolist(), strict=True), strict=True))

    def explain(self, row: int) -> Explained:
        """The policy's knowledge of a stored row. Default: its worth."""
        return Explained(float(self.worth([row])[0]), in_window=self.in_window(row))

    def recall(self, digest: int) -> Explained | None:
        """The policy's knowledge of a key whose entry was evicted; its worth leaves out cost and size. None, the
        default: the policy does not remember the key."""
        return None

    # ---- restarts

    def learned(self) -> Iterator[bytes]:
        """The policy's state, for the policy of the same name in the next daemon. Default: nothing."""
        return iter(())

    def learn(self, data: Sequence[bytes]) -> None:
        """Restores the state that a policy of the same name yielded from `learned`. Called once, after `recovering`.
        Some rows in `data` may not be stored any more, others may be missing there. Raises ValueError if `data` is
        not a state of this policy."""
        return

    def check_invariants(self) -> None:
        super().check_invariants()
        for pool in self._pools.values():
            ranks = list(zip(pool.worths.tolist(), pool.orders.tolist(), strict=True))
            assert ranks == sorted(ranks) and (not ranks or ranks[-1] <= pool.limit)

    # ---- what a policy implements

    def _recovering(self, rows: Array, by_use: Array, uses: Array, now: float) -> Iterator[None]:
        """Known rows of an earlier daemon, as they ascend, and in the order of their last uses; and by row its number
        of uses. Default: as new."""
        for part in parts(by_use):
            self._put(part, [(len(part), now)])
            yield

    @abstractmethod
    def _used(self, rows: Array, now: float, agents: Sequence[int] | Array | int) -> None:
        """Known rows were used."""

    @abstractmethod
    def _forget(self, rows: Array, evicted: bool) -> None:
        """Known rows are removed."""

    @abstractmethod
    def _ranks(self, rows: Array) -> tuple[Array, Array]:
        """The ranks of known rows, as if none were in the window. The first numbers are their worths."""

    @abstractmethod
    def _are_current(self, rows: Array, worths: Array, orders: Array) -> Array:
        """Which ranks of a pool are still those of the rows, (n,) bool."""

    @abstractmethod
    def _filled(self, most: int, owners: Array | None) -> Pool:
        """A new pool with at least `most` rows that may go and are not in the window, if there are as many."""

    def _begin_round(self) -> None:
        """Called before ranks are used."""
        return

    # ---- pools

    def _take(self, pool: Pool, most: int, order: _Order) -> None:
        """Chooses the coldest rows of a pool that may go and are not in the window, until `most` are chosen."""
        begins, more = self._window_begins(), most - len(order.chosen)
        while pool.protected and pool.protected[0][0] <= begins:
            heappush(pool.late, heappop(pool.protected)[1])
        items: list[Item] = []
        while len(items) < more and pool.at < len(pool.rows):
            part = slice(pool.at, pool.at + max(2 * (more - len(items)), 32))
            worths, orders, rows = pool.worths[part], pool.orders[part], pool.rows[part]
            may = self._is_free(rows) & self._are_current(rows, worths, orders)
            inside = may & (self.put_at[rows] > begins)
            found = np.flatnonzero(may & ~inside)[: more - len(items)]
            passed = len(rows) if len(items) + len(found) < more else int(found[-1]) + 1
            for at in np.flatnonzero(inside[:passed]).tolist():
                item = (float(worths[at]), float(orders[at]), int(rows[at]))
                heappush(pool.protected, (int(self.put_at[rows[at]]), item))
            pool.at += passed
            if not (items or pool.late or order.freed or self._facts.parents[rows[found]].any()) and (
                len(found) == more or pool.at == len(pool.rows)
            ):
                # The usual case, in a store without sequences.
                order.chosen += rows[found].tolist()
                return
            items += zip(worths[found].tolist(), orders[found].tolist(), rows[found].tolist(), strict=True)
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
            places = self.put_at[rows].tolist()
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
        if it does not protect. Returns the items that were not chosen."""
        parents, children, flags, put_at = self._facts.parents, self._facts.children, self._flags, self.put_at
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

    def _pool(self, rows: Array, most: int) -> Pool:
        """A pool of the coldest `most` rows."""
        worths, orders, rows = self._coldest(rows, most)
        limit = (float(worths[-1]), float(orders[-1])) if len(rows) else FIRST
        return Pool(worths, orders, rows, limit)

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
