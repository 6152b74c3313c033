"""Dispatches each event to the part of the store that carries it out, and answers the clients' messages.

Owns the way of each event, the table from message to method, the answers, one to each request, and the propagation of
new limits to every part. Does not own the order of the steps around an event (`store`). Invariant: a refused request
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, assert_never

from msgspec.structs import asdict

from ...errors import TensordError
from ...ipc.messages import control as messages
from ...ipc.messages.declared import handlers, id_of
from ..claims.claims import Verdict
from ..forms import events
from ..forms.events import PrefixAsked, Pressed, Received
from ..forms.limits import StoreLimits
from ..store.table import LIVE, VICTIM
from .parts import Parts

DUE_MAX = 128
"""Deadlines of one kind that one Tick processes."""
SLICE = 256
"""Keys of one request that one event carries out: 1 to 2 ms."""

Carry = Callable[[int, Any, float], object]
"""(client, message, now); raises a TensordError before it changes anything."""


class Dispatch:
    """Carries out one event after another."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._table = parts.table
        self._claims = parts.claims
        self._outbox = parts.outbox
        requests: dict[type[Any], Carry] = {
            messages.AskForGrants: self._ask_for_grants,
            messages.ReturnGrants: lambda client, request, now: parts.lending.returned(client, request.grants),
            messages.Doorbell: lambda client, request, now: None,
            messages.Limit: self._limit,
            messages.Evict: self._of_keys,
            messages.Touch: self._of_keys,
            messages.RequestClaim: self._claim,
            messages.FetchRun: self._fetch,
            messages.Renew: self._renew,
            messages.Abandon: self._abandon,
            messages.Clear: lambda client, request, now: parts.lifetimes.sweeps.clear(client, request),
            messages.Invalidate: self._invalidate,
            messages.Pin: self._pin,
            messages.Unpin: self._unpin,
            messages.AgentTurn: self._agent_turn,
            messages.NameAgent: lambda client, request, now: parts.agents.named(request.agent),
        }
        self._carry = handlers(messages.StoreRequest, requests)

    def carry_out(self, event: events.Event, now: float) -> None:
        """Changes the store as the event says."""
        parts = self._parts
        match event:
            case events.Received() | events.PrefixAsked():
                self._asked(event, now)
            case events.Tick():
                self._tick(now)
            case events.Accessed():
                parts.remote.writes.used(parts.lifetimes.accessed(event, now).tolist(), now)
            case events.Scanned(pinned):
                self._scanned(pinned, now)
            case events.Drained():
                parts.runway.drained()
            case events.Moved(number, error):
                parts.runway.moved(number, copied=error is None)
            case events.RemoteDone():
                parts.remote.handle(event, now)
            case events.HoldersCounted(span_ids, holders):
                parts.lifetimes.held(span_ids, holders)
            case events.ClientJoined(client, uid):
                assert client not in parts.outbox.clients, "client numbers are not used again"
                parts.outbox.clients[client] = event
                parts.lending.joined(client, uid).expected = 0
            case events.WritesInPlace(client):
                parts.lending.submitters[client].in_place = True
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
        parts.lending.pressure = (event.reason or "memory is short") if event.refuse else None
        if event != before:
            parts.outbox.announce("pressed", **asdict(event))

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
        parts.runway.drop_attempt()
        parts.lending.limits = limits
        parts.remote.link.limits = limits
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

    def _asked(self, event: Received | PrefixAsked, now: float) -> None:
        client, message = event.client, event.message
        try:
            match event:
                case PrefixAsked():
                    self._parts.matching.asked(event, now)
                case Received(_, messages.Evict() | messages.Touch() as of_keys, counted):
                    self._of_keys(client, of_keys, now, counted)
                case _:
                    self._carry[type(message)](client, message, now)
        except TensordError as error:
            self._outbox.refuse(client, id_of(message), error)

    def _ask_for_grants(self, client: int, request: messages.AskForGrants, now: float) -> None:
        self._parts.lending.returned(client, request.returned)
        self._parts.lending.ask(client, request.id, request.sizes, ahead=request.ahead)

    def _limit(self, client: int, request: messages.Limit, now: float) -> None:
        budget = self._parts.budget
        before_bytes = budget.max_bytes
        budget.max_bytes = after_bytes = min(request.limit_bytes, self._parts.limits.ring_bytes)
        self._outbox.send(client, messages.Limited(request.id, before_bytes, after_bytes))
        self._outbox.announce("limit", client=client, before_bytes=before_bytes, after_bytes=after_bytes)
        self._parts.runway.drop_attempt()

    def _claim(self, client: int, request: messages.RequestClaim, now: float) -> None:
        past = self._parts.generations.refusal(request.key)
        if past is not None:
            raise past
        if request.key in self._table.by_key:
            self._outbox.counters.claims["hit"] += 1
            self._outbox.send(client, messages.Claimed(request.id, "hit"))
            return
        if self._parts.unstorable.remembers(request.key, now):
            self._outbox.send_verdicts([Verdict(client, request.id, request.key, "alone")])
            return
        uid = self._outbox.clients[client].uid
        self._parts.quotas.admit("claims", uid, self._claims.of_uid[uid])
        verdict = None
        if request.key not in self._claims.by_key:
            verdict = self._parts.remote.fetches.begin(client, uid, request, now)
        if verdict is None:
            verdict = self._claims.claim(request.key, client, request.id, now, uid, request.within_s)
        self._outbox.send_verdicts([verdict])

    def _fetch(self, client: int, request: messages.FetchRun, now: float) -> None:
        self._parts.remote.fetches.run(client, self._outbox.clients[client].uid, request, now)

    def _renew(self, client: int, request: messages.Renew, now: float) -> None:
        for token in request.tokens:
            self._claims.renew(token, client, now)

    def _abandon(self, client: int, request: messages.Abandon, now: float) -> None:
        uid = self._outbox.clients[client].uid
        key = None if request.error is None else self._claims.key_held(request.token, uid)
        if request.error is None or key is None:
            self._outbox.send_verdicts(self._claims.abandon(request.token, uid, now))
            return
        error = request.error.to_error()
        self._outbox.count_refusal(client, error)
        self._parts.unstorable.note(key, error, now)
        self._outbox.send_verdicts(self._claims.refused(request.token, uid, key, now))

    def _of_keys(self, client: int, request: messages.Evict | messages.Touch, now: float, counted: int = 0) -> None:
        """Carries the request out for a slice of its keys. The rest comes again (`Received.counted`)."""
        keys = list(dict.fromkeys(request.keys))
        rows = self._stored(keys[:SLICE])
        if isinstance(request, messages.Touch):
            self._parts.lifetimes.touched(rows, now)
        else:
            self._parts.lifetimes.end(rows, "explicit")
            self._parts.remote.fetches.evicted(keys[:SLICE])
            self._parts.remote.writes.evicted(keys[:SLICE], now)
        counted += len(rows)
        if len(keys) > SLICE:
            self._outbox.add(Received(client, type(request)(request.id, keys[SLICE:]), counted))
        else:
            self._outbox.send(client, messages.Counted(request.id, counted))

    def _stored(self, keys: list[bytes]) -> list[int]:
        """The rows of the keys' entries, victims included, since a victim may be published again."""
        published, hidden = self._table.by_key, self._parts.spans.hidden
        rows = [published.get(key) or hidden.get(key, 0) for key in keys]
        return [row for row in rows if row]

    def _invalidate(self, client: int, request: messages.Invalidate, now: float) -> None:
        if self._parts.lifetimes.sweeps.invalidate(client, request):
            self._outbox.send_verdicts(self._claims.void(request.namespace))
            self._parts.remote.agreement.invalidated(request.namespace)

    def _agent_turn(self, client: int, request: messages.AgentTurn, now: float) -> None:
        self._parts.policy.turn(self._parts.agents.named(request.agent), request.state, now)
        self._outbox.send(client, messages.Done(request.id))

    def _pin(self, client: int, request: messages.Pin, now: float) -> None:
        row = self._table.by_key.get(request.key)
        lasts_s = 0.0
        if row:
            lasts_s = min(request.for_s, self._parts.limits.pin_s_max)
            self._parts.lifetimes.pins.pin(client, row, now + lasts_s)
        self._outbox.send(client, messages.Pinned(request.id, lasts_s))

    def _unpin(self, client: int, request: messages.Unpin, now: float) -> None:
        row = self._table.by_key.get(request.key)
        if row:
            self._parts.lifetimes.pins.unpin(client, row)
        self._outbox.send(client, messages.Done(request.id))
