"""Writes: entries of the ring that are copied to the remote store in the background, for other hosts.

    published ─ worth it? → queue ─ SaveRemote → RemoteSaved
    used again ─ if its cost is unknown, or it was dropped ──↗
    about to be evicted (`demotion`) ─ before all that wait ─↗

Owns: which entries are written, the queue, and the spans that a write reads. Does not own the fetches, nor the threads
that write.

An entry is worth its write if computing it takes longer than reading it back. If nobody knows how long computing takes,
its second use decides. A full queue drops what is new, and counts it: the store is a cache, and the next put or use of
the entry tries again. What waits is named by its key: a key has one payload, whichever row it is in by then.

Invariants: a span in `reading` counts as pinned at every scan, so its bytes do not change under a write, whatever
becomes of the entry. At most WRITES_MAX writes are under way, and at most `remote_queue_bytes` of entries wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np

from ...shm.ring.layout import NAMESPACE_TAG_BYTES
from ..core.effects import RemoveRemote, SaveRemote
from ..core.events import RemoteSaved
from ..core.outbox import StoreOutbox
from ..store.slots import Slots
from ..store.table import EDGE, RowTable
from .agreement import Agreement
from .host_claims import HostClaims
from .link import RemoteLink

WRITES_MAX: Final = 2
"""Writes under way at once. Each takes a thread, and a share of the host's memory bandwidth."""
REMOVED_MAX: Final = 1 << 18
"""Keys whose removal waits, some 40 MB. Beyond it the oldest is forgotten, and counted: its object stays in the store,
and is found again."""
REMOVED_AT_ONCE: Final = 1024
"""Keys that one request removes."""

OFFERED: Final = 1
"""The row's entry waits, is written, or was; or it came from the store."""
NOT_WORTH: Final = 2
"""The row's entry is quicker to compute than to read back, which was counted."""


@dataclass(slots=True)
class _RemoteWrite:
    tries: bool
    key: bytes = b""
    row: int = EDGE
    span_id: int = 0
    payload_bytes: int = 0
    removed: tuple[bytes, ...] = ()


class Writes:
    """The writes of one store."""

    def __init__(
        self,
        table: RowTable,
        slots: Slots,
        link: RemoteLink,
        agreement: Agreement,
        host_claims: HostClaims,
        outbox: StoreOutbox,
    ) -> None:
        self._table = table
        self._slots = slots
        self._link = link
        self._agreement = agreement
        self._host_claims = host_claims
        self._outbox = outbox
        self._marks = np.zeros(table.row_mask + 1, np.uint8)
        self._queue: OrderedDict[bytes, int] = OrderedDict()
        """The payload bytes of the entries that wait, by key."""
        self._leaving: set[bytes] = set()
        self._removed: dict[bytes, None] = {}
        self._made = 0
        self._under_way: dict[int, _RemoteWrite] = {}
        self.queued_bytes = 0
        self.ended = 0
        """How many writes and removals have ended."""
        self.reading: frozenset[int] = frozenset()
        """The span ids that a thread reads now."""

    @property
    def queued(self) -> int:
        """The number of entries that wait."""
        return len(self._queue)

    @property
    def under_way(self) -> int:
        """The number of writes under way."""
        return len(self._under_way)

    def limits_changed(self) -> None:
        """What no longer fits the queue is dropped, the newest first."""
        while self._queue and self.queued_bytes > self._link.limits.remote_queue_bytes:
            self._drop(next(reversed(self._queue)))

    def published(self, rows: Sequence[int], now: float) -> None:
        """Clients' puts were published."""
        if not self._link.limits.remote_s or not rows:
            return
        self._marks[rows] = 0
        costs, counters = self._table.costs, self._outbox.counters.remote
        may_offer = self._link.limits.remote_writes and self._link.breaker.closed and self._takes(now)
        for row in rows:
            # A host that only reads waits for what computing takes, too.
            cost_s, key = costs[row] / 1e3, self._key(row)
            self._link.costs.reported(key[:NAMESPACE_TAG_BYTES], cost_s)
            if cost_s > 0 and may_offer:
                self._offer(row, key, now)
            elif cost_s > 0 and self._link.limits.remote_writes:
                counters["dropped"] += 1
            if not self.has(key):
                self._host_claims.given_up(key)

    def fetched(self, row: int) -> None:
        """An entry came from the store."""
        self._marks[row] = OFFERED

    def used(self, rows: Sequence[int], now: float) -> None:
        """Published entries were used. Those that were dropped earlier are offered again."""
        if not self._link.limits.remote_writes or not self._link.limits.remote_s or not len(rows):
            return
        if self._link.breaker.closed and self._takes(now):
            at = np.asarray(rows, np.int64)
            for row in at[(self._marks[at] & OFFERED) == 0].tolist():
                if not self._marks[row] & OFFERED:
                    self._offer(row, self._key(row), now)

    @property
    def serves(self) -> bool:
        """Whether entries can be written now."""
        link, limits = self._link, self._link.limits
        return bool(limits.remote_s) and limits.remote_writes and link.breaker.closed and link.taking.closed

    @property
    def leaving(self) -> bool:
        """Whether an entry of `hurry` waits or is being written."""
        return bool(self._leaving)

    def has(self, key: bytes) -> bool:
        """Whether the key's entry waits or is being written."""
        return key in self._queue or any(write.key == key for write in self._under_way.values())

    def takes(self, row: int, key: bytes, now: float) -> bool:
        """Whether the entry is to be written, and neither waits nor was written. If it is not worth it, that is
        counted once. Its next use decides anew, since the store may be quicker by then."""
        if self._marks[row] & OFFERED or self._agreement.shares(key) is False:
            return False
        cost_s = self._table.costs[row] / 1e3
        if cost_s and cost_s < self._link.speed.read_s(self._table.payloads[row], now):
            self._outbox.counters.remote["not_worth"] += not self._marks[row] & NOT_WORTH
            self._marks[row] |= NOT_WORTH
            return False
        return True

    def fits(self, payload_bytes: int, *, empty: bool = False) -> bool:
        """Whether the queue has room for an entry. `empty`: if nothing else waits."""
        return (0 if empty else self.queued_bytes) + payload_bytes <= self._link.limits.remote_queue_bytes

    def hurry(self, rows: Sequence[int], now: float) -> None:
        """Writes entries that are about to be evicted, in this order, before all others: these make room in the queue,
        the newest first. An entry that does not fit then is left out."""
        keys = [self._key(row) for row in rows]
        for row, key in zip(rows, keys, strict=True):
            if not self.has(key):
                size = self._table.payloads[row]
                while not self.fits(size) and self._queue:
                    newest = next(reversed(self._queue))
                    if newest in self._leaving:
                        break
                    self._drop(newest)
                if not self.fits(size):
                    continue
                self._append(row, key)
                self._queue.move_to_end(key, last=False)
            self._leaving.add(key)
        for key in reversed(keys):
            if key in self._queue:
                self._queue.move_to_end(key, last=False)
        self.start(now)

    def give_up(self, key: bytes) -> None:
        """An entry is evicted: it is dropped if it still waits."""
        if key in self._queue:
            self._drop(key)

    def calm(self) -> None:
        """Nobody waits for the entries of `hurry` any more. They are written as any other."""
        self._leaving.clear()

    def evicted(self, keys: Iterable[bytes], now: float) -> None:
        """A client has evicted keys by name: their objects are removed too."""
        if not self._link.limits.remote_writes:
            return
        self._keep(keys)
        self.start(now)

    def removes(self, key: bytes) -> bool:
        """Whether the key's object is about to be removed."""
        return key in self._removed or any(key in write.removed for write in self._under_way.values())

    @property
    def removals(self) -> int:
        """The number of keys whose removal waits."""
        return len(self._removed)

    def saved(self, event: RemoteSaved, now: float) -> None:
        """Processes the outcome of a write, or of a removal."""
        write = self._under_way.pop(event.number)
        self.ended += 1
        self.reading = frozenset(each.span_id for each in self._under_way.values() if each.span_id)
        if event.error is not None:
            self._failed(write, event, now)
        else:
            self._succeeded(write, event, now)
        self._leaving.discard(write.key)
        self.start(now)

    def start(self, now: float) -> None:
        """Begins as many writes as may be under way."""
        while len(self._under_way) < WRITES_MAX:
            if not self._link.breaker.closed:
                self._drop_all()
                return
            takes = self._takes(now)
            # An object that is being written is removed after its write.
            written = {write.key for write in self._under_way.values()}
            removed = tuple(key for key in islice(self._removed, REMOVED_AT_ONCE) if key not in written)
            # A full store may be rid of objects. That it is says nothing of writes.
            full = self._link.full and not self._link.taking.closed
            if removed and (takes or full):
                for key in removed:
                    del self._removed[key]
                self._begin(_RemoteWrite(not full and self._probes(), removed=removed))
                self._outbox.add(RemoveRemote(self._made, removed))
                continue
            if not takes:
                self._drop_all()
                return
            if self._queue and any(next(iter(self._queue)) in write.removed for write in self._under_way.values()):
                # The write would find the object that is about to go, and leave it.
                return
            key, row = self._next()
            if not row:
                return
            table = self._table
            size, asks = table.payloads[row], self._agreement.shares(key) is None
            self._begin(_RemoteWrite(self._probes(), key, row, table.span_ids[row], size))
            self._outbox.add(SaveRemote(self._made, key, table.offsets[row], size, asks, key in self._leaving))

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        assert self.queued_bytes == sum(self._queue.values()) <= self._link.limits.remote_queue_bytes
        assert len(self._under_way) <= WRITES_MAX
        assert all(map(self.has, self._leaving))
        assert self.reading == {write.span_id for write in self._under_way.values()} - {0}

    def _failed(self, write: _RemoteWrite, event: RemoteSaved, now: float) -> None:
        assert event.error is not None
        self._outbox.counters.remote["write_failed"] += 1
        if write.key:
            self._unmark(write.key)
            self._host_claims.given_up(write.key)
        self._keep(write.removed)
        self._link.failed(event.error, now, tries=write.tries)

    def _succeeded(self, write: _RemoteWrite, event: RemoteSaved, now: float) -> None:
        counters = self._outbox.counters
        self._link.succeeded()
        if write.tries:
            self._link.wrote(now, shows=event.written)
        if event.generation is not None:
            self._agreement.found(write.key[:NAMESPACE_TAG_BYTES], event.generation, now)
        if write.key:
            if write.key in self._leaving and self._agreement.shares(write.key) is not False:
                counters.remote["demoted"] += 1
            counters.remote["written" if event.written else "there"] += 1
            self._host_claims.written(write.key)
            counters.remote_written_bytes += write.payload_bytes if event.written else 0

    def _key(self, row: int) -> bytes:
        return self._slots.key(self._table.slots[row])

    def _offer(self, row: int, key: bytes, now: float) -> None:
        if not self.takes(row, key, now):
            return
        if not self.fits(self._table.payloads[row]):
            self._outbox.counters.remote["dropped"] += 1
            return
        self._append(row, key)
        self.start(now)

    def _append(self, row: int, key: bytes) -> None:
        self._marks[row] |= OFFERED
        if key not in self._queue:
            # It may wait since an entry of the same key, which has ended.
            self._queue[key] = self._table.payloads[row]
            self.queued_bytes += self._table.payloads[row]

    def _unmark(self, key: bytes) -> None:
        """The key's entry is offered again when it is used or put again."""
        self._marks[self._table.by_key.get(key, EDGE)] &= ~np.uint8(OFFERED)

    def _next(self) -> tuple[bytes, int]:
        """The next entry of the queue that is still published, and its row; EDGE if there is none."""
        while self._queue:
            key, size = self._queue.popitem(last=False)
            self.queued_bytes -= size
            row = self._table.by_key.get(key, EDGE)
            if row and self._agreement.shares(key) is not False:
                return key, row
            self._host_claims.given_up(key)
            self._leaving.discard(key)
            self._outbox.counters.remote["dropped"] += 1
        return b"", EDGE

    def _takes(self, now: float) -> bool:
        """Whether the store takes writes, or is to be tried."""
        return self._link.taking.closed or self._link.taking.may_probe(now)

    def _probes(self) -> bool:
        """Whether the request that begins now tries if the store takes writes again."""
        taking = self._link.taking
        if taking.closed:
            return False
        taking.probe()
        return True

    def _begin(self, write: _RemoteWrite) -> None:
        self._made += 1
        self._under_way[self._made] = write
        if write.span_id:
            self.reading |= {write.span_id}

    def _keep(self, keys: Iterable[bytes]) -> None:
        """Remembers keys whose objects are to be removed."""
        self._removed.update(dict.fromkeys(keys))
        while len(self._removed) > REMOVED_MAX:
            del self._removed[next(iter(self._removed))]
            self._outbox.counters.remote["removals_dropped"] += 1

    def _drop(self, key: bytes) -> None:
        """Drops an entry that waits. It is offered again when it is used or put again."""
        self.queued_bytes -= self._queue.pop(key)
        self._unmark(key)
        self._host_claims.given_up(key)
        self._leaving.discard(key)
        self._outbox.counters.remote["dropped"] += 1

    def _drop_all(self) -> None:
        """The store is left alone, or takes no writes: what waits is offered again when it is used or put again."""
        for key in [*self._queue]:
            self._drop(key)
