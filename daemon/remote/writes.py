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
becomes of the entry. One write or removal is under way at a time, so a removal never meets a write of its key. At most
QUEUED_MAX entries wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

import numpy as np

from ...errors import TensordError
from ...shm.ring.layout import NAMESPACE_TAG_BYTES
from ..core.effects import RemoveRemote, SaveRemote
from ..core.events import RemoteSaved
from ..core.outbox import StoreOutbox
from ..store.slots import Slots
from ..store.table import EDGE, RowTable
from .agreement import Agreement
from .host_claims import HostClaims
from .link import RemoteLink

QUEUED_MAX: Final = 1024
"""Entries that wait. They lie in the ring, and go as any other."""
REMOVED_MAX: Final = 1 << 18
"""Keys whose removal waits, some 40 MB. Beyond it the oldest is forgotten, and counted: its object stays in the store,
and is found again."""
REMOVED_AT_ONCE: Final = 1024
"""Keys that one request removes."""

OFFERED: Final = 1
"""The row's entry waits, is written, or was; or it came from the store."""
NOT_WORTH: Final = 2
"""The row's entry is quicker to compute than to read back, which was counted."""


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
        self._queue: OrderedDict[bytes, None] = OrderedDict()
        self._leaving: set[bytes] = set()
        self._removed: dict[bytes, None] = {}
        self._under_way: SaveRemote | RemoveRemote | None = None
        self.reading: frozenset[int] = frozenset()
        """The span id that a thread reads now, if it reads one."""

    @property
    def queued(self) -> int:
        """The number of entries that wait."""
        return len(self._queue)

    @property
    def under_way(self) -> int:
        """The number of writes under way."""
        return int(self._under_way is not None)

    def published(self, rows: Sequence[int], now: float) -> None:
        """Clients' puts were published."""
        if not self._link.limits.remote_s or not rows:
            return
        self._marks[rows] = 0
        costs, counters = self._table.costs, self._outbox.counters.remote
        may_offer = self._link.limits.remote_writes and self._may_write(now)
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
        if self._may_write(now):
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
        write = self._under_way
        return key in self._queue or (isinstance(write, SaveRemote) and write.key == key)

    def takes(self, row: int, key: bytes, now: float) -> bool:
        """Whether the entry is to be written, and neither waits nor was written. If it is not worth it, that is
        counted once. Its next use decides anew, since the store may be quicker by then."""
        if self._marks[row] & OFFERED or not self._agreement.shares(key):
            return False
        cost_s = self._table.costs[row] / 1e3
        if cost_s and cost_s < self._link.speed.read_s(self._table.payloads[row], now):
            self._outbox.counters.remote["not_worth"] += not self._marks[row] & NOT_WORTH
            self._marks[row] |= NOT_WORTH
            return False
        return True

    def hurry(self, rows: Sequence[int], now: float) -> None:
        """Writes entries that are about to be evicted, in this order, before all others: these make room in the queue,
        the newest first. An entry that does not fit then is left out."""
        keys = [self._key(row) for row in rows]
        for row, key in zip(rows, keys, strict=True):
            if not self.has(key):
                if len(self._queue) >= QUEUED_MAX:
                    newest = next(reversed(self._queue))
                    if newest in self._leaving:
                        continue
                    self._drop(newest)
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
        write = self._under_way
        return key in self._removed or (isinstance(write, RemoveRemote) and key in write.keys)

    @property
    def removals(self) -> int:
        """The number of keys whose removal waits."""
        return len(self._removed)

    def saved(self, save: SaveRemote, saved: RemoteSaved | None, error: TensordError | None, now: float) -> None:
        """Processes the outcome of a write."""
        self._end()
        key, counters = save.key, self._outbox.counters
        if error is not None or saved is None:
            counters.remote["write_failed"] += 1
            self._unmark(key)
            self._host_claims.given_up(key)
            if error is not None:
                self._link.failed(error, now)
        else:
            self._link.succeeded()
            if saved.written:
                self._link.changed()
                counters.remote_written_bytes += save.payload_bytes
            self._agreement.told(key[:NAMESPACE_TAG_BYTES], saved.generation)
            if key in self._leaving and self._agreement.shares(key):
                counters.remote["demoted"] += 1
            counters.remote["written" if saved.written else "there"] += 1
            self._host_claims.written(key)
        self._leaving.discard(key)
        self.start(now)

    def removed(self, remove: RemoveRemote, error: TensordError | None, now: float) -> None:
        """Processes the outcome of a removal."""
        self._end()
        if error is not None:
            self._outbox.counters.remote["write_failed"] += 1
            self._keep(remove.keys)
            self._link.failed(error, now)
        else:
            self._link.succeeded()
            if not self._link.full:
                self._link.changed()
        self.start(now)

    def start(self, now: float) -> None:
        """Begins the next write or removal, if none is under way."""
        if self._under_way is not None:
            return
        may_write = self._may_write(now)
        # A full store may be rid of objects.
        if self._removed and (may_write or (self._link.full and self._link.breaker.closed)):
            keys = tuple(islice(self._removed, REMOVED_AT_ONCE))
            for key in keys:
                del self._removed[key]
            self._under_way = RemoveRemote(keys)
        elif not may_write:
            # What waits is offered again when it is used or put again.
            for key in [*self._queue]:
                self._drop(key)
            return
        else:
            key, row = self._next()
            if not row:
                return
            table = self._table
            self.reading = frozenset((table.span_ids[row],))
            self._under_way = SaveRemote(key, table.offsets[row], table.payloads[row], key in self._leaving)
        self._outbox.add(self._under_way)

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        assert len(self._queue) <= QUEUED_MAX
        assert all(map(self.has, self._leaving))
        assert bool(self.reading) == isinstance(self._under_way, SaveRemote)

    def _end(self) -> None:
        """The write or removal under way has ended."""
        self._under_way, self.reading = None, frozenset()

    def _may_write(self, now: float) -> bool:
        return self._link.breaker.closed and self._link.taking.may_try(now)

    def _key(self, row: int) -> bytes:
        return self._slots.key(self._table.slots[row])

    def _offer(self, row: int, key: bytes, now: float) -> None:
        if not self.takes(row, key, now):
            return
        if len(self._queue) >= QUEUED_MAX and key not in self._queue:
            self._outbox.counters.remote["dropped"] += 1
            return
        self._append(row, key)
        self.start(now)

    def _append(self, row: int, key: bytes) -> None:
        self._marks[row] |= OFFERED
        # It may wait since an entry of the same key, which has ended.
        self._queue.setdefault(key)

    def _unmark(self, key: bytes) -> None:
        """The key's entry is offered again when it is used or put again."""
        self._marks[self._table.by_key.get(key, EDGE)] &= ~np.uint8(OFFERED)

    def _next(self) -> tuple[bytes, int]:
        """The next entry of the queue that is still published, and its row; EDGE if there is none."""
        while self._queue:
            key, _ = self._queue.popitem(last=False)
            row = self._table.by_key.get(key, EDGE)
            if row and self._agreement.shares(key):
                return key, row
            self._host_claims.given_up(key)
            self._leaving.discard(key)
            self._outbox.counters.remote["dropped"] += 1
        return b"", EDGE

    def _keep(self, keys: Iterable[bytes]) -> None:
        """Remembers keys whose objects are to be removed."""
        self._removed.update(dict.fromkeys(keys))
        while len(self._removed) > REMOVED_MAX:
            del self._removed[next(iter(self._removed))]
            self._outbox.counters.remote["removals_dropped"] += 1

    def _drop(self, key: bytes) -> None:
        """Drops an entry that waits. It is offered again when it is used or put again."""
        del self._queue[key]
        self._unmark(key)
        self._host_claims.given_up(key)
        self._leaving.discard(key)
        self._outbox.counters.remote["dropped"] += 1
