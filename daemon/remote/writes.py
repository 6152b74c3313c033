"""Writes: entries of the ring that are copied to the remote store in the background, for other hosts.

    published ─ worth it? → queue ─ SaveRemote → RemoteSaved
    used again ─ if its cost is unknown, or it was dropped ──↗
    about to be evicted (`staying`) ─ before all that wait ──↗

Owns: which entries are written, the queue, the spans that a write reads, and which victims stay until they are written.
Does not own the threads that write, nor the choice of victims.

An entry is worth its write if computing it takes longer than reading it back. If nobody knows how long computing takes,
its second use decides. A full queue drops what is new, and counts it: the store is a cache, and the next put or use of
the entry tries again. What waits is named by its key: a key has one payload, whichever row it is in by then.

Victims for the host's memory are written first, if the store does not have them. Those for a grant and for a budget of
entries or tokens are not: their number does not depend on the host, and a put would wait for the store. Blocks of
sequences and entries with a parent go at once: they leave last first, and one that stays would hold up those before it.
An entry of unknown cost is written, too. Each entry is tried once. While victims stay, readers hit them.

Invariants: a span in `reading` counts as pinned at every scan, so its bytes do not change under a write, whatever
becomes of the entry. One write or removal is under way at a time, so a removal never meets a write of its key. At most
QUEUED_MAX entries wait besides those that are about to be evicted. From the first victim that stays until `end`, none
stays for longer than DEMOTION_S; while the store is left alone, none stays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

import numpy as np

from ...shm.ring.layout import NAMESPACE_TAG_BYTES
from ..forms.effects import RemoveRemote, SaveRemote
from ..forms.events import RemoteSaved
from ..store.entries import Entries, OverEntries
from ..store.table import EDGE
from .link import Agreement, RemoteLink

QUEUED_MAX: Final = 1024
"""Entries that wait. They lie in the ring, and go as any other."""
REMOVED_MAX: Final = 1 << 18
"""Keys whose removal waits, some 40 MB. Beyond it the oldest is forgotten, and counted: its object stays in the store,
and is found again."""
REMOVED_AT_ONCE: Final = 1024
DEMOTION_S: Final = 1.0
"""How long giving memory back may wait for the remote store, each time that memory is to be given back."""

OFFERED: Final = 1
"""The row's entry waits, is written, or was; or it came from the store."""
NOT_WORTH: Final = 2
"""The row's entry is quicker to compute than to read back, which was counted."""


class Writes(OverEntries):
    def __init__(self, entries: Entries, link: RemoteLink, agreement: Agreement) -> None:
        super().__init__(entries)
        self._link = link
        self._agreement = agreement
        self._outbox = link.outbox
        self._counts = link.counts
        self._marks = np.zeros(entries.table.row_mask + 1, np.uint8)
        self.queue: OrderedDict[bytes, None] = OrderedDict()
        """The keys that wait; `removed_keys`: those whose removal waits."""
        self.removed_keys: dict[bytes, None] = {}
        self.under_way: SaveRemote | RemoveRemote | None = None
        self.reading: frozenset[int] = frozenset()
        """The span id that a thread reads now, if it reads one."""
        self._leaving: set[bytes] = set()
        """Keys that are about to be evicted, and wait or are written; `_tried`: those that were, since the first victim
        that stays."""
        self._tried: set[bytes] = set()
        self._ends_at: float | None = None
        """When victims stay no longer."""

    def published(self, rows: Sequence[int], now: float) -> None:
        if not self._link.limits.remote_s or not rows:
            return
        self._marks[rows] = 0
        may_offer = self._may_write(now)
        for row in rows:
            # A host that only reads waits for what computing takes, too.
            cost_s, key = self._table.costs[row] / 1e3, self._key(row)
            self._link.cost_reported(key, cost_s)
            if cost_s > 0 and may_offer:
                self._offer(row, key, now)
            elif cost_s > 0 and self._link.limits.remote_writes:
                self._counts["dropped"] += 1
            if not self.has(key):
                self._link.end_claim(key)

    def fetched(self, row: int) -> None:
        self._marks[row] = OFFERED

    def used(self, rows: Sequence[int], now: float) -> None:
        """Published entries were used. Those that were dropped earlier are offered again."""
        if len(rows) and self._may_write(now):
            at = np.asarray(rows, np.int64)
            for row in at[(self._marks[at] & OFFERED) == 0].tolist():
                self._offer(row, self._key(row), now)

    def has(self, key: bytes) -> bool:
        """Whether the key's entry waits or is being written."""
        write = self.under_way
        return key in self.queue or (isinstance(write, SaveRemote) and write.key == key)

    def evicted(self, keys: Iterable[bytes], now: float) -> None:
        """A client has evicted keys by name: their objects are removed too."""
        if self._link.limits.remote_writes:
            self._keep(keys)
            self.start(now)

    def removes(self, key: bytes) -> bool:
        write = self.under_way
        return key in self.removed_keys or (isinstance(write, RemoveRemote) and key in write.keys)

    def saved(self, save: SaveRemote, saved: RemoteSaved | None, now: float) -> None:
        """Processes the outcome of a write; None: it has failed."""
        self.under_way, self.reading = None, frozenset()
        key, link = save.key, self._link
        if saved is None:
            self._lose(key, "write_failed")
        else:
            if saved.written:
                link.changed()
                self._outbox.counters.remote_written_bytes += save.payload_bytes
            self._agreement.told(key[:NAMESPACE_TAG_BYTES], saved.generation)
            if key in self._leaving and self._agreement.shares(key):
                self._counts["demoted"] += 1
            self._counts["written" if saved.written else "there"] += 1
            link.end_claim(key, written=True)
            self._leaving.discard(key)
        self.start(now)

    def removed(self, remove: RemoveRemote, done: bool, now: float) -> None:
        self.under_way = None
        if not done:
            self._counts["write_failed"] += 1
            self._keep(remove.keys)
        elif not self._link.full:
            self._link.changed()
        self.start(now)

    def start(self, now: float) -> None:
        """Begins the next write or removal, if none is under way."""
        if self.under_way is not None:
            return
        link, table = self._link, self._table
        # A full store may be rid of objects.
        if self.removed_keys and link.serves and (link.full or link.taking.may_try(now)):
            keys = tuple(islice(self.removed_keys, REMOVED_AT_ONCE))
            for key in keys:
                del self.removed_keys[key]
            self.under_way = RemoveRemote(keys)
            self._outbox.add(self.under_way)
            return
        while self.queue:
            key = next(iter(self.queue))
            row = table.by_key.get(key, EDGE)
            if row and self._may_write(now) and self._agreement.shares(key):
                del self.queue[key]
                self.reading = frozenset((table.span_ids[row],))
                self.under_way = SaveRemote(key, table.offsets[row], table.payloads[row], key in self._leaving)
                self._outbox.add(self.under_way)
                return
            self._drop(key)

    @property
    def waits(self) -> bool:
        """Whether victims stay until a write ends or `tick` ends the wait."""
        return bool(self._leaving) and self._link.takes_writes

    def next_timer(self) -> float | None:
        """When `tick` is due."""
        return self._ends_at if self._leaving else None

    def tick(self, now: float) -> None:
        if self._ends_at is not None and now >= self._ends_at:
            self._leaving.clear()

    def staying(self, victims: Iterable[int], now: float) -> set[int]:
        """The rows of the victims that must stay for now, since they are being written. The coldest victim comes
        first."""
        table = self._table
        if not self._link.takes_writes:
            return set()
        stay: dict[int, bytes] = {}
        late = self._ends_at is not None and now >= self._ends_at
        for row in victims:
            key = self._key(row)
            goes_at_once = bool(table.records[row] or table.parents[row])
            if self.has(key):
                if not late and not goes_at_once:
                    stay[row] = key
                elif key in self.queue:
                    self._drop(key)
            elif key not in self._tried and not goes_at_once and self._takes(row, key, now):
                if late:
                    self._counts["dropped"] += 1
                else:
                    stay[row] = key
        if stay:
            if self._ends_at is None:
                self._ends_at = now + DEMOTION_S
            self._tried.update(stay.values())
            self._hurry(stay, now)
        return set(stay) if self._leaving else set()

    def end(self) -> None:
        """No memory is to be given back any more, or none can be. The next time has a deadline of its own."""
        if self._ends_at is not None:
            self._leaving.clear()
            self._ends_at = None
            self._tried.clear()

    def check_invariants(self) -> None:
        assert all(map(self.has, self._leaving))
        assert not self._leaving or self._ends_at is not None
        assert self._ends_at is not None or not self._tried
        assert bool(self.reading) == isinstance(self.under_way, SaveRemote)

    def _may_write(self, now: float) -> bool:
        """Whether entries are written, be it to see if the store takes them again."""
        return self._link.serves and self._link.limits.remote_writes and self._link.taking.may_try(now)

    def _key(self, row: int) -> bytes:
        return self._slots.key(self._table.slots[row])

    def _takes(self, row: int, key: bytes, now: float) -> bool:
        """Whether the entry is to be written, and neither waits nor was written. If it is not worth it, that is
        counted once. Its next use decides anew, since the store may be quicker by then."""
        if self._marks[row] & OFFERED or not self._agreement.shares(key):
            return False
        cost_s = self._table.costs[row] / 1e3
        if cost_s and cost_s < self._link.read_s(self._table.payloads[row], now):
            self._counts["not_worth"] += not self._marks[row] & NOT_WORTH
            self._marks[row] |= NOT_WORTH
            return False
        return True

    def _offer(self, row: int, key: bytes, now: float) -> None:
        if not self._takes(row, key, now):
            return
        if len(self.queue) >= QUEUED_MAX and key not in self.queue:
            self._counts["dropped"] += 1
            return
        self._append(row, key)
        self.start(now)

    def _hurry(self, rows: dict[int, bytes], now: float) -> None:
        """Writes entries that are about to be evicted, in this order, before all others."""
        for row, key in reversed(rows.items()):
            if not self.has(key):
                self._append(row, key)
            if key in self.queue:
                self.queue.move_to_end(key, last=False)
            self._leaving.add(key)
        self.start(now)

    def _drop(self, key: bytes) -> None:
        del self.queue[key]
        self._lose(key, "dropped")

    def _append(self, row: int, key: bytes) -> None:
        self._marks[row] |= OFFERED
        # It may wait since an entry of the same key, which has ended.
        self.queue.setdefault(key)

    def _keep(self, keys: Iterable[bytes]) -> None:
        """Remembers keys whose objects are to be removed."""
        self.removed_keys.update(dict.fromkeys(keys))
        while len(self.removed_keys) > REMOVED_MAX:
            del self.removed_keys[next(iter(self.removed_keys))]
            self._counts["removals_dropped"] += 1

    def _lose(self, key: bytes, outcome: str) -> None:
        """A key's entry does not come to the store. It is offered again when it is used or put again."""
        self._marks[self._table.by_key.get(key, EDGE)] &= ~np.uint8(OFFERED)
        self._link.end_claim(key)
        self._leaving.discard(key)
        self._counts[outcome] += 1
