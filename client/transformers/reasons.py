"""Why calls ran without sharing: counted for each reason, and logged once.

Owns: these counts. Does not own: the conditions. Invariants: a reason is logged once for each object that counts.
"""

from __future__ import annotations

import logging
from collections import Counter

from ...errors import TensordError

__all__ = ["NotShared", "Reasons"]

_log = logging.getLogger("tensord")


class NotShared(Exception):
    """The call runs without sharing. The message is the reason, for users."""


class Reasons(Counter[str]):
    """The number of calls for each reason."""

    def add(self, error: Exception, consequence: str) -> None:
        """Counts a reason, and logs it with its consequence if it is new."""
        known = isinstance(error, NotShared | TensordError)
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        self[reason] += 1
        if self[reason] == 1:
            _log.warning("tensord: %s: %s", consequence, reason, exc_info=None if known else error)
