"""How old, how long unused, how often used and how much worth entries were when they went. Pure counting.

Owns: the bounds of the buckets, and what fell into each. Does not own when something goes (expiry does).

Invariants: counts only rise; an amount is counted in exactly one bucket, and in the sum.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Any, Final

from .removal_history import RemovalRecord

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
BOUNDS_USES: Final = (0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0)
"""Where buckets of uses end: the classes of the learned policy do too."""
BOUNDS_WORTH: Final = tuple(10.0**power for power in range(-15, 4))
"""What an entry is worth ranges over as many orders of magnitude as its cost and its bytes do."""


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
    """Histograms of entries that went, by the reason for which they did."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, Histogram]] = {}

    def count(self, gone: RemovalRecord) -> None:
        """An entry went."""
        each = self._of.get(gone.reason)
        if each is None:
            each = self._of[gone.reason] = {
                "residence_s": Histogram(),
                "idle_s": Histogram(),
                "uses": Histogram(BOUNDS_USES),
                "worth": Histogram(BOUNDS_WORTH),
            }
        each["residence_s"].count(gone.age_s)
        each["idle_s"].count(gone.idle_s)
        each["uses"].count(gone.uses)
        each["worth"].count(gone.worth)

    def as_dict(self) -> dict[str, Any]:
        """`residence_s`, `idle_s`, `uses` and `worth`, each a dict of histograms by reason, for status."""
        return {
            name: {reason: each[name].as_dict() for reason, each in self._of.items()}
            for name in ("residence_s", "idle_s", "uses", "worth")
        }
