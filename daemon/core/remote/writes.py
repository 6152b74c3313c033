"""Writes: entries of the ring that are copied to the remote store in the background, for other hosts.

    published ─ worth it? → queue ─ SaveRemote → RemoteSaved
    used again ─ if its cost is unknown, or it was dropped ──↗
    about to be evicted (`demotion`) ─ before all that wait ─↗

Owns: which entries are written, the queue, and the spans that a write reads. Does not own the fetches, nor the threads
that write.

An entry is worth its write if computing it takes longer than reading it back. If nobody knows how long computing takes,
its second use decides. A full queue drops what is new, and counts it: the store is a cache, and the next put or use of
the entry tries again.

Invariants: a span in `reading` counts as pinned at every scan (`Dispatch`), so its bytes do not change under a write,
whatever becomes of the entry. At most WRITES_MAX writes are under way, and at most `remote_queue_bytes` of entries
wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ....shm.layout import NAMESPACE_TAG_BYTES
from ..effects import RemoveRemote, SaveRemote
from ..entries import SpanEntry
from ..events import RemoteSaved
from ..limits import StoreLimits
from ..outbox import StoreOutbox
from ..span_table import SpanTable
from .agreement import Agreement
from .link import RemoteLink

WRITES_MAX: Final = 2
"""Writes under way at once. Each takes a thread, and a share of the host's memory bandwidth."""
REMOVED_MAX: Final = 1024
"""Keys whose removal waits. The oldest is forgotten: its object stays until the store evicts it."""


@dataclass(slots=True)
class _Write:
    probe: bool
    key: bytes = b""
    entry: SpanEntry | None = None
    span_id: int = 0
    payload_bytes: int = 0
    removed: tuple[bytes, ...] = ()


class Writes:
    """The writes of one store."""

    def __init__(
        self, memory: SpanTable, link: RemoteLink, agreement: Agreement, outbox: StoreOutbox, limits: StoreLimits
    ) -> None:
        self._memory = memory
        self._link = link
        self._agreement = agreement
        self._outbox = outbox
        self._limits = limits
        self._queue: OrderedDict[SpanEntry, None] = OrderedDict()
        self._leaving: set[SpanEntry] = set()
        self._removed: dict[bytes, None] = {}
        self._made = 0
        self._under_way: dict[int, _Write] = {}
        self.queued_bytes = 0
        self.ended = 0
        """How many writes and removals have ended."""
        self.reading: frozenset[int] = frozenset()
        """The spans that a thread reads now."""

    @property
    def queued(self) -> int:
        """The number of entries that wait."""
        return len(self._queue)

    @property
    def under_way(self) -> int:
        """The number of writes under way."""
        return len(self._under_way)

    def change_limits(self, limits: StoreLimits) -> None:
        """Applies from now on: what no longer fits the queue is dropped, the newest first."""
        self._limits = limits
        while self._queue and self.queued_bytes > limits.remote_queue_bytes:
            self._drop(next(reversed(self._queue)))

    def published(self, entry: SpanEntry, now: float) -> None:
        """A client's put was published."""
        if not self._limits.remote_s:
            return
        # A host that only reads waits for what computing takes, too.
        cost_s = entry.cost_ms / 1e3
        self._link.costs.reported(entry.tag, cost_s)
        if cost_s > 0 and self._limits.remote_writes:
            self._offer(entry, now)

    def used(self, entries: Iterable[SpanEntry], now: float) -> None:
        """Published entries were used. Those that were dropped earlier are offered again."""
        if not self._limits.remote_writes:
            return
        if self._link.breaker.closed or self._link.breaker.may_probe(now):
            for entry in entries:
                self._offer(entry, now)

    @property
    def serves(self) -> bool:
        """Whether entries can be written now."""
        return bool(self._limits.remote_s) and self._limits.remote_writes and self._link.breaker.closed

    @property
    def leaving(self) -> bool:
        """Whether an entry of `hurry` waits or is being written."""
        return bool(self._leaving)

    def has(self, entry: SpanEntry) -> bool:
        """Whether an entry waits or is being written."""
        return entry in self._queue or any(write.entry is entry for write in self._under_way.values())

    def takes(self, entry: SpanEntry, now: float) -> bool:
        """Whether the entry is to be written, and neither waits nor was written. If it is not worth it, that is
        counted, and it is never offered again."""
        if entry.offered or self._agreement.shares(entry.key) is False:
            return False
        cost_s = entry.cost_ms / 1e3
        if cost_s and cost_s < self._link.speed.read_s(entry.payload_bytes, now):
            self._outbox.counters.remote["not_worth"] += 1
            entry.offered = True
            return False
        return True

    def fits(self, entry: SpanEntry, *, empty: bool = False) -> bool:
        """Whether the queue has room for an entry. `empty`: if nothing else waits."""
        return (0 if empty else self.queued_bytes) + entry.payload_bytes <= self._limits.remote_queue_bytes

    def hurry(self, entries: Sequence[SpanEntry], now: float) -> None:
        """Writes entries that are about to be evicted, in this order, before all others: these make room in the queue,
        the newest first. An entry that does not fit then is left out."""
        for entry in entries:
            if not self.has(entry):
                while not self.fits(entry) and self._queue:
                    newest = next(reversed(self._queue))
                    if newest in self._leaving:
                        break
                    self._drop(newest)
                if not self.fits(entry):
                    continue
                self._append(entry)
                self._queue.move_to_end(entry, last=False)
            self._leaving.add(entry)
        for entry in reversed(entries):
            if entry in self._queue:
                self._queue.move_to_end(entry, last=False)
        self.start(now)

    def give_up(self, entry: SpanEntry) -> None:
        """An entry is evicted: it is dropped if it still waits."""
        if entry in self._queue:
            self._drop(entry)

    def calm(self) -> None:
        """Nobody waits for the entries of `hurry` any more. They are written as any other."""
        self._leaving.clear()

    def evicted(self, keys: Iterable[bytes], now: float) -> None:
        """A client has evicted keys by name: their objects are removed too."""
        if not self._limits.remote_writes:
            return
        self._keep(keys)
        self.start(now)

    def removes(self, key: bytes) -> bool:
        """Whether the key's object is about to be removed."""
        return key in self._removed or any(key in write.removed for write in self._under_way.values())

    def saved(self, event: RemoteSaved, now: float) -> None:
        """Processes the outcome of a write, or of a removal."""
        write = self._under_way.pop(event.number)
        self.ended += 1
        self.reading = frozenset(each.span_id for each in self._under_way.values() if each.span_id)
        counters = self._outbox.counters
        if event.error is not None:
            counters.remote["write_failed"] += 1
            if write.entry is not None:
                write.entry.offered = False
            self._keep(write.removed)
            self._link.failed(event.error, now, probe=write.probe)
        else:
            self._link.succeeded()
            if event.generation is not None:
                self._agreement.found(write.key[:NAMESPACE_TAG_BYTES], event.generation, now)
            if write.entry is not None:
                if write.entry in self._leaving and self._agreement.shares(write.key) is not False:
                    counters.remote["demoted"] += 1
                counters.remote["written" if event.written else "there"] += 1
                counters.remote_written_bytes += write.payload_bytes if event.written else 0
        if write.entry is not None:
            self._leaving.discard(write.entry)
        self.start(now)

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        assert self.queued_bytes == sum(entry.payload_bytes for entry in self._queue)
        assert self.queued_bytes <= self._limits.remote_queue_bytes
        assert len(self._under_way) <= WRITES_MAX
        assert all(map(self.has, self._leaving))
        assert self.reading == {write.span_id for write in self._under_way.values()} - {0}

    def _offer(self, entry: SpanEntry, now: float) -> None:
        if not self.takes(entry, now):
            return
        if not self.fits(entry):
            self._outbox.counters.remote["dropped"] += 1
            return
        self._append(entry)
        self.start(now)

    def _append(self, entry: SpanEntry) -> None:
        entry.offered = True
        self._queue[entry] = None
        self.queued_bytes += entry.payload_bytes

    def start(self, now: float) -> None:
        """Begins as many writes as may be under way."""
        while len(self._under_way) < WRITES_MAX:
            if not (self._link.breaker.closed or self._link.breaker.may_probe(now)):
                self._drop_all()
                return
            # An object that is being written is removed after its write.
            written = {write.key for write in self._under_way.values()}
            if removed := tuple(key for key in self._removed if key not in written):
                for key in removed:
                    del self._removed[key]
                self._begin(_Write(self._probe(), removed=removed))
                self._outbox.add(RemoveRemote(self._made, removed))
                continue
            entry = self._next()
            if entry is None:
                return
            self._begin(_Write(self._probe(), entry.key, entry, entry.span_id, entry.payload_bytes))
            asks = self._agreement.shares(entry.key) is None
            self._outbox.add(SaveRemote(self._made, entry.key, entry.offset, entry.payload_bytes, asks))

    def _next(self) -> SpanEntry | None:
        """The next entry of the queue that is still published."""
        while self._queue:
            entry, _ = self._queue.popitem(last=False)
            self.queued_bytes -= entry.payload_bytes
            if self._memory.entries.find(entry.key) is entry and self._agreement.shares(entry.key) is not False:
                return entry
            self._leaving.discard(entry)
            self._outbox.counters.remote["dropped"] += 1
        return None

    def _probe(self) -> bool:
        if self._link.breaker.closed:
            return False
        self._link.breaker.probe()
        return True

    def _begin(self, write: _Write) -> None:
        self._made += 1
        self._under_way[self._made] = write
        if write.span_id:
            self.reading |= {write.span_id}

    def _keep(self, keys: Iterable[bytes]) -> None:
        """Remembers keys whose objects are to be removed."""
        self._removed.update(dict.fromkeys(keys))
        while len(self._removed) > REMOVED_MAX:
            del self._removed[next(iter(self._removed))]

    def _drop(self, entry: SpanEntry) -> None:
        """Drops an entry that waits. It is offered again when it is used or put again."""
        del self._queue[entry]
        entry.offered = False
        self._leaving.discard(entry)
        self.queued_bytes -= entry.payload_bytes
        self._outbox.counters.remote["dropped"] += 1

    def _drop_all(self) -> None:
        """The store is left alone: what waits is offered again when it is used or put again."""
        for entry in [*self._queue]:
            self._drop(entry)
