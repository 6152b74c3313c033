"""A store with the rooms of lifetimes and reports, clients that put and read, and a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tensord.daemon.claims.claims import ClaimTable
from tensord.daemon.claims.quotas import Quotas
from tensord.daemon.claims.unstorable import Unstorable
from tensord.daemon.core.budget import RingBudget
from tensord.daemon.core.effects import Announce, Send
from tensord.daemon.core.events import Accessed
from tensord.daemon.core.outbox import StoreClient, StoreOutbox
from tensord.daemon.lifetimes.lifetimes import Lifetimes
from tensord.daemon.prefix.blocks import SequenceBlocks
from tensord.daemon.prefix.matching import Matching
from tensord.daemon.reports.counters import StoreCounters
from tensord.daemon.reports.entries import DescribedEntries
from tensord.daemon.reports.hits import Hits
from tensord.daemon.reports.removal_history import RemovalHistory
from tensord.daemon.reports.status import StatusReport
from tensord.daemon.reports.why import Explanations
from tensord.daemon.store.details import Details
from tensord.ipc.messages import control as messages
from tensord.shm.index.generations import GenerationWriter
from tensord.shm.lanes.records import NO_KEY

from ..store.rows import RowStore, key_of

SPAN = 320  # bytes of the ring of a payload of 100
UNIX_AT_ZERO_S = 1_000_000.0


class LifetimesStand:
    """`rows` has the parts of daemon/store. Numbers name keys (`key_of`)."""

    def __init__(self, ring_bytes: int = 64 << 10, *, pinned_bytes_max: int = 1 << 20, **rows: Any) -> None:
        rows = {"buckets": 256, "row_bits": 12, **rows}
        self.rows = store = RowStore(ring_bytes, block=self._take, blocks=self, **rows)
        self.now = 1.0
        self.counters = StoreCounters()
        self.outbox = StoreOutbox(self.counters)
        self.outbox.clients.update({number: StoreClient(0, f"client {number}") for number in (1, 2, 3)})
        self.budget = RingBudget(store.max_entries, store.ring_bytes, None)
        self.details = Details(store.table, store.slots, store.ring)
        self.generations = GenerationWriter(store.index_memory, store.geometry)
        self.history = RemovalHistory(store.geometry.entries_max)
        self.hits = Hits(store.table, self.details, store.tenants, store.ring_bytes, lambda: self.budget.put_bytes_max)
        self.lifetimes = Lifetimes(
            store.table,
            self.details,
            store.tenants,
            store.families,
            store.spans,
            store.policy,
            self.generations,
            self.history,
            self.hits,
            Quotas({}, own_uid=0),
            self.outbox,
            pins_per_client_max=4,
            pinned_bytes_max=pinned_bytes_max,
        )
        self.uses, self.sweeps = self.lifetimes.uses, self.lifetimes.sweeps
        self.blocks = SequenceBlocks(store.table, store.slots, store.ring, 5, 1 << 20)
        self.entries = DescribedEntries(
            store.table, self.details, store.tenants, store.agents, self.lifetimes.pins.holds, self.blocks.record
        )
        self.entries.unix_at_zero_s = UNIX_AT_ZERO_S
        self.explanations = Explanations(
            store.table, store.spans, store.policy, self.entries, self.history, self.counters
        )
        self.claims = ClaimTable(10.0, 60.0, 10, 1)
        self.report = StatusReport(
            1,
            store.table,
            store.holes,
            store.tenants,
            store.grants,
            store.submitters,
            store.spans,
            store.policy,
            self.budget,
            self.generations,
            self.claims,
            Unstorable(self.counters.claims_unstorable),
            self.blocks,
            Matching(store.table, store.slots, store.agents, self.blocks, self.uses.used, self.outbox, 1.0),
            self.lifetimes,
            self.hits,
            self.history,
            self.counters,
            lambda now: {"besides": now},
        )
        self.told: list[dict[str, Any]] = []
        """What watchers are told."""
        self.answers: dict[int, list[messages.Answer]] = {1: [], 2: [], 3: []}

    def _take(self, *put: Any) -> bool:
        return self.blocks.take(*put)

    def remove(self, row: int) -> None:
        self.blocks.remove(row)

    # ---- what clients do

    def put(self, number: int | bytes, payload: int = 100, parent: int | None = None, **put: Any) -> int:
        """Puts an entry, for which the coldest are evicted if there is no room. Returns its row; 0 without room."""
        self.outbox.now = self.now
        key = number if isinstance(number, bytes) else key_of(number)
        above = NO_KEY if parent is None else key_of(parent)
        row = self.rows.put(key, payload, parent=above, now=self.now, **put)
        while not row and self.rows.evict(1):
            row = self.rows.put(key, payload, parent=above, now=self.now, **put)
        if row:
            self.lifetimes.stored([row], self.now, put.get("client", 1))
        self.step()
        return row

    def read(self, *numbers: int, misses: int = 0, lost: int = 0, others: Iterable[int] = ()) -> None:
        """Clients have used entries, and `others`: span ids."""
        ids = [self.rows.table.span_ids[self.row(number)] for number in numbers]
        self.outbox.now = self.now
        self.uses.accessed(Accessed([*ids, *others], misses, lost), self.now)

    def view(self, number: int) -> int:
        """A lane pins an entry from now on. Returns the span id."""
        span_id: int = self.rows.table.span_ids[self.row(number)]
        self.rows.pinned.add(span_id)
        return span_id

    def pin(self, client: int, number: int, for_s: float) -> None:
        self.lifetimes.pin(client, self.row(number), self.now + for_s)

    def end(self, *numbers: int, reason: str = "explicit") -> None:
        self.outbox.now = self.now
        self.lifetimes.end([self.row(number) for number in numbers], reason)
        self.step()

    def clear(self, request: int, tag: bytes | None = None, client: int = 1) -> None:
        self.outbox.now = self.now
        self.sweeps.clear(client, messages.Clear(request, tag))
        self.step()

    # ---- time

    def step(self) -> None:
        """What the store does at the end of each event."""
        self.lifetimes.step()
        for effect in self.outbox.take():
            if isinstance(effect, Announce):
                self.told.append(effect.body)
            elif isinstance(effect, Send):
                self.answers[effect.client].append(effect.message)

    def tick(self) -> None:
        self.outbox.now = self.now
        self.lifetimes.tick(self.now)
        self.step()

    def settle(self) -> None:
        """Ticks until nothing is postponed."""
        for _ in range(1000):
            if not self.lifetimes.postponed:
                return
            self.tick()
        raise AssertionError("work is postponed for ever")

    def pass_time(self, seconds: float) -> None:
        """Ticks whenever the store has asked for it."""
        until = self.now + seconds
        self.settle()
        for _ in range(10_000):
            timer = self.lifetimes.next_timer()
            if timer is None or timer > until:
                self.now = until
                return
            self.now = max(self.now, timer)
            self.tick()
            self.settle()
        raise AssertionError("a timer is always due")

    # ---- what there is

    def row(self, number: int | bytes) -> int:
        """The row of an entry, hidden or not; 0 if there is none."""
        key = number if isinstance(number, bytes) else key_of(number)
        return self.rows.table.by_key.get(key) or self.rows.spans.hidden.get(key, 0)

    def stored(self, numbers: Iterable[int] = range(1000)) -> set[int]:
        """Those of the numbers whose keys readers find."""
        return {number for number in numbers if self.rows.read(key_of(number)) is not None}

    def status(self) -> dict[str, Any]:
        return self.report.status(self.now)

    def entry(self, number: int) -> dict[str, Any]:
        found = self.entries.find(key_of(number), self.now)
        assert found is not None
        return found

    def check(self) -> None:
        self.rows.check_invariants()
        self.lifetimes.check_invariants()
