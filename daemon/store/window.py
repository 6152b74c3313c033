"""The window: entries that were just put stay until enough has been put after them.

Owns: the order in which entries were put, and which of them have left the window. Does not own: what a policy makes of
an entry that leaves.

Invariant: an entry leaves after at least `share` of the ring's bytes has been put after it, whatever the policy.
"""

from __future__ import annotations

from collections import deque


class PutWindow:
    """Rows in the order of their puts. `append` is all that a put does; the caller adds to `put_bytes` once a batch."""

    def __init__(self, stays_bytes: int) -> None:
        self.stays_bytes = stays_bytes
        self.put_bytes = 0
        """Bytes of all puts."""
        self._rows: deque[int] = deque()
        self.append = self._rows.append
        self._left_at = 0

    def __len__(self) -> int:
        return len(self._rows)

    def leaving(self, sizes: memoryview, most: int) -> list[int]:
        """Takes up to `most` rows out, in the order of their puts, that are no longer protected."""
        rows, left, until = self._rows, self._left_at, self.put_bytes - self.stays_bytes
        taken: list[int] = []
        while rows and len(taken) < most and left + sizes[rows[0]] <= until:
            left += sizes[rows[0]]
            taken.append(rows.popleft())
        self._left_at = left
        return taken

    def oldest(self, most: int) -> list[int]:
        """Takes up to `most` rows out, protected or not: for a ring in which nothing else may go."""
        return [self._rows.popleft() for _ in range(min(most, len(self._rows)))]
