"""The window: what was just put stays until an eighth of the stored bytes has been put after it.

    put → `append(row)`     batch of puts → `batch_ended(now, bytes)`     READ_AT rows → the policy takes them in

A put only appends its row. The policy takes the new rows in as one batch of arrays, at the latest when a batch of puts
ends with READ_AT of them, and before anything else that it does. So a row is never freed, and used again, while it
waits here. An entry leaves the window without any work: its place in the order of puts is a number, `put_at`, and
the policy compares it with `begins`.

Owns: the rows that were put and not taken in yet, and the place of each row in the order of puts. Does not own what a
policy makes of a new row, nor which rows are stored.

Invariants: `put_at` only rises along the order of puts. A row with a parent is never in the window: a later block of a
sequence must be worth its place from the start (docs/replacement.md has the trials).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

WINDOW_SHARE: Final = 1 / 8
"""The window's share of the stored bytes: more than the promised tenth of the ring, because the ring has holes."""
READ_AT: Final = 256
"""New rows that are taken in at once. Arrays of this length cost about 0.2 µs a row and operation less than rows."""

Array = np.ndarray[Any, Any]
Batches = list[tuple[int, float]]
"""Numbers of rows, each with the time at which they were put."""


class RowWindow:
    """The new rows of one store. `sizes`, `depths`: the store's columns. `take_in`: has the policy call `taken`."""

    def __init__(self, sizes: Array, depths: Array, take_in: Callable[[], object]) -> None:
        self._sizes = sizes
        self._depths = depths
        self._take_in = take_in
        self._new: list[int] = []
        self.append = self._new.append
        """Adds a row that was put: all that a put does."""
        self._batches: Batches = []
        self._marked = 0
        self.put_bytes = 0
        """Bytes of all puts that were taken in."""
        self.put_at = np.zeros(len(sizes), np.uint64)
        """By row: `put_bytes` with the row's put; 0 for a row that is never in the window."""

    def __len__(self) -> int:
        """The new rows that the policy has not taken in."""
        return len(self._new)

    def batch_ended(self, now: float) -> None:
        """The rows that were appended since the last call were put at `now`."""
        count = len(self._new)
        if count > self._marked:
            self._batches.append((count - self._marked, now))
            self._marked = count
            if count >= READ_AT:
                self._take_in()

    def taken(self) -> tuple[Array, Batches]:
        """Takes out the new rows, in the order of their puts, with their times. Those of a batch that has not ended
        stay."""
        rows, batches = np.array(self._new[: self._marked], np.int64), self._batches
        del self._new[: self._marked]
        self._batches, self._marked = [], 0
        if len(rows):
            self._place(rows)
        return rows, batches

    def recovered(self, rows: Array) -> None:
        """The stored rows of an earlier daemon, in the order of their puts."""
        self._place(rows)

    def put_again(self, row: int) -> None:
        """A put named the key of a stored row: it belongs to the window again, unless it has a parent."""
        if self.put_at[row]:
            self.put_at[row] = self.put_bytes

    def begins(self, stored_bytes: int) -> int:
        """The window has the rows whose `put_at` is above this."""
        return max(self.put_bytes - int(WINDOW_SHARE * stored_bytes), 0)

    def _place(self, rows: Array) -> None:
        ends = np.cumsum(self._sizes[rows]) + np.uint64(self.put_bytes)
        self.put_bytes = int(ends[-1]) if len(ends) else self.put_bytes
        self.put_at[rows] = np.where(self._depths[rows] == 0, ends, 0)
