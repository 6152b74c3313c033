"""Histograms of removed entries: age, idle time, uses and worth.

Owns the bucket bounds and the counts. Does not own the removal of entries (daemon/lifetimes).

Invariants: counts only rise. An amount is counted in exactly one bucket, and in the sum.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Any, Final

import numpy as np

from .removal_history import Array, Removed

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
BOUNDS_USES: Final = (0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0)
"""Upper bounds of buckets of uses: the same as the classes of the learned policy."""
BOUNDS_WORTH: Final = tuple(10.0**power for power in range(-15, 4))
"""Upper bounds of buckets of worth. They span many orders of magnitude, as the costs and the bytes of entries do."""


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


class Departures:
    """Histograms of removed entries, by reason of removal."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, Histogram]] = {}

    def count(self, gone: Removed) -> None:
        """Counts removed entries."""
        for reason, at in gone.by_reason().items():
            each = self._of.get(reason)
            if each is None:
                each = self._of[reason] = {
                    "residence_s": Histogram(),
                    "idle_s": Histogram(),
                    "uses": Histogram(BOUNDS_USES),
                    "worth": Histogram(BOUNDS_WORTH),
                }
            each["residence_s"].count_all(gone.age_s[at])
            each["idle_s"].count_all(gone.idle_s[at])
            each["uses"].count_all(gone.uses[at])
            each["worth"].count_all(gone.worth[at])

    def as_dict(self) -> dict[str, Any]:
        """`residence_s`, `idle_s`, `uses` and `worth`, each a dict of histograms by reason, for status."""
        return {
            name: {reason: each[name].as_dict() for reason, each in self._of.items()}
            for name in ("residence_s", "idle_s", "uses", "worth")
        }
