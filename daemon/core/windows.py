"""Chooses where in the ring a put gets its room: of several stretches, the one whose entries are worth least.

The neighbours of the coldest entry are of random warmth. If all entries have one size, this does not matter: each new
entry evicts one entry. With mixed sizes, a large put would evict all the small entries around the coldest one.

Owns the prices of one round. Does not own which entries are evictable, nor their order.

Invariant: each rank is read once a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

from ...shm.window import Window, window_around
from .entries import SpanEntry
from .span_table import SpanTable

ANCHORS_MAX: Final = 32
"""Windows that are tried for one put in one round."""
TAKEN_MAX: Final = 2048
"""Once this number of spans was taken into windows, no further window is tried."""

TAKEN_ENOUGH: Final = 256
"""Once this number of spans was taken, a window that loses nothing ends the search: of the next windows only the order
could be better, and each takes a millisecond."""

Price = tuple[float, tuple[float, ...]]
"""The worth that is lost with some spans, and the rank of the warmest of them."""

FREE: Final[Price] = (0.0, ())


class Prices:
    """The prices of entries in one round. The price of an entry is, for each of its bytes, the worth above that of a
    byte of the coldest entry, which would be evicted anyway. The first entry priced is taken for the coldest. If a
    policy has no worth, the ranks decide."""

    def __init__(self, memory: SpanTable) -> None:
        self._memory = memory
        self._floor: float | None = None

    def of(self, entry: SpanEntry) -> Price:
        rank = self._memory.policy.rank(entry.number)
        if self._floor is None:
            self._floor = rank[0]
        return max(rank[0] - self._floor, 0.0) * entry.span_bytes, rank

    def total(self, entries: Iterable[SpanEntry]) -> Price:
        """The price of all of them together."""
        price = FREE
        for entry in entries:
            price = _sum(price, self.of(entry))
        return price


class Windows:
    """The windows open to one put in one round."""

    def __init__(self, memory: SpanTable, size_bytes: int, may_go: Callable[[SpanEntry], bool], spans_max: int) -> None:
        self._memory = memory
        self._size_bytes = size_bytes
        self._may_go = may_go
        self._spans_max = spans_max
        self._known: dict[int, tuple[SpanEntry, Price] | None] = {}
        self._prices = Prices(memory)
        self._taken = 0

    def cheapest(self, anchors: Iterable[SpanEntry]) -> Window | None:
        """One of the windows around `anchors` that are wide enough: the first with one span only; without such a
        window, the one of the lowest price. `anchors` are ordered coldest first.

        If a policy has no worth, the window whose warmest span is coldest has the lowest price.
        """
        by_worth = self._memory.policy.ranks_by_worth
        best, price = None, None
        for anchor in islice(anchors, ANCHORS_MAX):
            window = self.around(anchor.offset, below=price)
            if window is not None and window.enough:
                best, price = window, self.price(window)
                if len(window.spans) <= 1:
                    break
            loses_nothing = by_worth and price is not None and price[0] == 0.0
            if self._taken >= (TAKEN_ENOUGH if loses_nothing else TAKEN_MAX):
                break
        return best

    def around(self, offset: int, *, through: bool = False, below: Price | None = None) -> Window | None:
        """The window around an offset. `through`: the window may contain withdrawn extents, which have to be restored,
        and blocks with children elsewhere, which are evicted too. `below`: entries that would raise the window's price
        to this or more are not taken."""
        memory = self._memory
        children: dict[SpanEntry, int] = {}
        price = FREE

        def take(offset: int) -> None:
            nonlocal price
            known = self._known[offset]
            assert known is not None, "a span was taken that may not go"
            entry, more = known
            price = _sum(price, more)
            self._taken += 1
            if entry.parent is not None:
                children[entry.parent] = children.get(entry.parent, 0) + 1

        def may_go(offset: int) -> bool:
            known = self._look(offset)
            if known is None or (below is not None and _sum(price, known[1]) >= below):
                return False
            return through or known[0].child_count <= children.get(known[0], 0)

        def warmth(offset: int) -> tuple[float, ...]:
            known = self._known[offset]
            return memory.policy.rank(memory.spans.at(offset).number) if known is None else known[1][1]

        return window_around(
            memory.ring.map, offset, self._size_bytes, may_go, warmth, self._spans_max, through=through, take=take
        )

    def _look(self, offset: int) -> tuple[SpanEntry, Price] | None:
        """The entry at an offset and its price; None if it is not evictable."""
        if offset not in self._known:
            entry = self._memory.spans.at(offset)
            self._known[offset] = (entry, self._prices.of(entry)) if self._may_go(entry) else None
        return self._known[offset]

    def price(self, window: Window) -> Price:
        """What is lost with the window's entries."""
        price = FREE
        for known in map(self._look, window.spans):
            if known is not None:
                price = _sum(price, known[1])
        return price


def _sum(one: Price, other: Price) -> Price:
    return one[0] + other[0], max(one[1], other[1])
