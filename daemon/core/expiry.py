"""The lifetime of entries: their time to live, and the one way in which an entry ends.

Owns the entries' deadlines. Each end of an entry also ends its deadline and its pins by message, and is counted once by
its reason: capacity, entries, tokens, index_bucket, pressure, emergency (victims); ttl, explicit, cleared, invalidated,
corrupt. The descendants of an ended block end for the same reason, in slices. Does not own spans (`span_table`) nor the
choice of victims (`room`).

Invariants: exactly the stored entries with an expiry time have a deadline. A stored block whose parent has ended is
about to end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..reports.removal_history import RemovalHistory, Removed
from .deadlines import Deadlines
from .effects import WriteExpiry
from .entries import EntryState, SpanEntry
from .hits import Hits
from .outbox import StoreOutbox
from .pins import Pins
from .span_table import SpanTable

PUT_OFF_S: Final = 5.0
"""Delay until an expired parent is checked again. The end of its last child causes a check at once."""


@dataclass(slots=True, eq=False)
class RemovalProgress:
    """The reason of a removal, and its progress. `ended`: entries ended so far; `waiting`: ended entries that still
    have children to end."""

    reason: str
    announce: bool = True
    ended: int = 0
    waiting: int = 0


class Expiry:
    """Starts, renews and ends entries of `memory`."""

    def __init__(
        self,
        memory: SpanTable,
        pins: Pins,
        outbox: StoreOutbox,
        history: RemovalHistory,
        hits: Hits,
        default_ttl_s: float | None,
    ) -> None:
        self._memory = memory
        self._pins = pins
        self._outbox = outbox
        self._history = history
        self._hits = hits
        self._default_ttl_s = default_ttl_s
        self._expiry: Deadlines[SpanEntry] = Deadlines()
        self._awaiting_children: deque[tuple[SpanEntry, RemovalProgress]] = deque()

    @property
    def ending(self) -> bool:
        """Whether `end_children` has entries to end."""
        return bool(self._awaiting_children)

    def ttl_s(self, asked_s: float | None) -> float | None:
        """The time to live for a put that asks for `asked_s`. It runs from the put or the last touch; a get does not
        renew it."""
        return self._default_ttl_s if asked_s is None else asked_s

    def change_limits(self, default_ttl_s: float | None) -> None:
        """Applies to later publications."""
        self._default_ttl_s = default_ttl_s

    def next_timer(self) -> float | None:
        """When `expire` is due."""
        return self._expiry.next_timer()

    def published(self, entry: SpanEntry, now: float) -> None:
        """Records a new entry; it expires at the time in its header."""
        self._hits.stored(entry, self._memory.budget.put_bytes_max, now)
        self._begin(entry, now, entry.expires_at)

    def recovered(self, entry: SpanEntry, expires_at: float | None) -> None:
        """Records an entry that a restarted daemon found."""
        self._hits.recovered(entry, self._memory.budget.put_bytes_max)
        self._begin(entry, entry.used_at, expires_at)

    def _begin(self, entry: SpanEntry, used_at: float, expires_at: float | None) -> None:
        entry.used_at = used_at
        if expires_at is not None:
            self._expires(entry, expires_at)

    def _expires(self, entry: SpanEntry, when: float) -> None:
        """Sets the time at which the entry expires."""
        entry.expires_at = when
        self._expiry.set(entry, when)

    def used(self, entries: Collection[SpanEntry], now: float, agent: str = "") -> None:
        """Counts uses, by hits or by puts of stored keys, in their order; an entry occurs once for each use. `agent`:
        the agent that used them."""
        accessed = self._memory.policy.accessed
        for entry in entries:
            accessed(entry.number, now, agent)
            entry.used_at = now
            entry.uses += 1
        self._hits.used(entries, self._memory.budget.put_bytes_max, now)
        self._memory.index.show_uses({entry.slot: entry.uses for entry in entries}, now)

    def touch(self, entries: Collection[SpanEntry], now: float) -> None:
        """Counts a use, and restarts the time to live."""
        self.used(entries, now)
        for entry in entries:
            if entry.ttl_s is not None:
                self._expires(entry, now + entry.ttl_s)
                self._outbox.add(WriteExpiry(entry.offset, now + entry.ttl_s))

    def end(self, entry: SpanEntry, ending: RemovalProgress) -> None:
        """Ends an entry, pinned or not; its span is freed once no reader pins it. Its descendants are no longer matched
        from now on, and end with `end_children`."""
        self._memory.retire(entry, ending.reason)
        self._gone(entry, ending.reason, announce=ending.announce)
        ending.ended += 1
        if entry.newest_child is not None:
            ending.waiting += 1
            self._awaiting_children.append((entry, ending))

    def end_children(self, most: int) -> None:
        """Ends up to `most` descendants of ended entries."""
        while self._awaiting_children and most > 0:
            gone, ending = self._awaiting_children[0]
            if gone.newest_child is None:
                self._awaiting_children.popleft()
                ending.waiting -= 1
            else:
                self.end(gone.newest_child, ending)
                most -= 1

    def victim_gone(self, entry: SpanEntry) -> None:
        """Records the end of a victim whose span was freed or is pinned."""
        self._gone(entry, entry.reason, announce=True)

    def expire(self, now: float, most: int) -> None:
        """Ends up to `most` entries whose time is up. An entry that is pinned by message stays until the pin ends. An
        entry with children, stored or in flight, stays until the last child has ended."""
        for _ in range(most):
            entry = self._expiry.pop_due(now)
            if entry is None:
                return
            if self._pins.holds(entry.span_id):
                self._expiry.set(entry, self._pins.last_until(entry.span_id))
            elif entry.child_count or self._memory.sequences.is_awaited(entry):
                self._expiry.set(entry, now + PUT_OFF_S)
            else:
                self.end(entry, RemovalProgress("ttl"))

    def check_invariants(self) -> None:
        """Asserts that deadlines and pins belong to stored entries."""
        self._expiry.check_invariants()
        self._pins.check_invariants()
        stored = {entry.span_id: entry for entry in self._memory.entries}
        assert all(span_id in stored for span_id in self._pins.spans())
        limited = [entry for entry in stored.values() if entry.expires_at is not None]
        assert len(self._expiry) == len(limited)
        assert all(entry in self._expiry for entry in limited)
        ended = {gone for gone, _ in self._awaiting_children}
        for entry in stored.values():
            if entry.parent is not None and entry.parent.state is EntryState.RETIRED:
                assert entry.parent in ended, "a block is stored without its parent"

    def _gone(self, entry: SpanEntry, reason: str, *, announce: bool) -> None:
        self._expiry.drop(entry)
        self._pins.span_gone(entry.span_id)
        parent = entry.parent
        if parent is not None and parent.state is EntryState.LIVE and parent.expires_at is not None:
            # The parent may have expired and stayed for this child: check it again.
            self._expiry.set(parent, parent.expires_at)
        counters = self._outbox.counters
        counters.evictions[reason] += 1
        counters.evicted_bytes += entry.span_bytes
        now = self._outbox.now
        age_s, idle_s = max(0.0, now - entry.created_at), max(0.0, now - entry.used_at)
        one = np.array([age_s, idle_s, entry.uses, entry.worth])[:, None]
        keys = np.frombuffer(entry.key, np.uint64)[None]
        gone = Removed(keys, [reason], now, *one, sizes=np.array([entry.span_bytes]))
        counters.departures.count(gone)
        self._history.add(gone)
        self._hits.removed(entry, reason)
        if announce:
            event = "expire" if reason == "ttl" else "evict"
            self._outbox.announce(
                event,
                key=entry.key.hex(),
                reason=reason,
                span_bytes=entry.span_bytes,
                age_s=age_s,
                idle_s=idle_s,
                uses=entry.uses,
                worth=entry.worth,
            )
