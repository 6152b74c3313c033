"""The learned policy's clock. Its unit is the mean pause between recent requests.

So entries do not age while there are no requests, and state learned at one request rate is valid at any other.

Owns: the time and the mean pause. Does not own the seconds, which are arguments.

Invariants: the clock never runs backwards; one pause adds at most PAUSE_MAX.
"""

from __future__ import annotations

from math import isfinite
from typing import Final

PAUSES: Final = 256
"""The mean is over about this number of pauses."""
PAUSE_MAX: Final = 64.0
"""A longer pause counts as this many mean pauses."""


class Clock:
    """`now`: the time since the start, in mean pauses."""

    def __init__(self) -> None:
        self.now = 0.0
        self._at: float | None = None
        self._mean_s = 0.0
        self._seen = 0

    def learned(self) -> list[float]:
        """The clock's state, for `learn`."""
        return [self.now, self._mean_s, self._seen]

    def learn(self, state: list[float]) -> None:
        """Restores the state from `learned`. The time since then does not count as a pause.

        Raises:
            ValueError, TypeError: `state` is not a state of a clock.
        """
        now, mean_s, seen = map(float, state)
        if not (isfinite(now) and isfinite(mean_s) and now >= 0 and mean_s >= 0 and 0 <= seen <= PAUSES):
            raise ValueError("not a state of the clock")
        self.now, self._mean_s, self._seen, self._at = now, mean_s, int(seen), None

    def pass_to(self, at: float) -> None:
        """Sets the time to `at` seconds of a steady clock. A time not after the last one counts as no pause."""
        pause_s = 0.0 if self._at is None else at - self._at
        self._at = at if self._at is None else max(self._at, at)
        if pause_s <= 0:
            return
        mean_s = self._mean_s or pause_s
        pause_s = min(pause_s, PAUSE_MAX * mean_s)
        self.now += pause_s / mean_s
        self._seen = min(self._seen + 1, PAUSES)
        self._mean_s = mean_s + (pause_s - mean_s) / self._seen
