"""A circuit breaker: leaves a remote store alone that fails, and tries it again from time to time.

    closed ── FAILURES_MAX failures in a row, or one refusal ──→ open ── a success ──→ closed
                                                                  └── a failure: twice the time until the next try

Another of the same kind leaves out only writes and removals while a store takes none (`link`).

Owns the state, and the times of the tries. Does not own what a failure is, nor the requests.
"""

from __future__ import annotations

from typing import Final

FAILURES_MAX: Final = 3
"""Failures in a row that open the breaker. One may be a connection that the server has closed."""
FIRST_S: Final = 1.0
"""The time from the opening to the first try."""
LONGEST_S: Final = 60.0
"""The longest time between two tries."""


class Breaker:
    """The breaker of one store. Times are seconds of the store core's clock."""

    def __init__(self) -> None:
        self.why = ""
        """The error that has opened the breaker; empty while it is closed."""
        self.opened = 0
        """How often the breaker was opened."""
        self.tries_at = 0.0
        """From when on an open breaker lets a request through."""
        self._failures = 0
        self._wait_s = FIRST_S

    @property
    def closed(self) -> bool:
        """Whether requests may be made."""
        return not self.why

    def may_try(self, now: float) -> bool:
        """Whether a request may be made, be it to see if the store serves again."""
        return self.closed or now >= self.tries_at

    def succeeded(self) -> bool:
        """The store has answered. Returns whether this has closed the breaker."""
        was_open = not self.closed
        self.why, self._failures, self._wait_s = "", 0, FIRST_S
        return was_open

    def failed(self, why: str, now: float, *, refused: bool) -> bool:
        """A request has failed; `refused`: the store would refuse the next one too. Returns whether this has opened the
        breaker."""
        opens = self.closed
        if opens:
            self._failures += 1
            if self._failures < FAILURES_MAX and not refused:
                return False
            self.why = why
            self.opened += 1
        elif now < self.tries_at:
            # The request was begun before the breaker opened, and says nothing new.
            return False
        else:
            self._wait_s = min(2 * self._wait_s, LONGEST_S)
        self.tries_at = now + self._wait_s
        return opens
