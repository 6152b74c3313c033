"""Computed values that could not be stored: counted, and each reason logged once.

Owns: the count, and which reasons the log has. Does not own: refusals (puts.py), nor what follows for a claim
(once.py). Any thread may call it: a refusal by the daemon comes in the link's thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

from ...errors import Invalidated, TensordError, UnderPressure
from ...shm.ring.layout import NAMESPACE_TAG_BYTES

_log = logging.getLogger("tensord")
_TOLD_MAX: Final = 1024
_PASSING: Final = (Invalidated, UnderPressure)
"""Refusals that a sound program meets, and that end by themselves."""
_told: Final[set[tuple[bytes, str]]] = set()
"""Namespaces and names of errors of which this process has told."""


class Unstored:
    """What became of the values of one client's `get_or_compute`. `counts`: values that were not stored, by the
    error's name."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def refused(self, key: bytes, error: TensordError) -> None:
        """The value of `key` was refused. One log line of the process for each namespace and name of an error."""
        self._counts[error.code] += 1
        reason = key[:NAMESPACE_TAG_BYTES], error.code
        if isinstance(error, _PASSING) or reason in _told or len(_told) >= _TOLD_MAX:
            return
        _told.add(reason)
        _log.warning(
            "computed values of the namespace %s are not stored, so each process computes them itself: %s: %s",
            reason[0].hex(),
            error.code,
            str(error),  # whoever keeps log records would keep the error's frames
        )
