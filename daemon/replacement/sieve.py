"""SIEVE: a hand moves from old to new rows, spares each row that was used since its last visit, and evicts the next.

After Zhang, Yang, Yue, Vigfusson and Rashmi, "SIEVE is Simpler than LRU", NSDI 2024. There each row has a bit. A use
sets the bit, and the hand clears it when it passes. The hand evicts the first row whose bit is clear, continues from
there, and begins again with the oldest row after it has passed the newest.

This implementation clears no bits. The hand's position only rises: the lap, and within the lap the place in the order
of puts. A row's rank is the position at which the hand will evict it. For a new row that is the next visit; a use moves
it to the visit after the next one. A row that may not be evicted when the hand passes is the first to be evicted once
it may be.

Owns: the ranks and the hand. It saves nothing for the next daemon: there the hand starts before all rows, which are in
the order of their last uses. Invariant: no rank is more than two laps ahead of the hand.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .ordered import Ordered
from .replacement import Facts
from .window import Array, Batches


class Sieve(Ordered, name="sieve"):
    """The worth is the lap in which the hand will evict the row."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._hand = (0.0, 0.0)
        """The first position that the hand has not passed: lap and place."""

    def check_invariants(self) -> None:
        super().check_invariants()
        assert self._worths.max() <= self._hand[0] + 2, "a use spares a row for one lap"

    def _put(self, rows: Array, batches: Batches) -> None:
        self._worths[rows] = self._hand[0]
        self._orders[rows] = self._numbers(rows)
        self._changed(rows)

    def _used(self, rows: Array, now: float, agents: Sequence[int] | Array | int) -> None:
        lap, passed = self._hand
        self._worths[rows] = np.where(self._orders[rows] >= passed, lap + 1, lap + 2)
        self._changed(rows)

    def _took(self, rows: list[int]) -> None:
        lap = float(self._worths[rows].max())
        place = float(self._orders[[row for row in rows if self._worths[row] == lap]].max()) + 1
        self._hand = max(self._hand, (lap, place))
