"""Pins by message, `Pin` and `Unpin`: entries that clients keep published for a limited time.

A pin by message keeps its entry published, unlike the pin words of a lane: the entry is no victim and does not expire.
An explicit evict, clear or invalidate ends it nevertheless.

Invariants: a pin ends at its deadline, with its client, with its entry, or by Unpin. A client has at most one pin on a
row, and a limited number of pins. The bytes of all pinned rows stay under the limit. A pinned row is held (`hold`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ...errors import LimitReached
from ..claims.deadlines import Deadlines

EXPIRED_AT_ONCE: Final = 128


@dataclass(eq=False, repr=False)
class Pins:
    """The pins by row and by client, with their deadlines. `hold`: the row is pinned from now on. `release`: its last
    pin has ended, and its entry has not."""

    per_client_max: int
    bytes_max: int
    _hold: Callable[[int], object]
    _release: Callable[[int], object]

    def __post_init__(self) -> None:
        self._until: Deadlines[tuple[int, int]] = Deadlines()
        self._by_client: dict[int, set[int]] = {}
        self._by_row: dict[int, tuple[int, set[int]]] = {}
        """By row: its bytes, and the clients."""
        self.pinned_bytes = 0

    def __len__(self) -> int:
        return len(self._until)

    def holds(self, row: int) -> bool:
        return row in self._by_row

    def next_timer(self) -> float | None:
        return self._until.next_timer()

    def pin(self, client: int, row: int, size_bytes: int, until: float) -> None:
        """Pins a row, or sets the end of the client's existing pin. Raises LimitReached if the client has as many pins
        as it may, or as much is pinned as may be."""
        own = self._by_client.get(client, set())
        if row not in own:
            if len(own) >= self.per_client_max:
                raise LimitReached(
                    f"the client has {len(own)} pins, and a client may have {self.per_client_max}: unpin others first"
                )
            more = 0 if row in self._by_row else size_bytes
            if self.pinned_bytes + more > self.bytes_max:
                raise LimitReached(
                    f"{more} more bytes to pin, with {self.pinned_bytes} bytes pinned already, would exceed "
                    f"{self.bytes_max} bytes, which is all that may be pinned: unpin others first"
                )
            self._by_client.setdefault(client, set()).add(row)
            self._by_row.setdefault(row, (size_bytes, set()))[1].add(client)
            if more:
                self.pinned_bytes += size_bytes
                self._hold(row)
        self._until.set((client, row), until)

    def unpin(self, client: int, row: int) -> None:
        """Ends a pin, if there is one."""
        if self._end(client, row):
            self._release(row)

    def row_gone(self, row: int) -> None:
        """Ends every pin on the row, since its entry has ended."""
        for client in list(self._by_row[row][1]) if row in self._by_row else ():
            self._end(client, row)

    def client_left(self, client: int) -> None:
        for row in list(self._by_client.get(client, ())):
            self.unpin(client, row)

    def expire(self, now: float) -> None:
        """Ends up to EXPIRED_AT_ONCE pins whose time is up."""
        for _ in range(EXPIRED_AT_ONCE):
            due = self._until.pop_due(now)
            if due is None:
                return
            self.unpin(*due)

    def last_until(self, row: int) -> float:
        return max(self._until.when((client, row)) or 0.0 for client in self._by_row[row][1])

    def _end(self, client: int, row: int) -> bool:
        """Ends a pin, if there is one. Returns whether it was the last one on the row."""
        own = self._by_client.get(client, set())
        if row not in own:
            return False
        self._until.drop((client, row))
        own.discard(row)
        if not own:
            del self._by_client[client]
        size_bytes, clients = self._by_row[row]
        clients.discard(client)
        if not clients:
            del self._by_row[row]
            self.pinned_bytes -= size_bytes
        return not clients

    def check_invariants(self) -> None:
        pairs = {(client, row) for client, rows in self._by_client.items() for row in rows}
        assert pairs == {(client, row) for row, (_, clients) in self._by_row.items() for client in clients}
        assert len(pairs) == len(self._until) and all(self._until.when(pair) is not None for pair in pairs)
        assert self.pinned_bytes == sum(size for size, _ in self._by_row.values())
