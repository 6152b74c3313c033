"""The store's core: what is stored, what is on its way, who computes what. Events in, effects out; time is an argument.

    handle(event, now) ─┬─ intake    puts: Commit, parts, room, copies
                        ├─ requests  every other message of a client
                        ├─ claims    who computes a missing key
                        ├─ expiry    time to live, pins by message, explicit ends
                        ├─ sweeps    Clear, Invalidate and EvictPrefixes, in slices
                        ├─ matching  the longest cached prefix, and the uses that follow from it
                        ├─ idle_sweep  what is idle goes when memory is short, in slices
                        ├─ residency pages of the ring: given back, taken back
                        └─ reclaim   room: Drain, victims by policy, then Scan, Scanned, free
                                      └─ span_table  ring and index: every span's state
                                           └─ sequences  what follows what, in the prefix index

`handle` is the only mutator. Queries (`status`, `entries`, `entry`, `why`, `gone`, `next_timer`) change nothing.

No event takes long, whatever is stored: each does a bounded amount of work (a slice of 256 entries, a scan's 256
spans, 1,024 of the coldest looked at) and leaves the rest to the next Tick, which `next_timer` then asks for at once;
the caller may handle other events in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

from ...errors import TensordError
from ...ipc import messages
from ...shm.allocator import SpanAllocator
from ...shm.index import IndexWriter
from ..policy.replacement import Replacement
from . import report, why
from .claims import ClaimTable
from .counters import StoreCounters
from .departed import Departed
from .effects import Effect, Forget
from .entries import SpanEntry
from .events import (
    Accessed,
    Allocated,
    ClientJoined,
    ClientLeft,
    Copied,
    Drained,
    Event,
    FoundCorrupt,
    HoldersCounted,
    LimitsChanged,
    Moved,
    PrefixAsked,
    Punched,
    Received,
    RingGrown,
    Scanned,
    Tick,
)
from .expiry import Expiry, RemovalProgress
from .hits import Hits
from .host_memory import Pressed
from .idle_sweep import IdleSweep
from .intake import Intake
from .limits import StoreLimits
from .matching import Matching
from .outbox import StoreClient, StoreOutbox
from .pins import Pins
from .quotas import Quotas
from .reclaim import Reclaim
from .recovery import Recovered, recover
from .requests import Carry, Requests
from .residency import Residency
from .residency_report import ResidencyReport
from .room import Room
from .sequences import Read, Sequences
from .span_table import RingBudget, SpanTable
from .sweeps import SLICE, Sweeps

ROWS_MAX: Final = 256
"""Entries that one question is told: 2 to 3 ms."""
DUE_MAX: Final = 128
"""Deadlines of a kind that one Tick carries out."""
MAKES_ROOM: Final[frozenset[type[Event]]] = frozenset({Moved, Drained, Scanned, Punched, Allocated})
"""The outcomes that the put at the head of the queue may wait for."""


def _no_bytes(offset: int, size_bytes: int) -> bytes:
    raise AssertionError("a store without its ring's bytes keeps no sequences")


class Store:
    """One ring's entries.

    Args:
        unix_at_zero_s: the Unix time at time 0, for what people are shown. Whoever asks for entries sets it anew, since
            the wall clock may have been set meanwhile.
        read: (offset, bytes) → what stands there in the ring; without it no cached sequences can be stored.
        seed: of the prefix index: random, and nobody else's.
        quotas: what one uid may have; without it, all.
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
        self.limits = limits
        self.epoch = epoch
        self.unix_at_zero_s = unix_at_zero_s
        self.counters = StoreCounters()
        self.budget = RingBudget(limits.max_entries, limits.max_bytes, limits.max_tokens)
        self.memory = SpanTable(index, ring, policy, Sequences(read, seed), self.budget, epoch)
        self.pins = Pins(limits.pins_per_client_max, limits.pinned_bytes_max)
        self.claims = ClaimTable(limits.claim_s, limits.claim_s_max, limits.claims_per_client_max, epoch)
        self.quotas = quotas or Quotas({}, own_uid=0)
        self._outbox = StoreOutbox(self.counters)
        self.departed = Departed(limits.max_entries)
        self.hits = Hits(limits.ring_bytes)
        self._expiry = Expiry(self.memory, self.pins, self._outbox, self.departed, self.hits, limits.default_ttl_s)
        self._room = Room(self.memory, self.pins)
        self.residency = Residency(self.memory, self._outbox)
        self.idle_sweep = IdleSweep(self.memory, self._room)
        self._reclaim = Reclaim(
            self.memory, self._room, self.residency, self._expiry, self.claims, self._outbox, limits.rescan_s
        )
        self.intake = Intake(
            self.memory,
            self._room,
            self.residency,
            self._reclaim,
            self._expiry,
            self.claims,
            self._outbox,
            limits,
        )
        self._residency_report = ResidencyReport(self.memory, self.residency, self.idle_sweep, self._outbox)
        self.sweeps = Sweeps(self.memory, self._expiry, self._outbox, self.quotas)
        self.matching = Matching(
            self.memory, self._expiry, self._outbox, limits.prefix_tokens_max, limits.prefix_wait_s
        )
        others: dict[type[Any], Carry] = {
            messages.Commit: self.intake.commit,
            messages.Part: self.intake.part,
            messages.Limit: self._limit,
        }
        self._requests = Requests(
            self.memory,
            self._expiry,
            self.claims,
            self.pins,
            self.sweeps,
            self.quotas,
            self._outbox,
            limits,
            others,
        )
        self._commits_most = limits.commits_in_flight_max
        self._leaving: set[int] = set()
        self._handlers: dict[type[Any], Callable[[Any, float], None]] = {
            ClientJoined: self._client_joined,
            ClientLeft: self._client_left,
            Received: self._requests.received,
            Copied: self._copied,
            Moved: self._moved,
            PrefixAsked: self._prefix_asked,
            Drained: self._drained,
            Scanned: self._scanned,
            Accessed: self._accessed,
            HoldersCounted: self._holders_counted,
            RingGrown: self._ring_grown,
            Pressed: self._pressed,
            Punched: self._punched,
            Allocated: self._allocated,
            LimitsChanged: self._limits_changed,
            FoundCorrupt: self._found_corrupt,
            Tick: self._tick,
        }

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Changes the store as `event` says, at time `now` (seconds, never less than before, by a clock that the next
        daemon of this memory goes by too).

        The steps and their order are the same for every event. Step 3 comes again after step 4; no other step comes
        twice. What a step leaves over waits for the next Tick.

        Returns:
            What is to be done, in this order.
        """
        self._outbox.now = now
        # 1. The event is carried out.
        self._handlers[type(event)](event, now)
        # 2. What follows an ended entry ends too, a slice of it; a sweep that is through is answered.
        if self._expiry.ending:
            self._expiry.end_children(SLICE)
        if self.sweeps:
            self.sweeps.answer()
        # 3. Before any put, what is in memory is brought to what may be. Step 4 is decided before that: reconciling
        #    ends the search that it goes on with.
        may_fit = self._may_fit(event)
        self._reconcile(now)
        # 4. Puts that wait are placed, and victims are chosen for the first that does not fit.
        if may_fit:
            self.intake.serve(now)
            self._reconcile(now)
        # 5. What was unpublished until here is looked at by one scan.
        self._reclaim.scan_if_due()
        # 6. Clients that left are forgotten once their puts have ended.
        if self._leaving:
            self._forget_those_who_left()
        # 7. The governor is told what the ring holds.
        self._residency_report.report(self.intake.ring_bytes, stuck=self._reclaim.stuck)
        return self._outbox.take()

    def next_timer(self) -> float | None:
        """When a Tick is due; not after the last event's time where the store put work off."""
        if any(
            (
                self.sweeps,
                self.intake.looking,
                self._reclaim.looking,
                self.idle_sweep.due,
                self._expiry.ending,
                self.matching.due,
                self.memory.sequences.rebuild_due,
            )
        ):
            return self._outbox.now
        timers = (
            self.claims.next_timer(),
            self.pins.next_timer(),
            self._expiry.next_timer(),
            self.intake.puts.next_timer(),
            self._reclaim.next_timer(),
            self.residency.next_timer(),
            self.matching.next_timer(),
        )
        return min((timer for timer in timers if timer is not None), default=None)

    def recover(self, records: Iterable[Recovered], now: float, missing: Iterable[tuple[int, int]] = ()) -> None:
        """Takes over what a former daemon left: once, before the first event.

        `missing` are the stretches (offset, bytes) of the ring, whole pages in ascending order, that are not in memory:
        they are withdrawn, and taken back as far as may be.

        `records` has every allocated slot. A published one becomes an entry, any other waits for a scan; so does one
        whose header does not agree with its slot, which is unpublished. Entries become known to the policy in the
        order of their creation, but for pieces of sequences, which come after what they follow.
        """
        for offset, size_bytes in missing:
            withdrawn = self.memory.ring.withdraw(offset, size_bytes)
            assert withdrawn, f"{offset} is not a place for {size_bytes} bytes of whole pages"
        recover(records, now, self.memory, self._expiry, self.counters)
        self._outbox.now = now
        self._reclaim.look_soon(now)

    def rest(self) -> None:
        """The daemon is about to end: room is made for puts alone. Budgets are the next daemon's to meet."""
        self._reclaim.rest()

    def status(self, now: float | None = None) -> dict[str, Any]:
        """Sizes and counters, without walking entries. `now`: by the store's clock, else the last event's time."""
        return report.status(self, self._outbox.now if now is None else now)

    def entries(
        self, after: bytes | None, count: int, namespace: bytes | None = None
    ) -> tuple[list[dict[str, Any]], bytes | None]:
        """Entries behind the key `after`, in an order of their own: up to `count`, or ROWS_MAX.

        Returns:
            The entries, and the key behind which to go on; None where nothing more comes.
        """
        found, behind = self.memory.entries.page(after, min(count, ROWS_MAX), namespace)
        return [report.entry(self, entry) for entry in found], behind

    def entry(self, key: bytes) -> dict[str, Any] | None:
        """What is known of one entry."""
        found = self.memory.entries.find(key)
        return None if found is None else report.entry(self, found)

    def why(self, key: bytes, now: float) -> dict[str, Any]:
        """Why a key's entry stays, or went (`why`)."""
        return why.why(self, key, now)

    def gone(self, key: bytes, digits: int, most: int) -> list[bytes]:
        """Up to `most` keys of entries that went, the latest first, whose first hexadecimal digits are the key's."""
        return self.departed.beginning(key, digits, most)

    def by_uid(self, besides: Iterable[int] = ()) -> dict[int, dict[str, int]]:
        """What each uid has here of what all share: every uid that has anything, and those named."""
        return report.by_uid(self, besides)

    def check_invariants(self) -> None:
        """Asserts what every module's docstring promises."""
        self.memory.check_invariants()
        self.claims.check_invariants()
        self._expiry.check_invariants()
        self._reclaim.check_invariants(idle_first=self.idle_sweep.walking)
        self.residency.check_invariants()
        puts = self.intake.puts
        puts.check_invariants(self._commits_most)
        spans = {put.entry.span_id for put in puts if put.entry is not None}
        assert spans == {entry.span_id for entry in self.memory.filling}
        generations = self.memory.index.generations
        for entry in self.memory.entries:
            assert self.sweeps or not generations.is_past(entry.key), "an entry of a past generation"
            live = entry is self.memory.entries.find(entry.key)
            assert not (live and self.claims.claimed(entry.key)), "a claim on what is there"

    def _may_fit(self, event: Event) -> bool:
        """Whether a put that waits may fit since the event, or a search for its room is to go on."""
        goes_on = self.intake.looking and isinstance(event, Tick)
        return type(event) in MAKES_ROOM or goes_on or self._reclaim.looking or self.intake.changed

    def _reconcile(self, now: float) -> None:
        """Asks for pages, or gives them back; then chooses victims for pages and budgets, unless what is idle goes
        first."""
        self.residency.step(now)
        self._reclaim.reconcile(now, idle_first=self.idle_sweep.walking)

    def _client_joined(self, event: ClientJoined, now: float) -> None:
        assert event.client not in self._outbox.clients, "client numbers are not used again"
        self._outbox.clients[event.client] = StoreClient(event.uid, event.name)
        self.memory.holdings.joined(event.uid)

    def _client_left(self, event: ClientLeft, now: float) -> None:
        self.memory.holdings.left(self._outbox.clients.pop(event.client).uid)
        self._leaving.add(event.client)
        self.pins.client_left(event.client)
        self._outbox.tell(self.claims.client_left(event.client, now))
        self.intake.client_left(event.client)

    def _forget_those_who_left(self) -> None:
        for client in sorted(self._leaving):
            if not self.intake.puts.count_of(client):
                self._leaving.discard(client)
                self._outbox.add(Forget(client))

    def _copied(self, event: Copied, now: float) -> None:
        self.intake.copied(event, now)

    def _moved(self, event: Moved, now: float) -> None:
        self._reclaim.moved(event.number, copied=event.error is None)

    def _prefix_asked(self, event: PrefixAsked, now: float) -> None:
        try:
            self.matching.asked(event, now)
        except TensordError as error:
            self._outbox.refuse(event.client, event.message.id, error)

    def _drained(self, event: Drained, now: float) -> None:
        self._reclaim.drained()

    def _scanned(self, event: Scanned, now: float) -> None:
        self._reclaim.scanned(event.pinned, now)

    def _pressed(self, event: Pressed, now: float) -> None:
        before = self.idle_sweep.pressed
        self.idle_sweep.press(event)
        # Answered in any case: who asks waits for it before asking for more.
        self._residency_report.ask()
        self.residency.press(event.resident_bytes_max)
        self._reclaim.look_anew()
        self.intake.press(refuse=event.refuse, reason=event.reason)
        if event != before:
            self._outbox.announce(
                "pressed",
                resident_bytes_max=event.resident_bytes_max,
                idle_s=event.idle_s,
                refuse=event.refuse,
                reason=event.reason,
            )

    def _punched(self, event: Punched, now: float) -> None:
        self.residency.punched(event.offset)

    def _allocated(self, event: Allocated, now: float) -> None:
        self.residency.allocated(event.offset, event.error, now)

    def _accessed(self, event: Accessed, now: float) -> None:
        counters = self.counters
        counters.misses += event.misses
        hits = len(event.span_ids) + event.lost
        self.hits.looked_up(hits, event.misses, now)
        counters.log_lost += event.lost
        used = [entry for entry in map(self.memory.stored, event.span_ids) if entry is not None]
        self._expiry.used(used, now)
        counters.hits += hits
        counters.hits_unknown += len(event.span_ids) - len(used)

    def _holders_counted(self, event: HoldersCounted, now: float) -> None:
        for span_id, holders in event.holders:
            entry = self.memory.span(span_id)
            if entry is not None:
                self.memory.index.show_holders(entry.slot, holders)

    def _ring_grown(self, event: RingGrown, now: float) -> None:
        self.memory.ring.grow(event.ring_bytes)
        self.intake.ring_grown(more=event.more)

    def _limits_changed(self, event: LimitsChanged, now: float) -> None:
        old, limits = self.limits, replace(event.limits, ring_bytes=self.limits.ring_bytes)
        self.limits = limits
        self._commits_most = max(self._commits_most, limits.commits_in_flight_max)
        self.budget.max_entries = limits.max_entries
        self.budget.max_tokens = limits.max_tokens
        if limits.max_bytes != old.max_bytes:
            # Otherwise a budget that was set by Limit stays.
            self.budget.max_bytes = limits.max_bytes
        self.claims.change_limits(limits.claim_s, limits.claim_s_max, limits.claims_per_client_max)
        self.pins.change_limits(limits.pins_per_client_max, limits.pinned_bytes_max)
        self._expiry.change_limits(limits.default_ttl_s)
        self.matching.change_limits(limits.prefix_tokens_max, limits.prefix_wait_s)
        self._reclaim.change_limits(limits.rescan_s)
        self.intake.change_limits(limits)
        self._requests.change_limits(limits)
        self._reclaim.look_anew()
        self._reclaim.trim()

    def _found_corrupt(self, event: FoundCorrupt, now: float) -> None:
        entry = self.memory.stored(event.span_id)
        if entry is not None:
            self._end_corrupt(entry)

    def _end_corrupt(self, entry: SpanEntry) -> None:
        self.counters.found_corrupt += 1
        self._expiry.end(entry, RemovalProgress("corrupt"))

    def _tick(self, event: Tick, now: float) -> None:
        self._outbox.tell(self.claims.expire(now, DUE_MAX))
        self.pins.expire(now, DUE_MAX)
        self._expiry.expire(now, DUE_MAX)
        self.intake.expire(now, DUE_MAX)
        self.sweeps.go_on()
        self.matching.go_on(now)
        for entry in self.memory.sequences.rebuild():
            self._end_corrupt(entry)
        self.idle_sweep.go_on(now)
        self._reclaim.tick(now)

    def _limit(self, client: int, request: messages.Limit, now: float) -> None:
        before_bytes = self.budget.max_bytes
        self.budget.max_bytes = after_bytes = min(request.limit_bytes, self.limits.ring_bytes)
        self._outbox.send(client, messages.Limited(request.id, before_bytes, after_bytes))
        self._outbox.announce("limit", client=client, before_bytes=before_bytes, after_bytes=after_bytes)
        self.intake.limit_changed()
        self._reclaim.look_anew()
        self._reclaim.trim()
