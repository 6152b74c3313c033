"""The time that a policy reckons in: a pause as long as the mean of the last ones is 1.

So nothing grows old while nobody asks for anything, and what was learned at one rate of requests holds at any other.

Invariants: it never runs backwards; one pause adds PAUSE_MAX at most.
"""

from __future__ import annotations

from math import isfinite
from typing import Final

PAUSES: Final = 256
"""The mean is over about so many."""
PAUSE_MAX: Final = 64.0
"""A longer pause, in means, counts as one of this length."""


class Clock:
    """`now`: how much time has passed."""

    def __init__(self) -> None:
        self.now = 0.0
        self._at: float | None = None
        self._mean_s = 0.0
        self._seen = 0

    def learned(self) -> list[float]:
        """For `learn`."""
        return [self.now, self._mean_s, self._seen]

    def learn(self, told: list[float]) -> None:
        """Goes on from what `learned` told; what has passed since is no pause."""
        now, mean_s, seen = map(float, told)
        if not (isfinite(now) and isfinite(mean_s) and now >= 0 and mean_s >= 0 and 0 <= seen <= PAUSES):
            raise ValueError("no time")
        self.now, self._mean_s, self._seen, self._at = now, mean_s, int(seen), None

    def pass_to(self, at: float) -> None:
        """It is `at` seconds by a clock that runs evenly; no later than before is no pause."""
        pause_s = 0.0 if self._at is None else at - self._at
        self._at = at if self._at is None else max(self._at, at)
        if pause_s <= 0:
            return
        mean_s = self._mean_s or pause_s
        pause_s = min(pause_s, PAUSE_MAX * mean_s)
        self.now += pause_s / mean_s
        self._seen = min(self._seen + 1, PAUSES)
        self._mean_s = mean_s + (pause_s - mean_s) / self._seen
