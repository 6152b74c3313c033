"""The lifetimes of one store's entries: the parts of this package, and what they do in time and on behalf of clients.

    stored ─→ expiry, hit ratios                       tick ─→ pins, expiry, sweeps
    evict, clear, invalidate, expiry, corruption ─→ removals ─→ store.spans
    accessed, touch, put again ─ span ids ─ rows, as arrays ─→ the policy, once ─→ reuse words ─→ hit ratios

Owns the order in which the parts do what is due. The policy has the order of uses, the index the uses and the last use
of each entry (`store.slots`).

Invariant: an id that is no entry's, or of an entry that has ended, counts as an unknown hit and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...shm.index.generations import GenerationWriter
from ..claims.claims import NOBODY
from ..claims.quotas import Quotas
from ..forms.events import Accessed
from ..forms.limits import StoreLimits
from ..forms.outbox import StoreOutbox
from ..reports.hits import Hits
from ..reports.removal_history import RemovalHistory
from ..store.entries import Entries, OverEntries
from ..store.table import EDGE, LIVE, VICTIM
from .expiry import Expiry
from .pins import Pins
from .removals import RemovalProgress, Removals, Sweeps

Array = np.ndarray[Any, Any]


class Lifetimes(OverEntries):
    """The parts of this package over one store, and the uses of its entries."""

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
        most, hold = (limits.pins_per_client_max, limits.pinned_bytes_max), entries.spans.hold
        self.pins = Pins(*most, entries.table.sizes, hold, self._unpinned)
        self.expiry = Expiry(entries, self.pins)
        self.removals = Removals(entries, self.pins, self.expiry, history, hits, outbox)
        self.sweeps = Sweeps(entries, generations, self.removals, outbox, quotas)
        self._states: Array = np.frombuffer(self._table.states, np.uint8)
        self._span_ids = self._table.column("span_ids")

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

    def accessed(self, event: Accessed, now: float) -> Array:
        """Counts what a lane's log and counters have. Returns the rows that were used, in order, some several times."""
        counters = self._outbox.counters
        rows, known = self._find(np.asarray(event.span_ids, np.uint64))
        rows = rows[known]
        hits = len(event.span_ids) + event.lost
        counters.hits += hits
        counters.hits_unknown += len(event.span_ids) - len(rows)
        counters.misses += event.misses
        counters.log_lost += event.lost
        self._hits.looked_up(hits, event.misses, now)
        self.used(rows, now)
        return rows

    def used(self, rows: Sequence[int] | Array, now: float, agent: int = 0) -> None:
        """Counts uses of stored entries, in their order; an entry occurs once for each use. `agent`: the number of the
        agent that used them."""
        at = np.asarray(rows, np.int64)
        if len(at):
            self._policy.used(at, now, agent)
            self._details.count_uses(at, now)
            self._hits.used(at, now)

    def touched(self, rows: Sequence[int], now: float) -> None:
        self.used(rows, now)
        for row in rows:
            self.expiry.touched(row, now)

    def put_again(self, rows: Sequence[int], now: float) -> None:
        """Puts have named the keys of stored entries."""
        self.used(rows, now)
        for row in rows:
            self._policy.put_again(row)

    def held(self, span_ids: Array, holders: Array) -> None:
        """Shows readers how many clients hold each of these entries; (n,) uint64 and uint32."""
        rows, known = self._find(span_ids)
        self._details.show_holders(rows[known], holders[known].astype(np.uint64))

    def _find(self, span_ids: Array) -> tuple[Array, Array]:
        """The rows of span ids, and whether each id is an entry's."""
        rows = (span_ids & np.uint64(self._table.row_mask)).astype(np.int64)
        states = self._states[rows]
        stored = (states == LIVE) | (states == VICTIM)
        return rows, stored & (rows != EDGE) & (self._span_ids[rows] == span_ids)

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
