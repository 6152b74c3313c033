"""Demotion: entries that are evicted so that the host gets memory back are written to the remote store first.

    victims ─ in the store, or nothing for it → evicted at once
            └─ not in it → written before all that wait (`writes.hurry`) → evicted
                           not written DEMOTION_S after the first of them → evicted, and counted as dropped

Owns: which victims stay for now, and until when. Does not own the choice of victims, the queue, nor what is worth its
write (`writes`). Victims for a grant and for a budget of entries or tokens are none of them: their number does not
depend on the host, and a put would wait for the store.

Blocks of sequences and entries with a parent go at once: they leave last first, and one that stays would hold up those
before it. An entry of unknown cost is written, too: it has no next use that could decide. Each entry is tried once.
While victims stay, readers hit them.

Invariants: from the first victim that stays until `end`, no victim stays for longer than DEMOTION_S. While the store is
left alone, none stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..core.outbox import StoreOutbox
from ..store.table import RowTable
from .link import RemoteLink
from .writes import Writes

DEMOTION_S: Final = 1.0
"""How long giving memory back may wait for the remote store, each time that memory is to be given back."""


class Demotion:
    """The victims that stay until they are written."""

    def __init__(self, table: RowTable, link: RemoteLink, writes: Writes, outbox: StoreOutbox) -> None:
        self._table = table
        self._link = link
        self._writes = writes
        self._outbox = outbox
        self._ends_at: float | None = None
        self._late = False
        self._tried: set[bytes] = set()

    @property
    def waits(self) -> bool:
        """Whether victims stay until a write ends or `advance` ends the wait."""
        return bool(self._writes.leaving) and self._link.takes_writes

    def next_timer(self) -> float | None:
        """When `advance` is due."""
        return None if self._late else self._ends_at

    def advance(self, now: float) -> None:
        """Ends the wait if its time is over."""
        if self._ends_at is not None and now >= self._ends_at:
            self._late = True
            self._writes.leaving.clear()

    def staying(self, victims: Iterable[int], now: float) -> set[int]:
        """The rows of the victims that must stay for now, since they are being written. The coldest victim comes
        first."""
        writes, table = self._writes, self._table
        if not self._link.takes_writes:
            return set()
        stay: dict[int, bytes] = {}
        for row in victims:
            key = writes.key(row)
            goes_at_once = bool(table.records[row] or table.parents[row])
            if writes.has(key):
                if not self._late and not goes_at_once:
                    stay[row] = key
                elif key in writes.queue:
                    writes.drop(key)
            elif key not in self._tried and not goes_at_once and writes.takes(row, key, now):
                if self._late:
                    self._outbox.counters.remote["dropped"] += 1
                else:
                    stay[row] = key
        if stay:
            if self._ends_at is None:
                self._ends_at = now + DEMOTION_S
            writes.hurry(list(stay), now)
            self._tried.update(filter(writes.has, stay.values()))
        return set(stay) if writes.leaving else set()

    def end(self) -> None:
        """No memory is to be given back any more, or none can be. The next time has a deadline of its own."""
        if self._ends_at is not None:
            self._writes.leaving.clear()
            self._ends_at, self._late = None, False
            self._tried.clear()

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        assert not self._writes.leaving or (self._ends_at is not None and not self._late)
        assert self._ends_at is not None or not self._tried
