"""Dispatches each event to the part of the store that carries it out.

Owns the table of events, and the propagation of new limits to every part. Does not own the order of the steps around an
event (`store`), nor the requests of clients (`requests`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...errors import TensordError
from ...ipc.messages import control as messages
from ..forms import events
from ..forms.host_memory import Pressed
from ..forms.outbox import StoreClient
from ..store.table import LIVE, VICTIM
from .parts import Parts
from .requests import Carry, Requests

DUE_MAX = 128
"""Deadlines of one kind that one Tick processes."""


class Dispatch:
    """Carries out one event after another."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        others: dict[type[Any], Carry] = {
            messages.AskForGrants: self._ask_for_grants,
            messages.ReturnGrants: self._return_grants,
            messages.Doorbell: lambda client, request, now: None,
            messages.Limit: self._limit,
        }
        self._requests = Requests(parts, others)
        self._handlers: dict[type[Any], Callable[[Any, float], None]] = {
            events.ClientJoined: self._client_joined,
            events.ClientLeft: self._client_left,
            events.WritesInPlace: self._writes_in_place,
            events.Received: self._requests.received,
            events.Moved: self._moved,
            events.RemoteDone: self._parts.remote.handle,
            events.PrefixAsked: self._prefix_asked,
            events.Drained: self._drained,
            events.Scanned: self._scanned,
            events.Accessed: self._accessed,
            events.HoldersCounted: self._holders_counted,
            events.RingGrown: self._ring_grown,
            Pressed: self._pressed,
            events.Punched: self._punched,
            events.Allocated: self._allocated,
            events.AgentsTurned: self._agents_turned,
            events.LimitsChanged: self._limits_changed,
            events.FoundCorrupt: self._found_corrupt,
            events.Tick: self._tick,
        }

    def carry_out(self, event: events.Event, now: float) -> None:
        """Changes the store as the event says."""
        self._handlers[type(event)](event, now)

    # ---- clients

    def _client_joined(self, event: events.ClientJoined, now: float) -> None:
        assert event.client not in self._parts.outbox.clients, "client numbers are not used again"
        self._parts.outbox.clients[event.client] = StoreClient(event.uid, event.name)
        self._parts.lending.joined(event.client, event.uid, in_place=False).expected = 0

    def _writes_in_place(self, event: events.WritesInPlace, now: float) -> None:
        self._parts.lending.writes_in_place(event.client, True)

    def _client_left(self, event: events.ClientLeft, now: float) -> None:
        del self._parts.outbox.clients[event.client]
        self._parts.lifetimes.pins.client_left(event.client)
        self._parts.outbox.send_verdicts(self._parts.claims.client_left(event.client, now))
        self._parts.lending.left(event.client)

    def _ask_for_grants(self, client: int, request: messages.AskForGrants, now: float) -> None:
        self._parts.lending.returned(client, request.returned)
        self._parts.lending.ask(client, request.id, request.sizes, ahead=request.ahead)

    def _return_grants(self, client: int, request: messages.ReturnGrants, now: float) -> None:
        self._parts.lending.returned(client, request.grants)

    def _prefix_asked(self, event: events.PrefixAsked, now: float) -> None:
        try:
            self._parts.matching.asked(event, now)
        except TensordError as error:
            self._parts.outbox.refuse(event.client, event.message.id, error)

    # ---- lanes

    def _drained(self, event: events.Drained, now: float) -> None:
        if event.asked:
            self._parts.runway.drained()

    def _scanned(self, event: events.Scanned, now: float) -> None:
        parts = self._parts
        outcome = parts.runway.scanned(event.pinned | parts.remote.writes.reading, now)
        parts.host_memory.scanned(something_freed=outcome.freed_bytes > 0)
        for row in outcome.republished:
            parts.outbox.send_verdicts(parts.claims.committed(parts.slots.key(parts.table.slots[row])))

    def _accessed(self, event: events.Accessed, now: float) -> None:
        rows = self._parts.lifetimes.uses.accessed(event, now)
        self._parts.remote.writes.used(rows.tolist(), now)

    def _holders_counted(self, event: events.HoldersCounted, now: float) -> None:
        self._parts.lifetimes.uses.held(event.holders)

    def _agents_turned(self, event: events.AgentsTurned, now: float) -> None:
        for agent in event.finished:
            self._parts.policy.turn(self._parts.agents.named(agent), "finished", now)
        for agent in event.awaited:
            self._parts.policy.turn(self._parts.agents.named(agent), "began", now)

    # ---- the ring

    def _moved(self, event: events.Moved, now: float) -> None:
        self._parts.runway.moved(event.number, copied=event.error is None)

    def _pressed(self, event: Pressed, now: float) -> None:
        before = self._parts.host_memory.pressed
        self._parts.host_memory.press(event)
        self._parts.lending.pressed((event.reason or "memory is short") if event.refuse else None)
        if event != before:
            self._parts.outbox.announce(
                "pressed",
                resident_bytes_max=event.resident_bytes_max,
                refuse=event.refuse,
                reason=event.reason,
            )

    def _punched(self, event: events.Punched, now: float) -> None:
        self._parts.host_memory.residency.punched(event.offset)

    def _allocated(self, event: events.Allocated, now: float) -> None:
        self._parts.host_memory.residency.allocated(event.offset, event.error, now)

    def _ring_grown(self, event: events.RingGrown, now: float) -> None:
        self._parts.runway.grown(event.ring_bytes, more=event.more)

    def _found_corrupt(self, event: events.FoundCorrupt, now: float) -> None:
        row = self._parts.table.row_of(event.span_id)
        if row and self._parts.table.states[row] in (LIVE, VICTIM):
            self._parts.lifetimes.removals.corrupt([row])

    # ---- limits and time

    def _limits_changed(self, event: events.LimitsChanged, now: float) -> None:
        old, limits = self._parts.limits, replace(event.limits, ring_bytes=self._parts.limits.ring_bytes)
        self._parts.limits = limits
        budget = self._parts.budget
        budget.max_entries, budget.max_tokens = limits.max_entries, limits.max_tokens
        if limits.max_bytes != old.max_bytes:
            # An unchanged setting keeps a budget that Limit has set.
            budget.max_bytes = limits.max_bytes
        self._parts.claims.change_limits(limits.claim_s, limits.claim_s_max, limits.claims_per_client_max)
        self._parts.lifetimes.pins.per_client_max = limits.pins_per_client_max
        self._parts.lifetimes.pins.bytes_max = limits.pinned_bytes_max
        self._parts.blocks.prefix_tokens_max = limits.prefix_tokens_max
        self._parts.matching.wait_s = limits.prefix_wait_s
        self._parts.runway.change_limits(limits.rescan_s)
        self._parts.lending.limit_changed(limits)
        self._parts.remote.change_limits(limits)
        self._parts.apply_commit_limits()

    def _limit(self, client: int, request: messages.Limit, now: float) -> None:
        before_bytes = self._parts.budget.max_bytes
        self._parts.budget.max_bytes = after_bytes = min(request.limit_bytes, self._parts.limits.ring_bytes)
        self._parts.outbox.send(client, messages.Limited(request.id, before_bytes, after_bytes))
        self._parts.outbox.announce("limit", client=client, before_bytes=before_bytes, after_bytes=after_bytes)
        self._parts.lending.limit_changed()

    def _tick(self, event: events.Tick, now: float) -> None:
        parts = self._parts
        parts.outbox.send_verdicts(parts.claims.expire(now, DUE_MAX))
        # Blocks whose ancestors have ended, and which are about to end, are not taken for corrupt.
        if parts.blocks.rebuilding and not parts.lifetimes.removals.ending:
            self._rebuild()
        parts.lifetimes.tick(now)
        parts.matching.advance(now)
        parts.remote.tick(now)
        parts.host_memory.tick(now)
        parts.runway.tick(now)

    def _rebuild(self) -> None:
        parts, states = self._parts, self._parts.table.states
        failed = parts.blocks.rebuild()
        parts.lifetimes.removals.corrupt([row for row in failed if states[row] == LIVE])
        # A parent of a victim may have been put again: then the victim has no ancestors any more.
        parts.lifetimes.end([row for row in failed if states[row] == VICTIM], "capacity")
