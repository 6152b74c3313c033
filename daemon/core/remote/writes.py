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
from itertools import chain, islice
from typing import Final

from ....errors import TierReadOnly
from ....shm.layout import NAMESPACE_TAG_BYTES
from ..effects import RemoveRemote, SaveRemote
from ..entries import SpanEntry
from ..events import RemoteSaved
from ..limits import StoreLimits
from ..outbox import StoreOutbox
from ..span_table import SpanTable
from .agreement import Agreement
from .breaker import Breaker
from .host_claims import HostClaims
from .link import RemoteLink

WRITES_MAX: Final = 2
"""Writes under way at once. Each takes a thread, and a share of the host's memory bandwidth."""
REMOVED_MAX: Final = 1 << 18
"""Keys whose removal waits, some 40 MB. Beyond it the oldest is forgotten, and counted: its object stays in the store,
and is found again."""
REMOVED_AT_ONCE: Final = 1024
"""Keys that one request removes."""


@dataclass(slots=True)
class _Write:
    probe: bool
    tries: bool = False
    key: bytes = b""
    entry: SpanEntry | None = None
    span_id: int = 0
    payload_bytes: int = 0
    removed: tuple[bytes, ...] = ()


class Writes:
    """The writes of one store."""

    def __init__(
        self,
        memory: SpanTable,
        link: RemoteLink,
        agreement: Agreement,
        host_claims: HostClaims,
        outbox: StoreOutbox,
        limits: StoreLimits,
    ) -> None:
        self._memory = memory
        self._link = link
        self._agreement = agreement
        self._host_claims = host_claims
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
            if self._may_ask(now) and self._takes(now):
                self._offer(entry, now)
            else:
                self._outbox.counters.remote["dropped"] += 1
        if not self.has(entry):
            self._host_claims.given_up(entry.key)

    def used(self, entries: Iterable[SpanEntry], now: float) -> None:
        """Published entries were used. Those that were dropped earlier are offered again."""
        if not self._limits.remote_writes:
            return
        if self._may_ask(now) and self._takes(now):
            for entry in entries:
                self._offer(entry, now)

    @property
    def serves(self) -> bool:
        """Whether entries can be written now."""
        limits, link = self._limits, self._link
        return bool(limits.remote_s) and limits.remote_writes and link.breaker.closed and link.taking.closed

    @property
    def leaving(self) -> bool:
        """Whether an entry of `hurry` waits or is being written."""
        return bool(self._leaving)

    def has(self, entry: SpanEntry) -> bool:
        """Whether an entry waits or is being written."""
        return entry in self._queue or any(write.entry is entry for write in self._under_way.values())

    def has_key(self, key: bytes) -> bool:
        """Whether the key's entry waits or is being written."""
        entry = self._memory.entries.find(key)
        return entry is not None and self.has(entry)

    def takes(self, entry: SpanEntry, now: float) -> bool:
        """Whether the entry is to be written, and neither waits nor was written. If it is not worth it, that is
        counted once. Its next use decides anew, since the store may be quicker by then."""
        if entry.offered or self._agreement.shares(entry.key) is False:
            return False
        cost_s = entry.cost_ms / 1e3
        if cost_s and cost_s < self._link.speed.read_s(entry.payload_bytes, now):
            self._outbox.counters.remote["not_worth"] += not entry.not_worth
            entry.not_worth = True
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

    @property
    def removals(self) -> int:
        """The number of keys whose removal waits."""
        return len(self._removed)

    def unremoved(self) -> list[bytes]:
        """The keys whose removal waits or is under way."""
        return [*chain(self._removed, *(write.removed for write in self._under_way.values()))]

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
                self._host_claims.given_up(write.key)
            self._keep(write.removed)
            if write.removed and isinstance(event.error, TierReadOnly):
                self._link.refused_removal(event.error, now, probe=write.tries)
            elif write.removed:
                self._link.failed(event.error, now, probe=write.probe)
                if write.tries:
                    self._link.removing.showed_nothing(now)
            else:
                self._link.failed(event.error, now, probe=write.probe, tries=write.tries)
        else:
            self._link.succeeded()
            if write.removed:
                self._link.removed()
            elif write.tries:
                self._link.wrote(now, shows=event.written)
            if event.generation is not None:
                self._agreement.found(write.key[:NAMESPACE_TAG_BYTES], event.generation, now)
            if write.entry is not None:
                if write.entry in self._leaving and self._agreement.shares(write.key) is not False:
                    counters.remote["demoted"] += 1
                counters.remote["written" if event.written else "there"] += 1
                self._host_claims.written(write.key)
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
            if not self._may_ask(now):
                self._drop_all()
                return
            takes = self._takes(now)
            # An object that is being written is removed after its write.
            written = {write.key for write in self._under_way.values()}
            removed = tuple(key for key in islice(self._removed, REMOVED_AT_ONCE) if key not in written)
            # A store that takes no writes may be rid of objects. That it is says nothing of writes.
            removing = self._link.removing
            if removed and (removing.closed or removing.may_probe(now)):
                for key in removed:
                    del self._removed[key]
                self._begin(_Write(self._probe(self._link.breaker), self._probe(removing), removed=removed))
                self._outbox.add(RemoveRemote(self._made, removed))
                continue
            if not takes:
                self._drop_all()
                return
            if self._queue and any(next(iter(self._queue)).key in write.removed for write in self._under_way.values()):
                # The write would find the object that is about to go, and leave it.
                return
            entry = self._next()
            if entry is None:
                return
            probe, tries = self._probe(self._link.breaker), self._probe(self._link.taking)
            self._begin(_Write(probe, tries, entry.key, entry, entry.span_id, entry.payload_bytes))
            asks = self._agreement.shares(entry.key) is None
            hurried = entry in self._leaving
            self._outbox.add(SaveRemote(self._made, entry.key, entry.offset, entry.payload_bytes, asks, hurried))

    def _next(self) -> SpanEntry | None:
        """The next entry of the queue that is still published."""
        while self._queue:
            entry, _ = self._queue.popitem(last=False)
            self.queued_bytes -= entry.payload_bytes
            if self._memory.entries.find(entry.key) is entry and self._agreement.shares(entry.key) is not False:
                return entry
            self._host_claims.given_up(entry.key)
            self._leaving.discard(entry)
            self._outbox.counters.remote["dropped"] += 1
        return None

    def _may_ask(self, now: float) -> bool:
        return self._link.breaker.closed or self._link.breaker.may_probe(now)

    def _takes(self, now: float) -> bool:
        """Whether the store takes writes, or is to be tried."""
        return self._link.taking.closed or self._link.taking.may_probe(now)

    def _probe(self, breaker: Breaker) -> bool:
        """Whether the request that begins now is a probe of the breaker."""
        if breaker.closed:
            return False
        breaker.probe()
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
            self._outbox.counters.remote["removals_dropped"] += 1

    def _drop(self, entry: SpanEntry) -> None:
        """Drops an entry that waits. It is offered again when it is used or put again."""
        del self._queue[entry]
        entry.offered = False
        self._host_claims.given_up(entry.key)
        self._leaving.discard(entry)
        self.queued_bytes -= entry.payload_bytes
        self._outbox.counters.remote["dropped"] += 1

    def _drop_all(self) -> None:
        """The store is left alone, or takes no writes: what waits is offered again when it is used or put again."""
        for entry in [*self._queue]:
            self._drop(entry)
