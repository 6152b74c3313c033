"""Where in the ring a put opens its room: of several stretches, the one whose entries are worth least.

What stands beside the coldest entry is as warm as chance has it. Where all are of one size that does not matter, as one
goes and one comes; where sizes differ, a large put would sweep away whatever small ones stand around the coldest.

Does not own: who may go, nor who is coldest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

from ...shm.window import Window, window_around
from .entries import SpanEntry
from .span_table import SpanTable

ANCHORS_MAX: Final = 32
TAKEN_MAX: Final = 2048
"""Once so many spans were taken into windows, no other window is begun."""

Price = tuple[float, tuple[float, ...]]
"""What is lost with some spans, and the rank of the warmest."""

FREE: Final[Price] = (0.0, ())


class Prices:
    """What is lost with entries, in one round: of each byte what it is worth beyond the bytes of the entry that is
    asked for first, the coldest, which would go anyhow. Where a policy knows no worth, the ranks decide."""

    def __init__(self, memory: SpanTable) -> None:
        self._memory = memory
        self._floor: float | None = None

    def of(self, entry: SpanEntry) -> Price:
        rank = self._memory.policy.rank(entry.number)
        if self._floor is None:
            self._floor = rank[0]
        return max(rank[0] - self._floor, 0.0) * entry.span_bytes, rank

    def total(self, entries: Iterable[SpanEntry]) -> Price:
        """Of all of them together."""
        price = FREE
        for entry in entries:
            price = _sum(price, self.of(entry))
        return price


class Windows:
    """The windows that are open to one put, in one round: ranks are asked for once."""

    def __init__(self, memory: SpanTable, size_bytes: int, may_go: Callable[[SpanEntry], bool], spans_max: int) -> None:
        self._memory = memory
        self._size_bytes = size_bytes
        self._may_go = may_go
        self._spans_max = spans_max
        self._known: dict[int, tuple[SpanEntry, Price] | None] = {}
        self._prices = Prices(memory)
        self._taken = 0

    def cheapest(self, anchors: Iterable[SpanEntry]) -> Window | None:
        """Among the windows around `anchors`, coldest first, that suffice: the first that takes nothing else, or else
        the one with which least is lost.

        Lost is, of each byte, what it is worth beyond the bytes of the coldest, which would go anywhere; where a policy
        knows no worth, the window whose warmest span is coldest loses least.
        """
        best, price = None, None
        for anchor in islice(anchors, ANCHORS_MAX):
            window = self.around(anchor.offset, below=price)
            if window is not None and window.enough:
                best, price = window, self.price(window)
                if len(window.spans) <= 1:
                    break
            if self._taken >= TAKEN_MAX:
                break
        return best

    def around(self, offset: int, *, through: bool = False, below: Price | None = None) -> Window | None:
        """`through`: also of what has children elsewhere, which then go too. `below`: only if less than that is
        lost."""
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
        """What stands there and what it costs; None where it may not go."""
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
