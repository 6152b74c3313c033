"""Why calls ran without sharing: counted for each reason, and logged once.

Owns: these counts. Does not own: the conditions. Invariants: a reason is logged once for each object that counts. A
reason that is known before the first call is there with 0 calls.
"""

from __future__ import annotations

import logging
from collections import Counter

from ...errors import TensordError

_log = logging.getLogger("tensord")


class NotShared(Exception):
    """The call runs without sharing. The message is the reason, for users."""


class Reasons(Counter[str]):
    """The number of calls for each reason."""

    def add(self, error: Exception, consequence: str) -> None:
        """Counts a call, and logs the reason with its consequence if it is new."""
        self[self.tell(error, consequence)] += 1

    def tell(self, error: Exception, consequence: str) -> str:
        """Logs the reason with its consequence if it is new. Returns the reason."""
        known = isinstance(error, NotShared | TensordError)
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        if reason not in self:
            self[reason] = 0
            _log.warning("tensord: %s: %s", consequence, reason, exc_info=None if known else error)
        return reason
