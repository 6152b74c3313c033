"""The store's core: entries, puts in flight, claims. Events in, effects out; time is an argument.

    handle(event, now) ─┬─ dispatch  chooses the part that carries out the event
                        ├─ intake    puts: Commit, parts, room, copies
                        │     ├─ publication  turns a completely copied put into an entry
                        │     └─ put_answers  what follows from the end of a put
                        ├─ requests  every other message of a client
                        ├─ claims    which client computes a missing key
                        ├─ expiry    time to live, pins by message, ends of entries
                        ├─ sweeps    Clear, Invalidate and EvictPrefixes, in slices
                        ├─ matching  the longest cached prefix, and the uses that follow from it
                        ├─ idle_sweep  evicts idle entries under pressure, in slices
                        ├─ residency pages of the ring: punched out, taken back
                        ├─ remote    fetches from the remote store, and writes to it; what is written before it goes
                        └─ reclaim   room: Drain, victims by policy, then Scan, Scanned, free
                                      └─ span_table  the state of every span
                                           ├─ allocated_spans  bytes, slots and ids of spans
                                           └─ sequences  parents and children, and the prefix index

Owns the order of the steps of an event. Does not own shared memory, sockets or threads.

Invariants: `handle` and `recover` are the only mutators of entries. Queries (`status`, `entries`, `entry`, `why`,
`gone`, `next_timer`) change nothing. No event takes long, whatever is stored: each does a bounded amount of work (a
slice of 256 entries, a scan's 96 spans, 256 examined entries a walk) and leaves the rest to the next Tick. `next_timer`
then asks for a Tick at once, and the caller may handle other events before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from ...shm.allocator import SpanAllocator
from ...shm.index import IndexWriter
from ..policy.replacement import Replacement
from . import report, why
from .dispatch import Dispatch
from .effects import Effect
from .events import Allocated, Event, Moved, Punched, Scanned, Tick
from .hits import REQUESTS
from .limits import StoreLimits
from .parts import Parts
from .quotas import Quotas
from .recovery import Recovered, recover
from .sequences import Read, Sequences
from .sweeps import SLICE

ROWS_MAX: Final = 256
"""Entries in one answer: 2 to 3 ms."""
MAKES_ROOM: Final[frozenset[type[Event]]] = frozenset({Moved, Scanned, Punched, Allocated})
"""The outcomes that the put at the head of the queue may wait for."""


def _no_bytes(offset: int, size_bytes: int) -> bytes:
    raise AssertionError("a store without its ring's bytes keeps no sequences")


class Store:
    """The entries of one ring.

    Args:
        unix_at_zero_s: the Unix time at time 0, for times shown to people. The caller of a query sets it anew, since
            the wall clock may have been set meanwhile.
        read: (offset, bytes) → the ring's bytes; without it no cached sequences can be stored.
        seed: of the prefix index; random and secret.
        quotas: the limits on one uid; None: no limits.
    """

    def __init__(
        self,
        index: IndexWriter,
        ring: SpanAllocator,
        policy: Replacement,
        limits: StoreLimits,
        epoch: int,
        unix_at_zero_s: float = 0.0,
        *,
        read: Read = _no_bytes,
        seed: int = 0,
        quotas: Quotas | None = None,
    ) -> None:
        parts = Parts(index, ring, policy, Sequences(read, seed), limits, quotas or Quotas({}, own_uid=0), epoch)
        self._parts = parts
        self._dispatch = Dispatch(parts)
        self.epoch = epoch
        self.unix_at_zero_s = unix_at_zero_s
        self.counters = parts.counters
        self.budget = parts.budget
        self.memory = parts.memory
        self.pins = parts.pins
        self.claims = parts.claims
        self.unstorable = parts.unstorable
        self.quotas = parts.quotas
        self.removal_history = parts.removal_history
        self.hits = parts.hits
        self.residency = parts.residency
        self.idle_sweep = parts.idle_sweep
        self.intake = parts.intake
        self.sweeps = parts.sweeps
        self.matching = parts.matching
        self.writes = parts.writes
        self.fetches = parts.fetches
        self.agreement = parts.agreement
        self.runs = parts.runs
        self.link = parts.link
        self._outbox = parts.outbox
        self._expiry = parts.expiry
        self._reclaim = parts.reclaim

    @property
    def limits(self) -> StoreLimits:
        """The limits in force."""
        return self._parts.limits

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Changes the store as `event` says, at time `now`: seconds by a clock that never goes back and that the next
        daemon of this memory uses too.

        The steps and their order are the same for every event. Step 3 is repeated after step 4; no other step is
        repeated. The next Tick continues unfinished work.

        Returns:
            The effects to carry out, in this order.
        """
        self._outbox.now = now
        # 1. The event is carried out.
        self._dispatch.carry_out(event, now)
        # 2. A slice of the descendants of ended entries ends; a sweep that has ended is answered.
        if self._expiry.ending:
            self._expiry.end_children(SLICE)
        if self.sweeps:
            self.sweeps.answer()
        # 3. Resident bytes and budgets are reconciled before any put is placed. `may_fit` is taken first: reconciling
        #    clears the state that it depends on.
        may_fit = self._may_fit(event)
        self._reconcile(now)
        # 4. Waiting puts are placed, and victims are chosen for the first one that does not fit.
        if may_fit:
            self.intake.serve(now)
            self._reconcile(now)
        # 5. One scan is requested for all spans unpublished so far.
        self._reclaim.scan_if_due()
        # 6. Clients that have left are forgotten once their puts have ended.
        if self._dispatch.leaving:
            self._dispatch.forget_left()
        # 7. The ring's resident bytes are reported to the governor.
        self._parts.residency_report.report(self.intake.ring_bytes, stuck=self._reclaim.stuck)
        # 8. Requests are announced, if a watcher records them.
        if self.hits.recording:
            for rows in self.hits.take_rows():
                self._outbox.announce(REQUESTS, rows=rows)
        return self._outbox.take()

    @property
    def postponed(self) -> bool:
        """Whether work was left to the next Tick, which is due now."""
        return bool(
            self.intake.searching
            or self._reclaim.searching
            or self._expiry.ending
            or self.sweeps
            or self.idle_sweep.due
            or self.matching.due
            or self.memory.sequences.rebuild_due
        )

    def next_timer(self) -> float | None:
        """When the next Tick is due. Not after the time of the last event if work was postponed."""
        if self.postponed:
            return self._outbox.now
        timers = (
            self.claims.next_timer(),
            self.pins.next_timer(),
            self._expiry.next_timer(),
            self.intake.puts.next_timer(),
            self.intake.taken.next_timer(),
            self._reclaim.next_timer(),
            self.residency.next_timer(),
            self.matching.next_timer(),
            self._parts.agreement.next_timer(),
            self.fetches.next_timer(),
            self._parts.demotion.next_timer(),
        )
        return min((timer for timer in timers if timer is not None), default=None)

    def recover(self, records: Iterable[Recovered], now: float, missing: Iterable[tuple[int, int]] = ()) -> None:
        """Takes over the memory of an earlier daemon: once, before the first event.

        `missing`: the stretches (offset, bytes) of the ring, whole pages in ascending order, that are not in memory.
        They are withdrawn, and taken back as far as the limits allow.

        `records` has every allocated slot. A published slot becomes an entry; any other waits for a scan. A published
        slot whose span header disagrees is unpublished and waits for a scan too. The policy learns of the entries in
        the order of their last use, except that parents come before their children.
        """
        for offset, size_bytes in missing:
            withdrawn = self.memory.ring.withdraw(offset, size_bytes)
            assert withdrawn, f"{offset} is not a place for {size_bytes} bytes of whole pages"
        recover(records, now, self.memory, self._expiry, self.counters)
        self._outbox.now = now
        self._reclaim.scan_soon(now)

    def evict_only_for_puts(self) -> None:
        """The daemon is about to end: from now on entries are evicted for puts only. The next daemon enforces the
        budgets."""
        self._reclaim.evict_only_for_puts()

    def status(self, now: float | None = None) -> dict[str, Any]:
        """Sizes and counters, without a walk over entries. `now`: by the store's clock; None: the last event's time."""
        return report.status(self, self._outbox.now if now is None else now)

    def entries(
        self, after: bytes | None, count: int, namespace: bytes | None = None
    ) -> tuple[list[dict[str, Any]], bytes | None]:
        """Entries after the key `after`, in a fixed order: up to `count`, or ROWS_MAX.

        Returns:
            The entries, and the key from which to continue; None at the end.
        """
        found, behind = self.memory.entries.page(after, min(count, ROWS_MAX), namespace)
        return [report.entry(self, entry) for entry in found], behind

    def entry(self, key: bytes) -> dict[str, Any] | None:
        """The description of one entry."""
        found = self.memory.entries.find(key)
        return None if found is None else report.entry(self, found)

    def why(self, key: bytes, now: float, *, leased: bool | None = None) -> dict[str, Any]:
        """Why a key's entry stays in the ring, or left it (`why`). `leased`: whether a lane pins the entry now; None:
        unknown, so the last scan decides."""
        return why.why(self, key, now, leased)

    def gone(self, key: bytes, digits: int, most: int) -> list[bytes]:
        """Up to `most` keys of removed entries with the same first hexadecimal digits as the key, the latest removal
        first."""
        return self.removal_history.beginning(key, digits, most)

    def hit_curve(self) -> dict[str, Any]:
        """Estimated hit ratios of rings of other sizes (`Hits.curve`), and the name of the policy."""
        return {"policy": self.memory.policy.name, **self.hits.curve(self.memory.budget.put_bytes_max)}

    def by_uid(self, besides: Iterable[int] = ()) -> dict[int, dict[str, int]]:
        """The amounts that each uid has of shared resources: for every uid that has any, and for those of `besides`."""
        return report.by_uid(self, besides)

    def check_invariants(self) -> None:
        """Asserts what every module's docstring promises."""
        self.memory.check_invariants()
        self.claims.check_invariants()
        self.unstorable.check_invariants()
        self._expiry.check_invariants()
        self._reclaim.check_invariants(idle_first=self.idle_sweep.walking)
        self.residency.check_invariants()
        puts = self.intake.puts
        puts.check_invariants(self._dispatch.commits_most)
        self.intake.taken.check_invariants()
        self.intake.parents.check_invariants()
        self._parts.agreement.check_invariants()
        self.fetches.check_invariants()
        self.runs.check_invariants()
        self.writes.check_invariants()
        self._parts.demotion.check_invariants()
        spans = {entry.span_id for entry in self.intake.taken}
        spans |= {each.span_id for put in puts for each in (put.entry, put.span) if each is not None}
        assert spans == {entry.span_id for entry in self.memory.filling}
        generations = self.memory.index.generations
        for entry in self.memory.entries:
            assert self.sweeps or not generations.is_past(entry.key), "an entry of a past generation"
            live = entry is self.memory.entries.find(entry.key)
            assert not (live and self.claims.claimed(entry.key)), "a claim on a stored key"

    def _may_fit(self, event: Event) -> bool:
        """Whether a waiting put may fit after this event, or a search for its room is to be continued."""
        goes_on = self.intake.searching and isinstance(event, Tick)
        # A move makes room once the last one of its round is over.
        makes_room = type(event) in MAKES_ROOM and not (isinstance(event, Moved) and self.memory.moving)
        return makes_room or goes_on or self._reclaim.searching or self.intake.changed

    def _reconcile(self, now: float) -> None:
        """Requests or returns pages, then chooses victims for pages and budgets. Idle entries are evicted first if a
        walk for them is in progress."""
        self.residency.step(now)
        self._reclaim.reconcile(now, idle_first=self.idle_sweep.walking)
