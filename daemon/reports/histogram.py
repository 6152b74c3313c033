"""Histograms of times.

Owns the bucket bounds and the counts. Does not own what is counted.

Invariants: counts only rise. An amount is counted in exactly one bucket, and in the sum.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Any, Final

import numpy as np

from .removal_history import Array

BOUNDS_S: Final = (
    0.1,
    1.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1800.0,
    3600.0,
    6 * 3600.0,
    86400.0,
    7 * 86400.0,
)
"""Upper bounds of buckets in seconds. They include the idle times at which modes evict (30 s, 2 min, 10 min)."""


class Histogram:
    """Counts amounts by size. A bucket holds the amounts up to its bound; one more bucket holds those above the last
    bound."""

    def __init__(self, bounds: tuple[float, ...] = BOUNDS_S) -> None:
        assert all(low < high for low, high in pairwise(bounds)), "bounds must rise"
        self._bounds = bounds
        self._edges = np.array(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def count(self, amount: float) -> None:
        """Counts one amount; a negative one counts as 0."""
        amount = max(0.0, amount)
        self._counts[bisect_left(self._bounds, amount)] += 1
        self._sum += amount

    def count_all(self, amounts: Array) -> None:
        """`count` of many amounts, (n,)."""
        amounts = np.maximum(amounts, 0.0)
        found = np.searchsorted(self._edges, amounts, "left")
        for bucket, many in enumerate(np.bincount(found, minlength=len(self._counts)).tolist()):
            self._counts[bucket] += many
        self._sum += float(amounts.sum())

    def as_dict(self) -> dict[str, Any]:
        """`counts` of each bucket, not cumulative, the last above every bound; `sum` of all amounts."""
        return {"bounds": list(self._bounds), "counts": list(self._counts), "sum": self._sum}
