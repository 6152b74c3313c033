"""Dispatches each event to the part of the store that carries it out.

Owns the way of each event, and the propagation of new limits to every part. Does not own the order of the steps around
an event (`store`), nor the requests of clients (`requests`).
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import assert_never

from ...errors import TensordError
from ..forms import events
from ..forms.events import Pressed
from ..forms.limits import StoreLimits
from ..store.table import LIVE, VICTIM
from .parts import Parts
from .requests import Requests

DUE_MAX = 128
"""Deadlines of one kind that one Tick processes."""


class Dispatch:
    """Carries out one event after another."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._requests = Requests(parts)

    def carry_out(self, event: events.Event, now: float) -> None:
        """Changes the store as the event says."""
        parts = self._parts
        match event:
            case events.Received():
                self._requests.received(event, now)
            case events.Tick():
                self._tick(now)
            case events.Accessed():
                parts.remote.writes.used(parts.lifetimes.uses.accessed(event, now).tolist(), now)
            case events.Scanned(pinned):
                self._scanned(pinned, now)
            case events.Drained():
                parts.runway.drained()
            case events.Moved(number, error):
                parts.runway.moved(number, copied=error is None)
            case events.PrefixAsked():
                try:
                    parts.matching.asked(event, now)
                except TensordError as error:
                    parts.outbox.refuse(event.client, event.message.id, error)
            case events.RemoteDone():
                parts.remote.handle(event, now)
            case events.HoldersCounted(holders):
                parts.lifetimes.uses.held(holders)
            case events.ClientJoined(client, uid):
                assert client not in parts.outbox.clients, "client numbers are not used again"
                parts.outbox.clients[client] = event
                parts.lending.joined(client, uid, in_place=False).expected = 0
            case events.WritesInPlace(client):
                parts.lending.writes_in_place(client, True)
            case events.ClientLeft(client):
                del parts.outbox.clients[client]
                parts.lifetimes.pins.client_left(client)
                parts.outbox.send_verdicts(parts.claims.client_left(client, now))
                parts.lending.left(client)
            case Pressed():
                self._pressed(event)
            case events.Punched(offset):
                parts.host_memory.residency.punched(offset)
            case events.Allocated(offset, error):
                parts.host_memory.residency.allocated(offset, error, now)
            case events.RingGrown(ring_bytes, more):
                parts.runway.grown(ring_bytes, more=more)
            case events.AgentsTurned(finished, awaited):
                for agent in finished:
                    parts.policy.turn(parts.agents.named(agent), "finished", now)
                for agent in awaited:
                    parts.policy.turn(parts.agents.named(agent), "began", now)
            case events.LimitsChanged(limits):
                self._limits_changed(limits)
            case events.FoundCorrupt(span_id):
                row = parts.table.row_of(span_id)
                if row and parts.table.states[row] in (LIVE, VICTIM):
                    parts.lifetimes.removals.corrupt([row])
            case _:
                assert_never(event)

    def _scanned(self, pinned: AbstractSet[int], now: float) -> None:
        parts = self._parts
        outcome = parts.runway.scanned(pinned | parts.remote.writes.reading, now)
        parts.host_memory.scanned(something_freed=outcome.freed_bytes > 0)
        for row in outcome.republished:
            parts.outbox.send_verdicts(parts.claims.committed(parts.slots.key(parts.table.slots[row])))

    def _pressed(self, event: Pressed) -> None:
        parts = self._parts
        before = parts.host_memory.pressed
        parts.host_memory.press(event)
        parts.lending.pressed((event.reason or "memory is short") if event.refuse else None)
        if event != before:
            resident_bytes_max, refuse, reason = event.resident_bytes_max, event.refuse, event.reason
            parts.outbox.announce("pressed", resident_bytes_max=resident_bytes_max, refuse=refuse, reason=reason)

    def _limits_changed(self, limits: StoreLimits) -> None:
        parts, budget, old = self._parts, self._parts.budget, self._parts.limits
        parts.limits = limits = replace(limits, ring_bytes=old.ring_bytes)
        budget.max_entries, budget.max_tokens = limits.max_entries, limits.max_tokens
        if limits.max_bytes != old.max_bytes:
            # An unchanged setting keeps a budget that Limit has set.
            budget.max_bytes = limits.max_bytes
        parts.claims.change_limits(limits.claim_s, limits.claim_s_max, limits.claims_per_client_max)
        parts.lifetimes.pins.per_client_max = limits.pins_per_client_max
        parts.lifetimes.pins.bytes_max = limits.pinned_bytes_max
        parts.blocks.prefix_tokens_max = limits.prefix_tokens_max
        parts.matching.wait_s = limits.prefix_wait_s
        parts.runway.change_limits(limits.rescan_s)
        parts.lending.limit_changed(limits)
        parts.remote.change_limits(limits)
        parts.apply_commit_limits()

    def _tick(self, now: float) -> None:
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
