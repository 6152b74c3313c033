"""Least frequently used with dynamic aging (LFU-DA): the entry with the fewest recent uses is the coldest.

An entry's priority is its number of uses plus the store's age at its last use. The age is the priority of the entry
that was last evicted as the coldest. So a new entry starts level with the coldest entries, and an entry that was
popular long ago is overtaken (Arlitt, Cherkasova, Dilley, Friedrich, Jin, "Evaluating content management techniques for
Web proxy caches", 2000).

Owns: the counts of uses and the age. Invariant: the age only rises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

from .candidate import Candidate
from .explained import Explained
from .lru import LRU, packed, unpacked

_CLOCK_BITS: Final = 64


class LFU(LRU, name="lfu"):
    """Like LRU, with a rank of the priority, and of the last use among equal priorities."""

    new_may_go_first = "the entry with the fewest uses is evicted first, and an entry that was just put has none"

    def __init__(self) -> None:
        super().__init__()
        self._count: dict[int, int] = {}
        self._age = 0

    def inserted(self, new: Candidate, now: float) -> None:
        self._count[new.span_id] = new.uses
        super().inserted(new, now)

    def removed(self, span_id: int, *, evicted: bool) -> None:
        rank = self._rank[span_id]
        super().removed(span_id, evicted=evicted)
        del self._count[span_id]
        lowest = [low for order in self._orders.values() if (low := order.lowest()) is not None]
        if evicted and rank < min(lowest, default=rank + 1):
            self._age = max(self._age, rank >> _CLOCK_BITS)

    def rank(self, span_id: int) -> tuple[int, int]:
        return _apart(self._rank[span_id])

    def worth(self, span_id: int) -> float:
        """The entry's priority."""
        return float(self._rank[span_id] >> _CLOCK_BITS)

    def explain(self, span_id: int) -> Explained:
        return Explained(self.worth(span_id), self._count[span_id])

    def learned(self) -> Iterator[bytes]:
        """Parts of (n, 4) uint64. The first row has the store's age, as (0, 0, age, 0). Each other row has a span's id,
        its number of uses, its priority, and the number of its last use."""
        ranks, count = dict(self._rank), dict(self._count)
        spans = ((span_id, count[span_id], *_apart(rank)) for span_id, rank in ranks.items())
        return packed(chain([(0, 0, self._age, 0)], spans))

    def learn(self, data: Sequence[bytes]) -> None:
        rows = unpacked(data, 4)
        self._age = max(self._age, next(rows, [0, 0, 0, 0])[2])
        saved = sorted((priority, use, count, span_id) for span_id, count, priority, use in rows)
        known = {span_id: (count, priority) for priority, _, count, span_id in saved if span_id in self._rank}
        for span_id in dict.fromkeys([*known, *self._in_order()]):
            count = self._count[span_id]
            self._count[span_id], priority = known.get(span_id, (count, count + self._age))
            self._uses += 1
            self._rank[span_id] = max(priority, 1) << _CLOCK_BITS | self._uses

    def check_invariants(self) -> None:
        super().check_invariants()
        assert self._count.keys() == self._owner.keys()

    def _use(self, span_id: int) -> None:
        self._count[span_id] += 1
        self._rank[span_id] = (self._count[span_id] + self._age) << _CLOCK_BITS
        self._renew(span_id)

    def _renew(self, span_id: int) -> None:
        self._uses += 1
        self._rank[span_id] = self._rank[span_id] >> _CLOCK_BITS << _CLOCK_BITS | self._uses


def _apart(rank: int) -> tuple[int, int]:
    """The priority, and the number of the last use."""
    return rank >> _CLOCK_BITS, rank & ((1 << _CLOCK_BITS) - 1)
