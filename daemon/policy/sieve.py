"""SIEVE: a hand moves from old to new spans, spares each span that was used since its last visit, and evicts the next.

After Zhang, Yang, Yue, Vigfusson and Rashmi, "SIEVE is Simpler than LRU", NSDI 2024. There each span has a bit. A use
sets the bit, and the hand clears it when it passes. The hand evicts the first span whose bit is clear, continues from
there, and begins again with the oldest span after it has passed the newest.

This implementation clears no bits. The hand's position is a number that only rises: the lap, and within the lap the
place in the order of insertion. A span's rank is the position at which the hand will evict it. For a new span that is
the next visit; a use moves it to the visit after the next one. So a use costs the same as in LRU, and an eviction moves
the hand without visiting the spans that it spares.

A span that may not be evicted when the hand passes stays, and is the first to be evicted once it may be.

Owns: the ranks and the hand. It saves nothing for the next daemon: there the hand starts before all spans, which are in
the order of their last uses. Invariant: no rank is more than two laps ahead of the hand.
"""

from __future__ import annotations

from typing import Final

from .lru import LRU

_PLACE_BITS: Final = 64
_PLACE: Final = (1 << _PLACE_BITS) - 1
_LAP: Final = 1 << _PLACE_BITS


class Sieve(LRU, name="sieve"):
    """Like LRU, with a rank of the lap and of the place in the order of insertion. The lap is the span's worth."""

    compares_puts_with_reads = False
    new_may_go_first = "a use spares an entry for a whole lap of the hand, and an entry that was just put has no use"

    def __init__(self) -> None:
        super().__init__()
        self._hand = 0
        """The first position that the hand has not passed: lap and place, as a rank."""

    def removed(self, span_id: int, *, evicted: bool) -> None:
        rank = self._rank[span_id]
        super().removed(span_id, evicted=evicted)
        lowest = [low for order in self._orders.values() if (low := order.lowest()) is not None]
        if evicted and rank < min(lowest, default=rank + 1):
            # A span that was evicted out of order, because of its place in the ring, does not move the hand.
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
