"""Finds the coldest spans by sampling, and keeps them in a pool.

A round ranks a sample of CHUNK spans at once, or all spans if there are not more, and keeps the POOL coldest in order.
Victims are taken from this pool after a check that they are still valid. When the pool is empty, the next round begins.
A span whose rank changes meanwhile is inserted into the pool if it is cold enough. (Redis keeps such a pool of
candidates: `evict.c`.)

Owns: the pools. Does not own the ranks.

Invariants: a pool is in order. If there are at most CHUNK spans, no span outside the pool is colder than the pool's
limit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .records import Records, Slots

CHUNK: Final = 2048
POOL: Final = 32
POOLS_MAX: Final = 16

Rank = tuple[float, float]
"""The worth, and a number that orders equal worths: the time of the last use, or its negative."""
Item = tuple[float, float, int]
"""A rank and a slot."""
Floats = npt.NDArray[np.float64]
_END: Final[Item] = (float("inf"), 0.0, 0)


@dataclass(slots=True)
class Pool:
    """Items in order: all items of the sample up to `limit`, and items that have become as cold since."""

    items: list[Item]
    limit: Item


class VictimPool:
    """Pools: one for each recently requested set of owners."""

    def __init__(self, records: Records, ranks: Callable[[Slots], tuple[Floats, Floats]]) -> None:
        """`ranks`: gives the ranks of the spans in some slots."""
        self._records = records
        self._ranks = ranks
        self._pools: dict[frozenset[int] | None, Pool] = {}
        self._chance = np.random.default_rng(1)

    def forget(self) -> None:
        """Drops all pools, because the ranks have changed."""
        self._pools.clear()

    def changed(self, slot: int, rank: Callable[[int], Rank]) -> None:
        """Call when the span in the slot may be evicted now, or has a new rank."""
        if not self._pools or not self._records.may_go[slot]:
            return
        item = (*rank(slot), slot)
        for owners, pool in self._pools.items():
            is_theirs = owners is None or self._records.owner[slot] in owners
            at = bisect_left(pool.items, item)
            if is_theirs and item < pool.limit and pool.items[at : at + 1] != [item]:
                pool.items.insert(at, item)

    def coldest(self, owners: Collection[int] | None) -> Iterator[int]:
        """Slots of spans that may be evicted, coldest first; with `owners` only theirs. After the pool come all others,
        in chunks of CHUNK, each in order."""
        who = None if owners is None else frozenset(owners)
        pool = self._pools.get(who)
        if pool is not None:
            # Removes the used items at the front. Later ones are skipped below.
            gone = next((at for at, item in enumerate(pool.items) if self._is_valid(item)), len(pool.items))
            del pool.items[:gone]
        if pool is None or not pool.items:
            if len(self._pools) >= POOLS_MAX:
                self._pools.clear()
            pool = self._pools[who] = self._sampled(who)
        inside: set[int] = set()
        for item in pool.items:
            if self._is_valid(item):
                inside.add(item[2])
                yield item[2]
        if pool.limit == _END:
            return
        others = self._evictable(who)
        parts = -(-len(others) // CHUNK)
        for part in range(parts):
            yield from (slot for _, _, slot in self._items(others[part::parts]) if slot not in inside)

    def check_invariants(self) -> None:
        """Asserts the invariants of the module's docstring."""
        for owners, pool in self._pools.items():
            assert pool.items == sorted(set(pool.items))
            held = {item[2] for item in pool.items if self._is_valid(item)}
            if len(self._records.may_go) <= CHUNK:
                assert all(item[2] in held or item >= pool.limit for item in self._items(self._evictable(owners)))

    def _is_valid(self, item: Item) -> bool:
        """True if the span may be evicted, and was not used since the item was made."""
        return bool(self._records.may_go[item[2]]) and self._records.used_at[item[2]] == abs(item[1])

    def _sampled(self, owners: frozenset[int] | None) -> Pool:
        may_go, many = self._records.may_go, len(self._records.may_go)
        if many <= CHUNK:
            sample = self._evictable(owners)
        else:
            edges = np.arange(CHUNK + 1) * many // CHUNK
            slots = edges[:-1] + (self._chance.random(CHUNK) * np.diff(edges)).astype(np.int64)
            sample = self._of(owners, slots[self._records.column(may_go, slots) != 0])
            if len(sample) < POOL:
                sample = self._evictable(owners)
                if len(sample) > CHUNK:
                    sample = self._chance.choice(sample, CHUNK, replace=False, shuffle=False)
        whole = len(sample) <= POOL and len(sample) == len(self._evictable(owners))
        items = self._items(sample, None if whole else POOL)
        return Pool(items, _END if whole or not items else items[-1])

    def _evictable(self, owners: frozenset[int] | None) -> Slots:
        may_go = self._records.may_go
        slots = np.flatnonzero(np.frombuffer(may_go, np.uint8)) if may_go else np.empty(0, np.int64)
        return self._of(owners, slots)

    def _of(self, owners: frozenset[int] | None, slots: Slots) -> Slots:
        if owners is None:
            return slots
        # np.isin is not used: for many uids, its first call in a process loads numpy.ma, which takes 15 ms.
        theirs, wanted = self._records.column(self._records.owner, slots), np.array([*sorted(owners), 0], np.uint32)
        return slots[wanted[np.searchsorted(wanted[:-1], theirs)] == theirs] if owners else slots[:0]

    def _items(self, slots: Slots, most: int | None = None) -> list[Item]:
        """The items of the slots in order, at most `most`."""
        worths, orders = self._ranks(slots)
        if most is not None and most < len(slots):
            # Not np.partition: with the worths of a large store it takes four times as long as to sort them.
            near = np.flatnonzero(worths <= np.sort(worths)[most - 1])
            slots, worths, orders = slots[near], worths[near], orders[near]
        first = np.lexsort((orders, worths))[:most]
        return list(zip(worths[first].tolist(), orders[first].tolist(), slots[first].tolist(), strict=True))
