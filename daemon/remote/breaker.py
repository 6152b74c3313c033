"""A circuit breaker: leaves a remote store alone that fails, and tries it again from time to time.

    closed ── FAILURES_MAX failures in a row, or one refusal ──→ open ── a probe succeeds ──→ closed
                                                                  └── a probe fails: twice the time until the next one

Another of the same kind leaves out only writes and removals while a store takes none (`link`).

Owns the state, and the times of the probes. Does not own what a failure is, nor the requests.
"""

from __future__ import annotations

from typing import Final

FAILURES_MAX: Final = 3
"""Failures in a row that open the breaker. One may be a connection that the server has closed."""
FIRST_S: Final = 1.0
"""The time from the opening to the first probe."""
LONGEST_S: Final = 60.0
"""The longest time between two probes."""


class Breaker:
    """The breaker of one store. Times are seconds of the store core's clock."""

    def __init__(self) -> None:
        self.why = ""
        """The error that has opened the breaker; empty while it is closed."""
        self.opened = 0
        """How often the breaker was opened."""
        self._failures = 0
        self._wait_s = FIRST_S
        self._probe_at: float | None = None  # None: closed, or a probe is under way

    @property
    def probe_at(self) -> float | None:
        """When a probe may begin; None while the breaker is closed or a probe is under way."""
        return self._probe_at

    @property
    def closed(self) -> bool:
        """Whether requests may be made."""
        return not self.why

    def may_probe(self, now: float) -> bool:
        """Whether an open breaker allows one request, as a probe."""
        return self._probe_at is not None and now >= self._probe_at

    def probe(self) -> None:
        """A probe begins. Its outcome must be reported."""
        assert not self.closed
        self._probe_at = None

    def showed_nothing(self, now: float) -> None:
        """A probe has ended and says nothing of the breaker: another may begin."""
        if not self.closed:
            self._probe_at = now

    def succeeded(self) -> bool:
        """The store has answered. Returns whether this has closed the breaker."""
        was_open = not self.closed
        self.why, self._failures, self._wait_s, self._probe_at = "", 0, FIRST_S, None
        return was_open

    def failed(self, why: str, now: float, *, refused: bool, probe: bool) -> bool:
        """A request has failed; `refused`: the store would refuse the next one too. Returns whether this has opened the
        breaker."""
        if not self.closed:
            # Other requests were begun before the breaker opened, and say nothing new.
            if probe:
                self._wait_s = min(2 * self._wait_s, LONGEST_S)
                self._probe_at = now + self._wait_s
            return False
        self._failures += 1
        if self._failures < FAILURES_MAX and not refused:
            return False
        self.why, self._probe_at = why, now + self._wait_s
        self.opened += 1
        return True
