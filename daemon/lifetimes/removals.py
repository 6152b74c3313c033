"""How entries end: each end is counted once by its reason, and brings about the ends of the entry's descendants.

    end(rows, reason) ─ Spans.end ─┐
    victims after a scan ──────────┴→ `gone`, a batch: counters, histograms, history, hits, announcements

Reasons: capacity, entries, tokens, pressure (victims); ttl, explicit, cleared, invalidated,
corrupt. The descendants of an ended entry end for the same reason, in slices.

A sweep ends the entries of a namespace, or all, that were published before its request, SLICE at a time, so that no
event takes longer than one slice.

Owns the ended entries some of whose children are still stored, and the sweeps in progress.

Invariants: a stored entry whose parent has ended is about to end. An entry that was hidden and is published again is
not counted. The new generation is in the index segment (`shm.index.generations`) before the first entry of the old
generation ends, and before the answer is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np

from ...ipc.messages import control as messages
from ...shm.index.generations import GenerationWriter
from ..claims.claims import NOBODY
from ..claims.quotas import Quotas
from ..forms.outbox import StoreOutbox
from ..reports.hits import Hits
from ..reports.removal_history import REASONS, REMOVED, RemovalHistory
from ..store.entries import Entries, OverEntries
from ..store.table import ENDED, LIVE, VICTIM
from .expiry import Expiry
from .pins import Pins

SLICE: Final = 256
"""Entries that one event ends: about 1 ms."""
EXPIRED_AT_ONCE: Final = 128
_NUMBERS: Final = {reason: number for number, reason in enumerate(REASONS)}
_WITH_OTHERS: Final = frozenset({"cleared", "invalidated"})
"""Reasons of ends that are announced together, by the sweep that ends them."""
_NO_ROWS: Final = np.empty(0, np.int64)

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

    def end_children(self) -> None:
        """Ends up to SLICE descendants of ended entries."""
        table, families, most = self._entries.table, self._entries.families, SLICE
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

    def expire(self, now: float) -> None:
        """Ends up to EXPIRED_AT_ONCE entries whose time is up. An entry that is pinned by message stays until the pin
        ends, one with published children until the last child has ended."""
        self.end(self._expiry.due(now, EXPIRED_AT_ONCE), RemovalProgress("ttl"))

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
        table, ended = self._entries.table, {row for row, _ in self._parents}
        for row in table.in_order():
            parent = table.parents[row]
            # A victim whose parent was put again ends with its scan: it has ancestors no more.
            if table.states[row] == LIVE and parent and table.states[parent] == ENDED:
                assert parent in ended, "an entry is stored without its parent"


@dataclass(slots=True)
class _Sweep:
    """`generation`: the namespace's, for an Invalidate. `rows`: those that were to end when the sweep began, of which
    `at` were looked at; None before that."""

    client: int
    request: messages.Clear | messages.Invalidate
    asked_at: float
    progress: RemovalProgress
    generation: int = 0
    rows: Array | None = None
    at: int = 0

    @property
    def walked(self) -> bool:
        return self.rows is not None and self.at >= len(self.rows)


class Sweeps(OverEntries):
    """The sweeps, for Clear and Invalidate, in order of request. The answer of each follows its last slice."""

    def __init__(
        self, entries: Entries, generations: GenerationWriter, removals: Removals, outbox: StoreOutbox, quotas: Quotas
    ) -> None:
        super().__init__(entries)
        self._generations = generations
        self._removals = removals
        self._outbox = outbox
        self._quotas = quotas
        self._states: Array = np.frombuffer(self._table.states, np.uint8)
        self._names = self._table.column("namespaces")
        self._waiting: deque[_Sweep] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def clear(self, client: int, request: messages.Clear) -> None:
        """Ends the entries of one namespace, or all entries. Answered by Counted."""
        self._begin(_Sweep(client, request, self._outbox.now, RemovalProgress("cleared")))

    def invalidate(self, client: int, request: messages.Invalidate) -> bool:
        """Raises the namespace's generation and ends its entries, unless another client has raised it meanwhile.
        Answered by Generation. Returns whether the generation was raised. Raises LimitReached if too many namespaces,
        in all or of the uid, would be invalidated, or the generation is the last possible one."""
        tag, generations = request.namespace, self._generations
        known = generations.current(tag)
        is_new = request.generation >= known
        sweep = _Sweep(client, request, self._outbox.now, RemovalProgress("invalidated"), known)
        if is_new:
            sweep.generation = request.generation + 1
            # The daemon follows an invalidation on another host.
            uid = self._quotas.own_uid if client == NOBODY else self._outbox.clients[client].uid
            if tag not in generations and client != NOBODY:
                self._quotas.admit("namespaces", uid, generations.of_uid[uid])
            generations.raise_to(tag, sweep.generation, uid)
            self._tenants.invalidated.add(tag)
        else:
            # No entry is left to end, but an earlier sweep may be running, and is answered first.
            sweep.rows = _NO_ROWS
        self._begin(sweep)
        return is_new

    def advance(self) -> None:
        """Ends the next slice, once the descendants of the last slice have ended."""
        if not self._waiting or self._waiting[0].walked or self._removals.ending:
            return
        sweep = self._waiting[0]
        if sweep.rows is None:
            # 3 ms for a million rows.
            sweep.rows = np.flatnonzero(self._is_swept(sweep, slice(None)))
        rows = sweep.rows[sweep.at : sweep.at + SLICE]
        sweep.at += SLICE
        # Meanwhile it may have ended, and the row be another entry's.
        rows = rows[self._is_swept(sweep, rows)]
        rows = rows[self._details.created(rows, self._outbox.now) <= sweep.asked_at]
        self._removals.end(rows.tolist(), sweep.progress)

    def answer(self) -> None:
        """Answers the first sweep, if it has ended."""
        if not self._waiting or not self._waiting[0].walked or self._waiting[0].progress.waiting:
            return
        sweep = self._waiting.popleft()
        request, ended, tag = sweep.request, sweep.progress.ended, sweep.request.namespace
        cleared = isinstance(request, messages.Clear)
        self._outbox.send(
            sweep.client,
            messages.Counted(request.id, ended)
            if cleared
            else messages.Generation(request.id, sweep.generation, ended),
        )
        event, named = "clear" if cleared else "invalidate", None if tag is None else tag.hex()
        self._outbox.announce(event, client=sweep.client, namespace=named, count=ended)

    def _begin(self, sweep: _Sweep) -> None:
        self._waiting.append(sweep)
        if len(self._waiting) == 1:
            self.advance()

    def _is_swept(self, sweep: _Sweep, rows: Array | slice) -> Array:
        """Which of these rows are entries of the sweep's namespace, victims included, (n,) bool."""
        states, tag = self._states[rows], sweep.request.namespace
        stored: Array = (states == LIVE) | (states == VICTIM)
        if tag is not None:
            stored &= self._names[rows] == self._tenants.number_of.get(tag, -1)
        return stored
