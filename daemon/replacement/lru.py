"""Least recently used: the row that was used longest ago is the coldest.

Owns: the numbers of the last uses. It saves nothing for the next daemon, which learns the order of last uses from the
store. Invariant: no two rows have the same rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from .ordered import Ordered
from .window import Array, Batches


class LRU(Ordered, name="lru"):
    """The order of last use. The worth is the number of the row's last use."""

    weighs = False

    def _put(self, rows: Array, batches: Batches) -> None:
        self._worths[rows] = self._numbers(rows)

    def _used(self, rows: Array, now: float, agents: Sequence[int] | Array | int) -> None:
        self._worths[rows] = self._numbers(rows)
