"""How long requests took, by kind, the slow ones of late, and how late the event loop was.

Owns: a histogram for each kind of message, and the list of slow requests. Does not own: when a request begins and ends
(the sessions), the clock. Pure.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, Final

from .counters import Histogram

BOUNDS_REQUEST_S: Final = (*(digit * 10.0**power for power in range(-5, 1) for digit in (1, 2, 5)), 10.0)
"""Upper bounds of buckets: 10 µs to 10 s."""

SLOW_MAX: Final = 128
"""How many slow requests are kept; the oldest goes first."""


class RequestTimes:
    """The times of all requests of all clients. One that takes longer than `slow_s` is kept as a slow one."""

    def __init__(self, slow_s: float, slow_max: int = SLOW_MAX) -> None:
        self.slow_s = slow_s
        self._slow: deque[dict[str, Any]] = deque(maxlen=slow_max)
        self._by_kind: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(BOUNDS_REQUEST_S))
        self._lag = Histogram(BOUNDS_REQUEST_S)

    def took(self, kind: str, took_s: float, **about: Any) -> None:
        """Counts an answered request. `about`: what is told of a slow one besides."""
        self._by_kind[kind].count(took_s)
        if took_s > self.slow_s:
            self._slow.append({"kind": kind, "took_s": took_s, **about})

    def lagged(self, late_s: float) -> None:
        """Counts by how much the event loop ran a timer too late."""
        self._lag.count(late_s)

    def as_dict(self) -> dict[str, Any]:
        """`kinds`: a histogram in seconds for each kind; `event_loop_lag`: that of the loop; `slow`: the requests that
        took longer than `slow_s`, the latest first."""
        return {
            "kinds": {kind: histogram.as_dict() for kind, histogram in sorted(self._by_kind.items())},
            "event_loop_lag": self._lag.as_dict(),
            "slow_s": self.slow_s,
            "slow": list(reversed(self._slow)),
        }
