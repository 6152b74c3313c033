"""The store's core: what is stored, what is on its way, who computes what. Events in, effects out; time is an argument.

    handle(event, now) ─┬─ intake    puts: Commit, parts, copies, publication
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

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

from ...errors import LimitReached, TensordError
from ...ipc import messages
from ...shm.allocator import SpanAllocator
from ...shm.index import IndexWriter
from ..policy.replacement import Replacement
from . import report, why
from .claims import ClaimTable
from .counters import StoreCounters
from .departed import Departed
from .effects import Again, Effect, Forget, ReportHostHolds
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
    Pressed,
    Punched,
    Received,
    RingGrown,
    Scanned,
    Tick,
)
from .expiry import Expiry, RemovalProgress
from .hits import Hits
from .idle_sweep import IdleSweep
from .intake import Intake
from .limits import StoreLimits
from .matching import Matching
from .outbox import StoreClient, StoreOutbox
from .pins import Pins
from .quotas import Quotas
from .reclaim import Reclaim
from .recovery import Recovered, recover
from .residency import Residency
from .room import Room
from .sequences import Read, Sequences
from .span_table import RingBudget, SpanTable
from .sweeps import SLICE, Sweeps

ROWS_MAX: Final = 256
"""Entries that one question is told: 2 to 3 ms."""
DUE_MAX: Final = 128
"""Deadlines of a kind that one Tick carries out."""


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
        self._holds: ReportHostHolds | None = None
        self._holds_of: tuple[int, int, bool, bool] | None = None
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
        self.sweeps = Sweeps(self.memory, self._expiry, self._outbox, self.quotas)
        self.matching = Matching(
            self.memory, self._expiry, self._outbox, limits.prefix_tokens_max, limits.prefix_wait_s
        )
        self._commits_most = limits.commits_in_flight_max
        self._leaving: set[int] = set()
        self._handlers: dict[type[Any], Callable[[Any, float], None]] = {
            ClientJoined: self._client_joined,
            ClientLeft: self._client_left,
            Received: self._received,
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
        self._requests: dict[type[Any], Callable[[int, Any, float], None]] = {
            messages.Commit: self.intake.commit,
            messages.Part: self.intake.part,
            messages.RequestClaim: self._claim,
            messages.Renew: self._renew,
            messages.Abandon: self._abandon,
            messages.Clear: self._clear,
            messages.Invalidate: self._invalidate,
            messages.Pin: self._pin,
            messages.Unpin: self._unpin,
            messages.Limit: self._limit,
            messages.EvictPrefixes: self._evict_prefixes,
            messages.AgentTurn: self._agent_turn,
        }

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Changes the store as `event` says, at time `now` (seconds, never less than before, by a clock that the next
        daemon of this memory goes by too).

        Returns:
            What is to be done, in this order.
        """
        self._outbox.now = now
        self._handlers[type(event)](event, now)
        if self._expiry.ending:
            self._expiry.end_children(SLICE)
        if self.sweeps:
            self.sweeps.answer()
        self.intake.dirty |= self._reclaim.looking
        # Before any put: what is in memory is brought to what may be.
        self._settle(now)
        if self.intake.dirty:
            self.intake.serve(now)
            self._settle(now)
        self._reclaim.scan_if_due()
        if self._leaving:
            self._forget_those_who_left()
        self._tell_holds()
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
        self._reclaim.rests = True

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
        puts = Counter(put.uid for put in self.intake.puts)
        announced = self.intake.puts.arrivals.by_uid()
        holdings, claims, namespaces = self.memory.holdings, self.claims.of_uid, self.memory.index.generations.of_uid
        rows: dict[int, dict[str, int]] = {}
        for uid in {*besides, *puts, *claims, *namespaces, *holdings.uids()}:
            holding = holdings.of(uid)
            rows[uid] = {
                "span_bytes": holding.size_bytes,
                "entries": holding.entries,
                "tokens": holding.tokens,
                "claims": claims[uid],
                "namespaces": namespaces[uid],
                "puts_in_flight": puts[uid],
                "announced_bytes": announced.get(uid, 0),
            }
        return rows

    def check_invariants(self) -> None:
        """Asserts what every module's docstring promises."""
        self.memory.check_invariants()
        self.claims.check_invariants()
        self._expiry.check_invariants()
        self._reclaim.check_invariants()
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

    def _received(self, event: Received, now: float) -> None:
        message = event.message
        try:
            if isinstance(message, messages.Evict | messages.Touch):
                self._of_keys(event.client, message, event.counted, now)
            else:
                self._requests[type(message)](event.client, message, now)
        except TensordError as error:
            # Handlers raise before they change anything. Renew and Abandon, which have no id, raise nothing.
            assert not isinstance(message, messages.Renew | messages.Abandon)
            self._outbox.refuse(event.client, message.id, error)

    def _copied(self, event: Copied, now: float) -> None:
        self.intake.copied(event, now)

    def _moved(self, event: Moved, now: float) -> None:
        self._reclaim.moved(event.number, copied=event.error is None)
        self.intake.dirty = True

    def _prefix_asked(self, event: PrefixAsked, now: float) -> None:
        try:
            self.matching.asked(event, now)
        except TensordError as error:
            self._outbox.refuse(event.client, event.message.id, error)

    def _drained(self, event: Drained, now: float) -> None:
        self._reclaim.drained()
        self.intake.dirty = True

    def _scanned(self, event: Scanned, now: float) -> None:
        self._reclaim.scanned(event.pinned, now)
        self.intake.dirty = True

    def _pressed(self, event: Pressed, now: float) -> None:
        before = self.idle_sweep.pressed
        self.idle_sweep.press(event)
        # Answered in any case: who asks waits for it before asking for more.
        self._holds = self._holds_of = None
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
        self.intake.dirty = True

    def _allocated(self, event: Allocated, now: float) -> None:
        self.residency.allocated(event.offset, event.error, now)
        self.intake.dirty = True

    def _settle(self, now: float) -> None:
        self.residency.step(now)
        self._reclaim.waits = self.idle_sweep.walking
        self._reclaim.reconcile(now)

    def _tell_holds(self) -> None:
        """Nothing of an exchange: when it ends, all is as it was."""
        residency = self.residency
        if residency.exchanging:
            return
        if residency.rests:
            # The way of nearly every event: all of the ring is in memory, as it was after the last one.
            ring = self.memory.ring
            of = (ring.capacity_bytes, self.budget.max_bytes, self.intake.ring_is_growing, self.idle_sweep.walking)
            if of == self._holds_of:
                return
            self._holds_of = of
        else:
            self._holds_of = None
        settled = not (self.idle_sweep.walking or residency.regrowing) and (
            not residency.over_target or self._reclaim.stuck
        )
        wanted_bytes = residency.wanted_bytes(
            self.limits.ring_bytes if self.intake.ring_is_growing else self.memory.ring.capacity_bytes
        )
        holds = ReportHostHolds(residency.resident_bytes, wanted_bytes, settled)
        if holds != self._holds:
            self._holds = holds
            self._outbox.add(holds)

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
        self.intake.dirty |= self.intake.looking

    def _claim(self, client: int, request: messages.RequestClaim, now: float) -> None:
        past = self.memory.index.generations.refusal(request.key)
        if past is not None:
            raise past
        if self.memory.entries.find(request.key) is not None:
            self.counters.claims["hit"] += 1
            self._outbox.send(client, messages.Claimed(request.id, "hit"))
            return
        uid = self._outbox.clients[client].uid
        self.quotas.admit("claims", uid, self.claims.of_uid[uid])
        self._outbox.tell([self.claims.claim(request.key, client, request.id, now, uid, request.within_s)])

    def _renew(self, client: int, request: messages.Renew, now: float) -> None:
        for token in request.tokens:
            self.claims.renew(token, client, now)

    def _abandon(self, client: int, request: messages.Abandon, now: float) -> None:
        self._outbox.tell(self.claims.abandon(request.token, self._outbox.clients[client].uid, now))

    def _of_keys(self, client: int, request: messages.Evict | messages.Touch, counted: int, now: float) -> None:
        """Carries the request out for a slice of its keys; the rest comes again."""
        self._check_keys(request.keys)
        keys = list(dict.fromkeys(request.keys))
        entries = self._stored(keys[:SLICE])
        if isinstance(request, messages.Touch):
            self._expiry.touch(entries, now)
        else:
            for entry in entries:
                self._expiry.end(entry, RemovalProgress("explicit"))
        counted += len(entries)
        if len(keys) > SLICE:
            self._outbox.add(Again(client, type(request)(request.id, keys[SLICE:]), counted))
        else:
            self._outbox.send(client, messages.Counted(request.id, counted))

    def _stored(self, keys: list[bytes]) -> list[SpanEntry]:
        """The keys' entries, victims included: one that comes back must not have missed it."""
        entries = self.memory.entries
        found = [entries.find(key) or entries.hidden(key) for key in keys]
        return [entry for entry in found if entry is not None]

    def _check_keys(self, keys: list[bytes]) -> None:
        if len(keys) > self.limits.keys_per_request_max:
            raise LimitReached(
                f"{len(keys)} keys in one request, and keys_per_request_max is "
                f"{self.limits.keys_per_request_max}: send fewer at a time"
            )

    def _clear(self, client: int, request: messages.Clear, now: float) -> None:
        self.sweeps.clear(client, request)

    def _invalidate(self, client: int, request: messages.Invalidate, now: float) -> None:
        if self.sweeps.invalidate(client, request):
            # Puts of it that are on their way are refused before they are published.
            self._outbox.tell(self.claims.void(request.namespace))

    def _evict_prefixes(self, client: int, request: messages.EvictPrefixes, now: float) -> None:
        self.sweeps.evict_prefixes(client, request)

    def _agent_turn(self, client: int, request: messages.AgentTurn, now: float) -> None:
        self.memory.policy.turn(request.agent, request.state, now)
        self._outbox.send(client, messages.Done(request.id))

    def _pin(self, client: int, request: messages.Pin, now: float) -> None:
        entry = self.memory.entries.find(request.key)
        lasts_s = 0.0
        if entry is not None:
            lasts_s = min(request.for_s, self.limits.pin_s_max)
            self.pins.pin(client, entry.span_id, entry.span_bytes, now + lasts_s)
        self._outbox.send(client, messages.Pinned(request.id, lasts_s))

    def _unpin(self, client: int, request: messages.Unpin, now: float) -> None:
        entry = self.memory.entries.find(request.key)
        if entry is not None:
            self.pins.unpin(client, entry.span_id)
        self._outbox.send(client, messages.Done(request.id))

    def _limit(self, client: int, request: messages.Limit, now: float) -> None:
        before_bytes = self.budget.max_bytes
        self.budget.max_bytes = after_bytes = min(request.limit_bytes, self.limits.ring_bytes)
        self._outbox.send(client, messages.Limited(request.id, before_bytes, after_bytes))
        self._outbox.announce("limit", client=client, before_bytes=before_bytes, after_bytes=after_bytes)
        self.intake.limit_changed()
        self._reclaim.look_anew()
        self._reclaim.trim()
