"""The limits on the amounts that entries take of the ring and the index.

Owns the limits in force. Does not own the amounts taken (daemon/room/places). Invariant: `put_bytes_max` is at most
`max_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RingBudget:
    """The present limits. `max_bytes` changes while running.

    `resident_bytes_max`: the bytes of the ring that are in memory, or will be once it has shrunk. Puts stay within it.
    No entry is evicted for it alone, since only whole pages return memory to the system.
    """

    max_entries: int
    max_bytes: int
    max_tokens: int | None
    resident_bytes_max: int | None = None

    @property
    def put_bytes_max(self) -> int:
        """The limit on the bytes taken once a put has its span."""
        resident = self.resident_bytes_max
        return self.max_bytes if resident is None else min(self.max_bytes, resident)
