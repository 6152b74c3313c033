"""The store's core: entries, grants, claims. Records and events in, effects out; time is an argument.

    submitted(client, records) ─ commit (daemon/store) ─→ entries; answers, claims, uses (here)
    handle(event) ─┬─ dispatch    chooses the part that carries out the event, or the client's message
                   ├─ room        grants, and the room that is made ahead of them
                   ├─ lifetimes   uses, ends, times to live, pins by message, sweeps
                   ├─ prefix      the longest cached prefix
                   ├─ host_memory pages of the ring: given back, taken again
                   └─ remote      fetches from the remote store, and writes to it

Owns the order of the steps of an event. Does not own shared memory, sockets or threads.

Invariants: `submitted`, `handle` and `recover` are the only ones that change entries. No event takes long, whatever is
stored: each does a bounded amount of work and leaves the rest to the next Tick, which `next_timer` asks for at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from ...errors import CANNOT_BE_STORED, BadMessage, TensordError
from ...ipc.messages import control as messages
from ...shm.ring.layout import NAMESPACE_TAG_BYTES
from ..claims.claims import NOBODY
from ..claims.quotas import Quotas
from ..forms.effects import Effect
from ..forms.events import Event
from ..forms.limits import StoreLimits
from ..recovery.recovery import Recovery
from ..room import refusals
from ..store.commit import BAD_BLOCK, BAD_TREE, TOO_MANY_TOKENS
from ..store.entries import StoreMemory
from .dispatch import Dispatch
from .parts import Parts

TOGETHER: Final = 64
"""A Tick is due after so many puts, before their time comes: their clients have been told by then."""
SETTLED_EVERY_S: Final = 0.01
"""What follows from puts follows at most this long after them: arrays of few rows cost as much as those of 64."""


class Store:
    """The entries of one ring. `policy`: the name of the replacement policy. `seed`: of the prefix index, and of the
    keys of grants; 128 random bits that nobody else knows. `quotas`: the limits on one uid; None: no limits."""

    def __init__(
        self,
        memory: StoreMemory,
        policy: str,
        limits: StoreLimits,
        epoch: int,
        *,
        seed: int = 0,
        quotas: Quotas | None = None,
    ) -> None:
        self.quotas = quotas or Quotas({}, own_uid=0)
        self.parts = parts = Parts(memory, policy, limits, self.quotas, epoch, seed)
        parts.remote.fetches.commit = self._commit_own
        self._dispatch = Dispatch(parts)
        self._outbox = parts.outbox
        self.reports = parts.reports
        self.policy = parts.policy
        self.counters = parts.counters
        self.is_lent = parts.lending.is_lent
        self._putter = NOBODY
        """The client whose puts nothing has followed from yet (`Commits.fresh`)."""
        self._settled_at = 0.0

    def submitted(
        self, client: int, records: memoryview, now: float, errors: dict[int, TensordError]
    ) -> tuple[int, list[Effect]]:
        """Carries out records of a client's queue. `errors`: by the number of a record, why its payload could not be
        copied out of the client's inbox. Returns the number of the last record, and the effects; more may follow with
        the next event, or with the next call for another client: `next_timer` sees to it. Raises BadMessage if a record
        is none of the client's; those before it are carried out, and their effects come with the next event."""
        parts = self.parts
        self._outbox.now = now
        if client != self._putter:
            self._stored(now)
            self._putter = client
        damage: BadMessage | None = None
        try:
            last = parts.commits.take(parts.lending.submitters[client], records, now)
        except BadMessage as error:
            damage = error
        self._committed(now, errors)
        if damage is not None:
            raise damage
        if parts.lending.waiting or self._outbox.is_watched():
            self._stored(now)
            self._follow(now)
        return last, self._outbox.take()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Changes the store as `event` says, and returns the effects to carry out, in this order. `now`: seconds by a
        clock that never goes back and that the next daemon of this memory uses too."""
        self._outbox.now = now
        self._stored(now)
        self._dispatch.carry_out(event, now)
        self._follow(now)
        return self._outbox.take()

    def _follow(self, now: float) -> None:
        """What follows from every event, and from puts, in this order."""
        parts = self.parts
        # 1. A slice of the descendants of ended entries ends; a sweep that has ended is answered.
        parts.lifetimes.step()
        # 2. Resident bytes are reconciled before any grant is lent, and again after the room for it was chosen.
        parts.host_memory.reconcile(now)
        # 3. Waiting requests for grants are served; room is made for the first one, and ahead of later ones.
        parts.lending.serve(now)
        parts.host_memory.reconcile(now)
        parts.runway.advance(now)
        # 4. One scan is requested for all that was unpublished so far.
        if parts.host_memory.scan_due and not parts.spans.scanning:
            parts.runway.scan()
        parts.host_memory.scan_due = False
        # 5. The governor is told of the ring's resident bytes.
        parts.host_memory.report(parts.lending.ring_bytes)

    def _stored(self, now: float) -> None:
        """What follows from new entries: before anything else can end them."""
        parts, fresh = self.parts, self.parts.commits.fresh
        self._settled_at = now
        if not fresh:
            return
        rows, keys = fresh[:], parts.unstorable
        fresh.clear()
        parts.lifetimes.stored(rows, now, self._putter)
        if self._putter != NOBODY:
            parts.remote.writes.published(rows, now)
        if len(keys):
            for row in rows:
                keys.stored(parts.slots.key(parts.table.slots[row]))

    def _committed(self, now: float, errors: dict[int, TensordError]) -> None:
        """What clients wait for after a batch of records: answers, refusals, and the keys that they have claimed."""
        parts, commits = self.parts, self.parts.commits
        if commits.existed:
            self._existed(commits.existed[:], now)
            commits.existed.clear()
        if commits.refused:
            refused = commits.refused[:]
            commits.refused.clear()
            self._refused(refused, now, errors)
        if commits.awaited:
            for key in commits.awaited:
                self._outbox.send_verdicts(parts.claims.committed(key))
            commits.awaited.clear()

    def _existed(self, existed: list[tuple[int, int, int]], now: float) -> None:
        """Puts of clients named keys of stored entries: each counts as a use."""
        rows = [row for client, _, row in existed if client != NOBODY]
        self.parts.lifetimes.put_again(rows, now)
        self.parts.remote.writes.used(rows, now)
        self.counters.puts["existed"] += len(rows)
        for client, number, _ in existed:
            self._outbox.send(client, messages.PutRefused(number))

    def _refused(
        self, refused: list[tuple[int, int, int, bytes, int, int]], now: float, errors: dict[int, TensordError]
    ) -> None:
        """Whoever waits for the claim of a refused put computes."""
        parts = self.parts
        of_blocks = iter(parts.blocks.errors[:])
        parts.blocks.errors.clear()
        for client, number, reason, key, claim, tokens in refused:
            error = next(of_blocks) if reason == BAD_BLOCK else errors.get(number) if reason == BAD_TREE else None
            error = error or parts.generations.refusal(key) or refusals.of_record(reason, key, tokens, parts.limits)
            if client == NOBODY:
                continue
            self.counters.puts["refused"] += 1
            self._outbox.count_refusal(client, error)
            self._outbox.send(client, messages.PutRefused(number, messages.ErrorBody.of(error)))
            if claim:
                if reason == TOO_MANY_TOKENS or isinstance(error, CANNOT_BE_STORED):
                    parts.unstorable.note(key, error, now)
                uid = self._outbox.clients[client].uid
                self._outbox.send_verdicts(parts.claims.refused(claim, uid, key, now))

    def _commit_own(self, record: memoryview, now: float) -> None:
        """Stores an entry that was fetched from the remote store."""
        self._stored(now)
        self._putter = NOBODY
        self.parts.commits.take(self.parts.own, record, now)
        self._stored(now)
        self._committed(now, {})

    @property
    def postponed(self) -> bool:
        """Whether work was left to the next Tick, which is due now."""
        parts = self.parts
        return bool(
            parts.lifetimes.postponed
            or parts.runway.searching
            or parts.host_memory.searching
            or parts.matching.due
            or parts.blocks.rebuilding
        )

    @property
    def is_due(self) -> bool:
        """Whether much is to follow from puts: a Tick is due."""
        return len(self.parts.commits.fresh) >= TOGETHER

    @property
    def unsettled(self) -> bool:
        """Whether something is still to follow from puts: counters do not have them yet."""
        return bool(self.parts.commits.fresh)

    def next_timer(self) -> float | None:
        """When the next Tick is due. Not after the time of the last event if work was postponed."""
        if self.postponed:
            return self._outbox.now
        parts = self.parts
        timers = (
            self._settled_at + SETTLED_EVERY_S if self.unsettled else None,
            parts.claims.next_timer(),
            parts.lifetimes.next_timer(),
            parts.runway.next_timer(),
            parts.lending.next_timer(),
            parts.host_memory.next_timer(),
            parts.matching.next_timer(),
            parts.remote.next_timer(),
        )
        return min((timer for timer in timers if timer is not None), default=None)

    def recover(self, now: float, missing: Iterable[tuple[int, int]] = ()) -> Iterator[None]:
        """Takes over the memory of an earlier daemon, once, before the first event but ClientJoined: in steps of a few
        milliseconds. `missing`: the stretches (offset, bytes) of the ring, whole pages in ascending order, that are not
        in memory. They are withdrawn, and taken back as far as the limits allow."""
        parts = self.parts
        self._outbox.now = now
        for tag in parts.generations.tags():
            parts.tenants.invalidated.add(tag)
        recovery = Recovery(parts, now, missing, parts.generations.is_past)
        yield from recovery.steps()
        parts.lifetimes.expiry.stored(recovery.rows)
        parts.hits.recovered(recovery.rows)
        parts.blocks.recovered()
        parts.host_memory.withdrawn.found()
        self.counters.recovered += len(recovery.rows)
        self.counters.found_corrupt += recovery.corrupt

    def evict_only_for_puts(self) -> None:
        """The daemon is about to end: from now on entries are evicted for puts only. The next daemon enforces the
        budgets."""
        self.parts.host_memory.only_for_puts = self.parts.runway.only_for_requests = True

    def status(self, now: float | None = None) -> dict[str, Any]:
        """Sizes and counters, without a walk over entries. `now`: by the store's clock; None: the last event's time."""
        return self.parts.reports.status(self._outbox.now if now is None else now)

    def lent_span_ids(self) -> list[int]:
        """The span ids of all grants, which their clients pin."""
        return [grant.span_id for each in self.parts.lending.submitters.values() for grant in each.grants.values()]

    def span_id(self, key: bytes) -> int | None:
        row = self.parts.table.by_key.get(key)
        return None if row is None else self.parts.table.span_ids[row]

    def take_unsummed(self) -> list[int]:
        """The slots of entries that were stored without a checksum since the last call."""
        taken = list(self.parts.commits.unsummed)
        self.parts.commits.unsummed.clear()
        return taken

    def check_invariants(self) -> None:
        parts = self.parts
        entries = parts.table, parts.holes, parts.families, parts.spans, parts.lending, parts.policy, parts.blocks
        for part in (*entries, parts.claims, parts.lifetimes, parts.host_memory, parts.remote):
            part.check_invariants()
        for key in parts.table.by_key:
            assert key not in parts.claims.by_key, "a claim on a stored key"
            past = len(parts.lifetimes.sweeps) == 0 and parts.generations.is_past(key)
            assert not past, f"an entry of a past generation of {key[:NAMESPACE_TAG_BYTES].hex()}"
