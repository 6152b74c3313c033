"""Uses of entries, in batches: by hits, which the lanes' logs have; by matches of sequences; by puts of stored keys.

    span ids ─ rows, as arrays ─→ the policy, once ─→ reuse words ─→ hit ratios

The policy has the order, the index the uses and the last use of each entry (`store.details`).

Invariant: an id that is no entry's, or of an entry that has ended, counts as an unknown hit and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..forms.events import Accessed
from ..forms.outbox import StoreOutbox
from ..reports.hits import Hits
from ..store.entries import Entries, OverEntries
from ..store.table import EDGE, LIVE, VICTIM
from .expiry import Expiry

Array = np.ndarray[Any, Any]


class Uses(OverEntries):
    """Counts the uses of one store's entries."""

    def __init__(self, entries: Entries, expiry: Expiry, hits: Hits, outbox: StoreOutbox) -> None:
        super().__init__(entries)
        self._expiry = expiry
        self._hits = hits
        self._outbox = outbox
        self._states: Array = np.frombuffer(self._table.states, np.uint8)
        self._span_ids = self._table.column("span_ids")

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
        """Counts a use of each entry, and restarts its time to live."""
        self.used(rows, now)
        for row in rows:
            self._expiry.touched(row, now)

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
