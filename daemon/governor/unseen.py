"""Bytes of a device that were taken or freed, and that the last reading cannot show.

Owns sums of such bytes, each with the time from which a reading shows it. Does not own why they count: they are of
ended reservations, of new entries, or of entries that left.

A sum counts until a reading that was begun later. At most SUMS_MAX sums are kept; beyond that the latest two become
one, which counts until a reading later than both.
"""

from __future__ import annotations

from collections import deque
from typing import Final

SUMS_MAX: Final = 64


class UnseenBytes:
    """The unseen bytes of one device, of one kind."""

    def __init__(self) -> None:
        self._sums: deque[tuple[float, int]] = deque()

    @property
    def total(self) -> int:
        """The bytes that count."""
        return sum(size_bytes for _, size_bytes in self._sums)

    def add(self, size_bytes: int, now: float) -> None:
        """Counts bytes that were taken or freed by `now`."""
        if len(self._sums) == SUMS_MAX:
            size_bytes += self._sums.pop()[1]
        self._sums.append((now, size_bytes))

    def sampled(self, began_at: float) -> None:
        """Drops the sums from before this reading was begun: the reading shows them."""
        while self._sums and self._sums[0][0] < began_at:
            self._sums.popleft()
