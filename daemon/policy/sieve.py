"""SIEVE: a hand walks from old to new spans, spares each that was used since its last visit, and stops at the next.

After Zhang, Yang, Yue, Vigfusson and Rashmi, "SIEVE is Simpler than LRU", NSDI 2024. There a span has a bit that a use
sets and that the hand clears when it passes; the hand evicts the first span whose bit is clear, goes on from there, and
begins again with the oldest span once it has passed the newest.

Here no bit is cleared. The hand's way is a number that only rises: the lap, and within the lap the span's place in the
order of insertion. A span's rank is where on that way the hand will take it. A new span is taken at the next visit; a
use moves that to the visit after the next one. So a use costs the same as in LRU, and an eviction moves the hand
without a walk over the spans that it spares.

A span that may not go when the hand comes by stays, and is the first to go once it may. What the former daemon knew is
not kept: the next one finds the spans in the order of their last uses, and the hand before all of them.
"""

from __future__ import annotations

from typing import Final

from .lru import LRU

_PLACE_BITS: Final = 64
_PLACE: Final = (1 << _PLACE_BITS) - 1
_LAP: Final = 1 << _PLACE_BITS


class Sieve(LRU, name="sieve"):
    """As LRU, with a rank of the lap first, which is the span's worth, and of the place in the order of insertion."""

    new_may_go_first = "a use spares an entry for a whole lap of the hand, and what was just put was not used"

    def __init__(self) -> None:
        super().__init__()
        self._hand = 0
        """The first place on the hand's way that it has not passed: lap and place, as a rank."""

    def removed(self, span_id: int, *, evicted: bool) -> None:
        rank = self._rank[span_id]
        super().removed(span_id, evicted=evicted)
        lowest = [low for order in self._orders.values() if (low := order.lowest()) is not None]
        if evicted and rank < min(lowest, default=rank + 1):
            # What was taken from amid the others, for its bytes' place in the ring, does not move the hand.
            self._hand = max(self._hand, rank + 1)

    def worth(self, span_id: int) -> float:
        return float(self._rank[span_id] >> _PLACE_BITS)

    def rank(self, span_id: int) -> tuple[int, int]:
        rank = self._rank[span_id]
        return rank >> _PLACE_BITS, rank & _PLACE

    def check_invariants(self) -> None:
        super().check_invariants()
        laps = {self._hand >> _PLACE_BITS} | {rank >> _PLACE_BITS for rank in self._rank.values()}
        assert max(laps) <= (self._hand >> _PLACE_BITS) + 2, "a use spares a span for one lap"

    def _use(self, span_id: int) -> None:
        lap, passed = self._hand & ~_PLACE, self._hand & _PLACE
        known = self._rank.get(span_id)
        if known is None:
            self._uses += 1
            self._rank[span_id] = lap | self._uses
            return
        place = known & _PLACE
        next_visit = lap if place >= passed else lap + _LAP
        self._rank[span_id] = next_visit + _LAP | place
