"""How entries end: each end is counted once by its reason, and brings about the ends of the entry's descendants.

    end(rows, reason) ─ Spans.end ─┐
    victims after a scan ──────────┴→ `gone`, a batch: counters, histograms, history, hits, announcements

Reasons: capacity, entries, tokens, pressure (victims); ttl, explicit, cleared, invalidated,
corrupt. The descendants of an ended entry end for the same reason, in slices.

Owns the entries that have ended and have children which have not. Does not own spans (`store.spans`), the choice of
victims (daemon/room), nor the records (daemon/reports).

Invariants: a stored entry whose parent has ended is about to end. An entry that was hidden and is published again is
not counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np

from ..forms.outbox import StoreOutbox
from ..reports.hits import Hits
from ..reports.removal_history import REASONS, REMOVED, RemovalHistory
from ..store.entries import Entries
from ..store.table import ENDED, LIVE
from .expiry import Expiry
from .pins import Pins

SLICE: Final = 256
"""Entries that one event ends: about 1 ms."""
EXPIRED_AT_ONCE: Final = 128
_NUMBERS: Final = {reason: number for number, reason in enumerate(REASONS)}
_WITH_OTHERS: Final = frozenset({"cleared", "invalidated"})
"""Reasons of ends that are announced together, by the job that ends them (`sweeps`)."""

Array = np.ndarray[Any, Any]


@dataclass(slots=True, eq=False)
class RemovalProgress:
    """The reason of a removal, and its progress. `ended`: entries ended so far; `waiting`: ended entries that still
    have children to end."""

    reason: str
    ended: int = 0
    waiting: int = 0


@dataclass(eq=False, repr=False)
class Removals:
    """Ends entries, and counts the ends of all. Adds itself to `spans.gone`."""

    _entries: Entries
    _pins: Pins
    _expiry: Expiry
    _history: RemovalHistory
    _hits: Hits
    _outbox: StoreOutbox

    def __post_init__(self) -> None:
        self._parents: deque[tuple[int, RemovalProgress]] = deque()
        self._entries.spans.gone.append(self._gone)

    @property
    def ending(self) -> bool:
        """Whether `end_children` has entries to end."""
        return bool(self._parents)

    def end(self, rows: Sequence[int], progress: RemovalProgress) -> None:
        """Ends different entries, pinned or not; their bytes are free once no reader pins them. Their descendants are
        matched no more from now on, and end with `end_children`."""
        if not rows:
            return
        self._entries.spans.end(rows, progress.reason)
        progress.ended += len(rows)
        firsts = self._entries.table.firsts
        for row in rows:
            if firsts[row]:
                progress.waiting += 1
                self._parents.append((row, progress))

    def end_children(self, most: int = SLICE) -> None:
        """Ends up to `most` descendants of ended entries."""
        table, families = self._entries.table, self._entries.families
        while self._parents and most > 0:
            row, progress = self._parents[0]
            # All its children may have been victims, and then its row may be another entry's.
            there = table.states[row] == ENDED
            children = list(islice(families.children_of(row), most)) if there else []
            self.end(children, progress)
            most -= max(len(children), 1)
            if not there or not table.firsts[row]:
                self._parents.popleft()
                progress.waiting -= 1

    def expire(self, now: float, most: int = EXPIRED_AT_ONCE) -> None:
        """Ends up to `most` entries whose time is up. An entry that is pinned by message stays until the pin ends, one
        with published children until the last child has ended."""
        self.end(self._expiry.due(now, most), RemovalProgress("ttl"))

    def corrupt(self, rows: Sequence[int]) -> None:
        """Ends entries whose bytes are not those that were put."""
        self._outbox.counters.found_corrupt += len(rows)
        self.end(rows, RemovalProgress("corrupt"))

    def _gone(self, rows: Sequence[int], reasons: Sequence[str]) -> None:
        entries, now = self._entries, self._outbox.now
        table, details = entries.table, entries.details
        at = np.array(rows, np.int64)
        created = details.created(at, now)
        uses, used = details.uses(at)
        gone = np.zeros(len(at), REMOVED)
        gone["key"], gone["at"], gone["age_s"] = details.keys(at), now, now - created
        gone["idle_s"] = np.maximum(now - np.maximum(used, created), 0.0)
        gone["uses"], gone["worth"] = uses, entries.policy.worth(at)
        gone["span_bytes"], gone["reason"] = table.column("sizes")[at], [_NUMBERS[each] for each in reasons]
        self._outbox.counters.removed(gone)
        self._history.add(gone)
        self._hits.ended(at, reasons)
        if len(self._pins):
            for row in rows:
                self._pins.row_gone(row)
        if entries.families.linked:
            # A parent may have expired, and have stayed for these children.
            for parent in np.unique(table.column("parents")[at]).tolist():
                if table.states[parent] == LIVE and not table.children[parent]:
                    self._expiry.look_again(parent)
        if self._outbox.is_watched():
            self._announce(gone)

    def _announce(self, gone: Array) -> None:
        for each in gone:
            reason = REASONS[each["reason"]]
            if reason not in _WITH_OTHERS:
                figures = {name: each[name].item() for name in ("span_bytes", "age_s", "idle_s", "uses", "worth")}
                event = "expire" if reason == "ttl" else "evict"
                self._outbox.announce(event, key=each["key"].tobytes().hex(), reason=reason, **figures)

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        table, ended = self._entries.table, {row for row, _ in self._parents}
        for row in table.in_order():
            parent = table.parents[row]
            # A victim whose parent was put again ends with its scan: it has ancestors no more.
            if table.states[row] == LIVE and parent and table.states[parent] == ENDED:
                assert parent in ended, "an entry is stored without its parent"
