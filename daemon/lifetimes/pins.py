"""Pins by message, `Pin` and `Unpin`: entries that clients keep published for a limited time.

A pin by message keeps its entry published, unlike the pin words of a lane: the entry is no victim and does not expire.
An explicit evict, clear or invalidate ends it nevertheless.

Invariants: a pin ends at its deadline, with its client, with its entry, or by Unpin. A client has at most one pin on a
row, and a limited number of pins. The bytes of all pinned rows stay under the limit. A pinned row is held (`hold`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ...errors import LimitReached
from ..claims.deadlines import Deadlines

EXPIRED_AT_ONCE: Final = 128


@dataclass(eq=False, repr=False)
class Pins:
    """The pins, with their deadlines, by (client, row). `sizes`: bytes by row. `hold`: the row is pinned from now on.
    `release`: its last pin has ended, and its entry has not."""

    per_client_max: int
    bytes_max: int
    _sizes: memoryview
    _hold: Callable[[int], object]
    _release: Callable[[int], object]

    def __post_init__(self) -> None:
        self._until: Deadlines[tuple[int, int]] = Deadlines()
        self._clients: dict[int, set[int]] = {}
        """By row."""
        self._counts: Counter[int] = Counter()
        """By client."""
        self.pinned_bytes = 0

    def __len__(self) -> int:
        return len(self._until)

    def holds(self, row: int) -> bool:
        return row in self._clients

    def next_timer(self) -> float | None:
        return self._until.next_timer()

    def pin(self, client: int, row: int, until: float) -> None:
        """Pins a row, or sets the end of the client's existing pin. Raises LimitReached if the client has as many pins
        as it may, or as much is pinned as may be."""
        if client not in self._clients.get(row, ()):
            if self._counts[client] >= self.per_client_max:
                raise LimitReached(
                    f"the client has {self._counts[client]} pins, and a client may have {self.per_client_max}: unpin "
                    "others first"
                )
            more = 0 if self.holds(row) else self._sizes[row]
            if self.pinned_bytes + more > self.bytes_max:
                raise LimitReached(
                    f"{more} more bytes to pin, with {self.pinned_bytes} bytes pinned already, would exceed "
                    f"{self.bytes_max} bytes, which is all that may be pinned: unpin others first"
                )
            self._counts[client] += 1
            self._clients.setdefault(row, set()).add(client)
            if more:
                self.pinned_bytes += more
                self._hold(row)
        self._until.set((client, row), until)

    def unpin(self, client: int, row: int) -> None:
        if client in self._clients.get(row, ()):
            self._end(client, row)
            if not self.holds(row):
                self._release(row)

    def row_gone(self, row: int) -> None:
        for client in [*self._clients.get(row, ())]:
            self._end(client, row)

    def client_left(self, client: int) -> None:
        for row in [row for row, clients in self._clients.items() if client in clients]:
            self.unpin(client, row)

    def expire(self, now: float) -> None:
        for _ in range(EXPIRED_AT_ONCE):
            due = self._until.pop_due(now)
            if due is None:
                return
            self.unpin(*due)

    def last_until(self, row: int) -> float:
        return max(self._until.when((client, row)) or 0.0 for client in self._clients[row])

    def _end(self, client: int, row: int) -> None:
        self._until.drop((client, row))
        self._counts[client] -= 1
        self._clients[row].remove(client)
        if not self._clients[row]:
            del self._clients[row]
            self.pinned_bytes -= self._sizes[row]

    def check_invariants(self) -> None:
        pairs = [(client, row) for row, clients in self._clients.items() for client in clients]
        assert len(pairs) == len(self._until) and all(self._until.when(pair) is not None for pair in pairs)
        assert +self._counts == Counter(client for client, _ in pairs)
        assert self.pinned_bytes == sum(self._sizes[row] for row in self._clients)
