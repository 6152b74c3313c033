"""Dispatches each event to the part of the store that carries it out.

Owns the table of events, the clients that have left and are not forgotten yet, and the propagation of new limits to
every part. Does not own the order of the steps around an event (`store`), nor the requests of clients (`requests`).

Invariant: a client that has left is forgotten exactly once, after all its puts have ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from ...errors import TensordError
from ...ipc import messages
from .effects import Forget
from .entries import SpanEntry
from .events import (
    Accessed,
    AgentsTurned,
    Allocated,
    ClaimWithdrawn,
    ClientJoined,
    ClientLeft,
    Copied,
    Drained,
    Event,
    FoundCorrupt,
    GenerationRaised,
    GenerationsTold,
    HoldersCounted,
    LimitsChanged,
    Moved,
    PrefixAsked,
    Punched,
    Received,
    RemoteConnected,
    RemoteSaved,
    RingGrown,
    RunSought,
    Scanned,
    Sought,
    Tick,
)
from .expiry import RemovalProgress
from .host_memory import Pressed
from .outbox import StoreClient
from .parts import Parts
from .requests import Carry, Requests

DUE_MAX: Final = 128
"""Deadlines of one kind that one Tick processes."""


class Dispatch:
    """Carries out one event after another."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.commits_most = parts.limits.commits_in_flight_max
        """The highest limit on a client's puts in flight that was ever in force."""
        self._leaving: set[int] = set()
        self._reads = False
        """Whether a read was reported since the last Drained."""
        others: dict[type[Any], Carry] = {
            messages.Commit: parts.intake.commit,
            messages.Part: parts.intake.part,
            messages.TakeSpan: parts.intake.take_span,
            messages.ReturnSpan: parts.intake.return_span,
            messages.Limit: self._limit,
        }
        self._requests = Requests(parts, others)
        self._handlers: dict[type[Any], Callable[[Any, float], None]] = {
            ClientJoined: self._client_joined,
            ClientLeft: self._client_left,
            Received: self._requests.received,
            Copied: self._copied,
            Moved: self._moved,
            Sought: self._sought,
            RunSought: self._run_sought,
            RemoteSaved: self._saved,
            ClaimWithdrawn: lambda event, _: self._parts.host_claims.withdrawn(event),
            RemoteConnected: self._remote_connected,
            GenerationsTold: self._generations_told,
            GenerationRaised: self._generation_raised,
            PrefixAsked: self._prefix_asked,
            Drained: self._drained,
            Scanned: self._scanned,
            Accessed: self._accessed,
            HoldersCounted: self._holders_counted,
            RingGrown: self._ring_grown,
            Pressed: self._pressed,
            Punched: self._punched,
            Allocated: self._allocated,
            AgentsTurned: self._agents_turned,
            LimitsChanged: self._limits_changed,
            FoundCorrupt: self._found_corrupt,
            Tick: self._tick,
        }

    def carry_out(self, event: Event, now: float) -> None:
        """Changes the store as the event says."""
        self._handlers[type(event)](event, now)

    @property
    def leaving(self) -> bool:
        """Whether `forget_left` has clients to check."""
        return bool(self._leaving)

    def _client_joined(self, event: ClientJoined, now: float) -> None:
        assert event.client not in self._parts.outbox.clients, "client numbers are not used again"
        self._parts.outbox.clients[event.client] = StoreClient(event.uid, event.name, event.writes)
        self._parts.memory.spans.holdings.joined(event.uid)

    def _client_left(self, event: ClientLeft, now: float) -> None:
        self._parts.memory.spans.holdings.left(self._parts.outbox.clients.pop(event.client).uid)
        self._leaving.add(event.client)
        self._parts.pins.client_left(event.client)
        self._parts.outbox.send_verdicts(self._parts.claims.client_left(event.client, now))
        self._parts.intake.client_left(event.client)

    def forget_left(self) -> None:
        """Forgets the clients that have left and have no puts any more."""
        for client in sorted(self._leaving):
            if not self._parts.intake.puts.has_any(client):
                self._leaving.discard(client)
                self._parts.outbox.add(Forget(client))

    def _copied(self, event: Copied, now: float) -> None:
        self._parts.intake.copied(event, now)

    def _moved(self, event: Moved, now: float) -> None:
        self._parts.reclaim.moved(event.number, copied=event.error is None)

    def _sought(self, event: Sought, now: float) -> None:
        found = self._parts.fetches.sought(event, now)
        if found is not None:
            self._parts.intake.fetch(*found, now)
        self._parts.writes.start(now)

    def _run_sought(self, event: RunSought, now: float) -> None:
        for uid, commit in self._parts.runs.sought(event, now):
            self._parts.intake.fetch(uid, commit, now)
        self._parts.writes.start(now)

    def _saved(self, event: RemoteSaved, now: float) -> None:
        memory, reading = self._parts.memory, self._parts.writes.reading
        self._parts.writes.saved(event, now)
        if ended := memory.last_pinned & (reading - self._parts.writes.reading):
            # A scan has found the span pinned by its write. The entry may be about to go.
            memory.last_pinned = memory.last_pinned - ended

    def _remote_connected(self, event: RemoteConnected, now: float) -> None:
        self._parts.link.connected(event.error, now)
        self._parts.writes.start(now)

    def _generations_told(self, event: GenerationsTold, now: float) -> None:
        self._parts.agreement.answered(event.told, event.error, now)
        self._parts.writes.start(now)

    def _generation_raised(self, event: GenerationRaised, now: float) -> None:
        self._parts.agreement.raised(event.tag, event.generation, event.error, now)

    def _prefix_asked(self, event: PrefixAsked, now: float) -> None:
        try:
            self._parts.matching.asked(event, now)
        except TensordError as error:
            self._parts.outbox.refuse(event.client, event.message.id, error)

    def _drained(self, event: Drained, now: float) -> None:
        self._parts.memory.policy.drained(reads=self._reads)
        self._reads = False
        if event.asked:
            self._parts.intake.changed |= self._parts.reclaim.drained()

    def _scanned(self, event: Scanned, now: float) -> None:
        self._parts.reclaim.scanned(event.pinned | self._parts.writes.reading, now)

    def _agents_turned(self, event: AgentsTurned, now: float) -> None:
        for agent in event.finished:
            self._parts.memory.policy.turn(agent, "finished", now)
        for agent in event.awaited:
            self._parts.memory.policy.turn(agent, "began", now)

    def _pressed(self, event: Pressed, now: float) -> None:
        before = self._parts.idle_sweep.pressed
        self._parts.idle_sweep.press(event)
        # Always answered: the governor waits for the answer before its next step.
        self._parts.residency_report.ask()
        self._parts.residency.press(event.resident_bytes_max)
        self._parts.reclaim.restart_search()
        self._parts.intake.press(refuse=event.refuse, reason=event.reason)
        if event != before:
            self._parts.outbox.announce(
                "pressed",
                resident_bytes_max=event.resident_bytes_max,
                idle_s=event.idle_s,
                refuse=event.refuse,
                reason=event.reason,
            )

    def _punched(self, event: Punched, now: float) -> None:
        self._parts.residency.punched(event.offset)

    def _allocated(self, event: Allocated, now: float) -> None:
        self._parts.residency.allocated(event.offset, event.error, now)

    def _accessed(self, event: Accessed, now: float) -> None:
        counters = self._parts.counters
        counters.misses += event.misses
        hits = len(event.span_ids) + event.lost
        self._parts.hits.looked_up(hits, event.misses, now)
        counters.log_lost += event.lost
        used = [entry for entry in map(self._parts.memory.stored, event.span_ids) if entry is not None]
        self._parts.expiry.used(used, now)
        self._parts.writes.used(used, now)
        self._reads |= bool(used)
        counters.hits += hits
        counters.hits_unknown += len(event.span_ids) - len(used)

    def _holders_counted(self, event: HoldersCounted, now: float) -> None:
        for span_id, holders in event.holders:
            entry = self._parts.memory.spans.find(span_id)
            if entry is not None:
                self._parts.memory.index.show_holders(entry.slot, holders)

    def _ring_grown(self, event: RingGrown, now: float) -> None:
        self._parts.memory.ring.grow(event.ring_bytes)
        self._parts.intake.ring_grown(more=event.more)

    def _limits_changed(self, event: LimitsChanged, now: float) -> None:
        old, limits = self._parts.limits, replace(event.limits, ring_bytes=self._parts.limits.ring_bytes)
        self._parts.limits = limits
        self.commits_most = max(self.commits_most, limits.commits_in_flight_max)
        self._parts.budget.max_entries = limits.max_entries
        self._parts.budget.max_tokens = limits.max_tokens
        if limits.max_bytes != old.max_bytes:
            # An unchanged setting keeps a budget that Limit has set.
            self._parts.budget.max_bytes = limits.max_bytes
        self._parts.claims.change_limits(limits.claim_s, limits.claim_s_max, limits.claims_per_client_max)
        self._parts.pins.change_limits(limits.pins_per_client_max, limits.pinned_bytes_max)
        self._parts.expiry.change_limits(limits.default_ttl_s)
        self._parts.matching.change_limits(limits.prefix_tokens_max, limits.prefix_wait_s)
        self._parts.reclaim.change_limits(limits.rescan_s)
        self._parts.intake.change_limits(limits)
        self._parts.agreement.change_limits(limits)
        self._parts.fetches.change_limits(limits)
        self._parts.writes.change_limits(limits)
        self._parts.reclaim.restart_search()
        self._parts.reclaim.trim()

    def _found_corrupt(self, event: FoundCorrupt, now: float) -> None:
        entry = self._parts.memory.stored(event.span_id)
        if entry is not None:
            self._end_corrupt(entry)

    def _end_corrupt(self, entry: SpanEntry) -> None:
        self._parts.counters.found_corrupt += 1
        self._parts.expiry.end(entry, RemovalProgress("corrupt"))

    def _tick(self, event: Tick, now: float) -> None:
        self._parts.outbox.send_verdicts(self._parts.claims.expire(now, DUE_MAX))
        self._parts.pins.expire(now, DUE_MAX)
        self._parts.expiry.expire(now, DUE_MAX)
        self._parts.intake.expire(now, DUE_MAX)
        self._parts.sweeps.advance()
        self._parts.matching.advance(now)
        for entry in self._parts.memory.sequences.rebuild():
            self._end_corrupt(entry)
        self._parts.agreement.tick(now)
        self._parts.fetches.tick(now)
        self._parts.demotion.advance(now)
        self._parts.idle_sweep.advance(now)
        self._parts.reclaim.tick(now)

    def _limit(self, client: int, request: messages.Limit, now: float) -> None:
        before_bytes = self._parts.budget.max_bytes
        self._parts.budget.max_bytes = after_bytes = min(request.limit_bytes, self._parts.limits.ring_bytes)
        self._parts.outbox.send(client, messages.Limited(request.id, before_bytes, after_bytes))
        self._parts.outbox.announce("limit", client=client, before_bytes=before_bytes, after_bytes=after_bytes)
        self._parts.intake.limit_changed()
        self._parts.reclaim.restart_search()
        self._parts.reclaim.trim()
