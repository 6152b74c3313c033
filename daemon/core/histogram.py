"""How long entries stayed, and how long nobody had used them, when they went. Pure counting: no entry is kept.

Owns: the bounds of the buckets, and what fell into each. Does not own when something goes (tenure does).

Invariants: counts only rise; an amount is counted in exactly one bucket, and in the sum.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Any, Final

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
"""Where buckets end, in seconds: the idle times at which modes let entries go (30 s, 2 min, 10 min) are among them."""


class Histogram:
    """Amounts by size. `bounds` rise; a bucket holds what is at most its bound, one more what is above the last."""

    def __init__(self, bounds: tuple[float, ...] = BOUNDS_S) -> None:
        assert all(low < high for low, high in pairwise(bounds)), "bounds must rise"
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def count(self, amount: float) -> None:
        """Counts one amount; less than nothing is nothing."""
        amount = max(0.0, amount)
        self._counts[bisect_left(self._bounds, amount)] += 1
        self._sum += amount

    def as_dict(self) -> dict[str, Any]:
        """`counts` per bucket (not summed up), the last above every bound; `sum` of all amounts."""
        return {"bounds": list(self._bounds), "counts": list(self._counts), "sum": self._sum}


class Departures:
    """Both histograms, by the reason for which an entry went."""

    def __init__(self) -> None:
        self._residence: dict[str, Histogram] = {}
        self._idle: dict[str, Histogram] = {}

    def count(self, reason: str, created_at: float, used_at: float, now: float) -> None:
        """An entry that was stored at `created_at`, and last used at `used_at`, goes now."""
        if reason not in self._residence:
            self._residence[reason], self._idle[reason] = Histogram(), Histogram()
        self._residence[reason].count(now - created_at)
        self._idle[reason].count(now - used_at)

    def as_dict(self) -> dict[str, Any]:
        """`residence_s` and `idle_s`, each a dict of histograms by reason, for status."""
        return {
            "residence_s": {reason: each.as_dict() for reason, each in self._residence.items()},
            "idle_s": {reason: each.as_dict() for reason, each in self._idle.items()},
        }
