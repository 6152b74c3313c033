"""Least recently used: the span that was used longest ago is the coldest.

Owns: the order of last uses. It saves nothing for the next daemon, which inserts the spans in the order of their last
uses. Invariants: no two spans have the same rank. A span that was put is warmer than spans that were read before the
put, also if those reads were reported later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from heapq import merge
from itertools import islice
from typing import Final

import numpy as np

from .candidate import Candidate
from .ranked import SPAN, Ranked
from .replacement import Replacement

ROWS_AT_ONCE: Final = 16_384


class LRU(Replacement, name="lru"):
    """The order of last use, for the spans of each owner."""

    compares_puts_with_reads = True

    def __init__(self) -> None:
        self._owner: dict[int, int] = {}
        self._rank: dict[int, int] = {}
        self._uses = 0
        self._orders: dict[int, Ranked] = {}
        self._new: dict[int, None] = {}
        """The spans put since the last `drained`."""

    def __len__(self) -> int:
        return len(self._owner)

    def inserted(self, new: Candidate, now: float) -> None:
        assert new.span_id not in self._owner, new.span_id
        self._owner[new.span_id] = new.owner
        self._use(new.span_id)
        self.put_again(new.span_id)
        self.may_go(new.span_id, True)

    def accessed(self, span_id: int, now: float, agent: str = "") -> None:
        self._use(span_id)

    def put_again(self, span_id: int) -> None:
        if self.compares_puts_with_reads:
            self._new[span_id] = None

    def drained(self, *, reads: bool) -> None:
        """Puts the new spans, in their order, behind all spans that were only read."""
        new, self._new = self._new, {}
        if reads:
            for span_id in sorted(new, key=self._rank.__getitem__):
                self._renew(span_id)

    def may_go(self, span_id: int, it_may: bool) -> None:
        owner = self._owner[span_id]
        order = self._orders.get(owner)
        if order is None:
            order = self._orders[owner] = Ranked(self._rank.__getitem__)
        if it_may:
            order.add(span_id)
        else:
            order.discard(span_id)
            if not order:
                del self._orders[owner]

    def removed(self, span_id: int, *, evicted: bool) -> None:
        self.may_go(span_id, False)
        del self._owner[span_id]
        del self._rank[span_id]
        self._new.pop(span_id, None)

    def coldest(self, owners: Collection[int] | None = None) -> Iterator[int]:
        orders = [order for owner, order in self._orders.items() if owners is None or owner in owners]
        return (place & SPAN for place in (iter(orders[0]) if len(orders) == 1 else merge(*orders)))

    def rank(self, span_id: int) -> tuple[int, int]:
        return (0, self._rank[span_id])

    def worth(self, span_id: int) -> float:
        """The number of the span's last use. All uses of the store are numbered from 1."""
        return float(self.rank(span_id)[1])

    def check_invariants(self) -> None:
        assert self._owner.keys() == self._rank.keys() >= self._new.keys()
        assert len(set(self._rank.values())) == len(self._rank)
        for owner, order in self._orders.items():
            order.check_invariants()
            assert order and all(self._owner[place & SPAN] == owner for place in order)

    def _in_order(self) -> list[int]:
        return sorted(self._rank, key=self._rank.__getitem__)

    def _use(self, span_id: int) -> None:
        self._renew(span_id)

    def _renew(self, span_id: int) -> None:
        """Makes the span the one that was used last, without another use."""
        self._uses += 1
        self._rank[span_id] = self._uses


def packed(rows: Iterable[tuple[int, ...]]) -> Iterator[bytes]:
    """Rows of uint64 as parts of ROWS_AT_ONCE rows, for `unpacked`."""
    left = iter(rows)
    while some := list(islice(left, ROWS_AT_ONCE)):
        yield np.array(some, np.uint64).tobytes()


def unpacked(parts: Sequence[bytes], width: int) -> Iterator[list[int]]:
    """The rows of `parts`, with `width` columns.

    Raises:
        ValueError: a part has another number of columns.
    """
    for part in parts:
        yield from np.frombuffer(part, np.uint64).reshape(-1, width).tolist()
