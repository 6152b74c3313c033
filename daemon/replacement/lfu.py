"""Least frequently used with dynamic aging (LFU-DA): the row with the fewest recent uses is the coldest.

A row's priority is its number of uses plus the store's age at its last use. The age is the priority of the row that was
last evicted as the coldest. So a new row starts level with the coldest rows, and a row that was popular long ago is
overtaken (Arlitt, Cherkasova, Dilley, Friedrich, Jin, "Evaluating content management techniques for Web proxy caches",
2000). Among equal priorities the row that was used longest ago is the coldest.

Owns: the counts of uses and the age. Invariant: the age only rises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
from msgspec.structs import replace

from .ordered import Ordered
from .replacement import KNOWN, Explained, Facts
from .window import Array, Batches


class LFU(Ordered, name="lfu"):
    """The worth is the priority."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._counts = np.zeros(len(facts.sizes), np.uint32)
        self._age = 0.0

    def explain(self, row: int) -> Explained:
        return replace(super().explain(row), uses=int(self._counts[row]))

    def learned(self) -> Iterator[bytes]:
        """The age; and by digest the numbers of uses, the priorities and the numbers of the last uses."""
        return chain([np.array([self._age]).tobytes()], self._saved(self._counts, self._worths, self._orders))

    def learn(self, data: Sequence[bytes]) -> None:
        try:
            (age,) = np.frombuffer(data[0])
            rows, (counts, worths, orders) = self._restored(data[1:], ("u4", "f8", "f8"))
        except (ValueError, IndexError) as error:
            raise ValueError(f"not a state of lfu: {error}") from error
        if not (np.isfinite(age) and np.isfinite(worths).all() and np.isfinite(orders).all() and age >= 0):
            raise ValueError("not a state of lfu: a priority is not finite")
        self._age = max(self._age, float(age))
        order = np.argsort(orders, kind="stable")
        rows = rows[order]
        self._counts[rows], self._worths[rows] = counts[order], np.maximum(worths[order], 1)
        unsaved = self._flags[: self._top] & KNOWN
        unsaved[rows] = 0
        others = np.flatnonzero(unsaved)
        others = others[np.argsort(self._orders[others], kind="stable")]
        # Rows that nothing was saved of were put after that.
        self._worths[others] = self._counts[others] + self._age
        self._orders[rows] = self._numbers(rows)
        self._orders[others] = self._numbers(others)
        self._pools.clear()

    def check_invariants(self) -> None:
        super().check_invariants()
        assert (self._counts[self._flags == 0] == 0).all()

    def _put(self, rows: Array, batches: Batches) -> None:
        self._counts[rows] = 0
        self._used(rows, 0.0, 0)

    def _recovering(self, rows: Array, by_use: Array, uses: Array, now: float) -> Iterator[None]:
        yield from super()._recovering(rows, by_use, uses, now)
        self._counts[rows] += uses[rows]
        self._worths[rows] = self._counts[rows]

    def _used(self, rows: Array, now: float, agents: Sequence[int] | Array | int) -> None:
        np.add.at(self._counts, rows, 1)
        self._worths[rows] = self._counts[rows] + self._age
        self._orders[rows] = self._numbers(rows)
        self._changed(rows)

    def _forget(self, rows: Array, evicted: bool) -> None:
        super()._forget(rows, evicted)
        self._counts[rows] = 0

    def _took(self, rows: list[int]) -> None:
        self._age = max(self._age, float(self._worths[rows].max()))
