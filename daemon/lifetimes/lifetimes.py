"""The lifetimes of one store's entries: the parts of this package, and what they do in time and on behalf of clients.

    stored ─→ expiry, hit ratios        accessed, touch, put again ─→ uses        tick ─→ pins, expiry, sweeps
    evict, clear, invalidate, expiry, corruption ─→ removals ─→ store.spans

Owns the order in which the parts do what is due.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...shm.index.generations import GenerationWriter
from ..claims.claims import NOBODY
from ..claims.quotas import Quotas
from ..forms.limits import StoreLimits
from ..forms.outbox import StoreOutbox
from ..reports.hits import Hits
from ..reports.removal_history import RemovalHistory
from ..store.entries import Entries, OverEntries
from .expiry import Expiry
from .pins import Pins
from .removals import RemovalProgress, Removals, Sweeps
from .uses import Uses

Array = np.ndarray[Any, Any]


class Lifetimes(OverEntries):
    """The parts of this package over one store."""

    def __init__(
        self,
        entries: Entries,
        generations: GenerationWriter,
        history: RemovalHistory,
        hits: Hits,
        quotas: Quotas,
        outbox: StoreOutbox,
        limits: StoreLimits,
    ) -> None:
        super().__init__(entries)
        self._hits = hits
        self._outbox = outbox
        self.pins = Pins(limits.pins_per_client_max, limits.pinned_bytes_max, entries.spans.hold, self._unpinned)
        self.expiry = Expiry(entries, self.pins)
        self.removals = Removals(entries, self.pins, self.expiry, history, hits, outbox)
        self.uses = Uses(entries, self.expiry, hits, outbox)
        self.sweeps = Sweeps(entries, generations, self.removals, outbox, quotas)

    def stored(self, rows: Sequence[int], now: float, client: int = NOBODY) -> None:
        """A client has put entries (`Commits.fresh`); the daemon, if they come from the remote store."""
        at = np.array(rows, np.int64)
        self.expiry.stored(at)
        self._hits.stored(at, now)
        if client != NOBODY:
            self._outbox.counters.puts["stored"] += len(at)
            self._outbox.counters.put_bytes += int(self._table.column("payloads")[at].sum())
        if self._outbox.is_watched():
            self._announce(at, client)

    def end(self, rows: Sequence[int], reason: str) -> None:
        """Ends different entries; their descendants follow (`step`)."""
        self.removals.end(rows, RemovalProgress(reason))

    def step(self) -> None:
        """Ends a slice of the descendants of ended entries, and answers a sweep that has ended. Once an event."""
        if self.removals.ending:
            self.removals.end_children()
        if len(self.sweeps):
            self.sweeps.answer()

    def tick(self, now: float) -> None:
        """Does what is due, a slice of each kind."""
        self.pins.expire(now)
        self.removals.expire(now)
        self.sweeps.advance()

    @property
    def postponed(self) -> bool:
        """Whether work was left to the next tick, which is due now."""
        return self.removals.ending or len(self.sweeps) > 0

    def next_timer(self) -> float | None:
        timers = (self.pins.next_timer(), self.expiry.next_timer())
        return min((timer for timer in timers if timer is not None), default=None)

    def check_invariants(self) -> None:
        self.pins.check_invariants()
        self.expiry.check_invariants()
        self.removals.check_invariants()

    def _unpinned(self, row: int) -> None:
        self._spans.release(row)
        self.expiry.look_again(row)

    def _announce(self, rows: Array, client: int) -> None:
        table = self._table
        for row, key in zip(rows.tolist(), self._details.keys(rows), strict=True):
            payload, tokens = table.payloads[row], table.tokens[row]
            event = "put" if client != NOBODY else "fetch"
            self._outbox.announce(event, client=client, key=key.tobytes().hex(), payload_bytes=payload, tokens=tokens)
