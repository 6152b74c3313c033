"""What may be taken of the ring and the index at most."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RingBudget:
    """What may be taken at most. `max_bytes` changes while running.

    `resident_bytes_max` is what the ring has in memory, or will have once it has shrunk as it should: puts stay within
    it, but no entry goes for it alone, since only whole pages are worth that.
    """

    max_entries: int
    max_bytes: int
    max_tokens: int | None
    resident_bytes_max: int | None = None

    @property
    def put_bytes_max(self) -> int:
        """What may be taken once a put has its span."""
        resident = self.resident_bytes_max
        return self.max_bytes if resident is None else min(self.max_bytes, resident)
