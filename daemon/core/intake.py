"""The way of a put: Commit, parts, room, copies, publication, and how it ends at each point if its sender leaves.

    Commit ─ limits, "existed" ─→ first part ─→ queue ─ room ─→ parts are handed to the copier as they come ─→ Copied of
    the last ─→ published, unless the key was stored, its namespace invalidated or its parent evicted meanwhile

Owns the decisions about puts until their payload is in the ring; memory, room, claims and publication do their parts.

Invariants: every Commit of a client that stays is answered by exactly one Committed, every Part of one with `acks` by
exactly one PartCopied, also after a refusal; a put whose last part has arrived is carried out though its sender leaves;
puts take no room before their first part, and get it in turns of uids and of clients, each client's in the order in
which they came (but those that wait for the ring to grow let others pass).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ...errors import BadMessage, TensordError, UnderPressure
from ...ipc import messages
from ...shm.layout import SPAN_HEADER_BYTES
from ..policy.candidate import Candidate
from .admission import (
    announces_too_much,
    crowded,
    no_room,
    not_worth_it,
    over_share,
    overdue,
    parent_gone,
    too_many_parts,
    unfit,
    unfit_block,
    wrong_part,
)
from .arrivals import Arrivals
from .claims import ClaimTable
from .effects import Copy, Discard
from .events import Copied
from .limits import StoreLimits
from .outbox import StoreOutbox
from .publication import Publication
from .puts import PutProgress, PutTable, Stage
from .reclaim import Reclaim
from .residency import Residency
from .room import Room
from .span_table import SpanTable

SERVED_MAX: Final = 64
"""Waiting puts that are placed or answered in one go: 1 to 2 ms. Looking for room in vain ends it at once."""


class Intake:
    """Puts, from Commit to Committed."""

    def __init__(
        self,
        memory: SpanTable,
        room: Room,
        residency: Residency,
        reclaim: Reclaim,
        publication: Publication,
        claims: ClaimTable,
        outbox: StoreOutbox,
        limits: StoreLimits,
    ) -> None:
        self._memory = memory
        self._room = room
        self._residency = residency
        self._reclaim = reclaim
        self._publication = publication
        self._claims = claims
        self._outbox = outbox
        self._limits = limits
        self.puts = PutTable(limits.put_idle_s, Arrivals(limits.announced_bytes_max, limits.announced_uid_bytes_max))
        self.ring_is_growing = memory.ring.capacity_bytes < limits.ring_bytes
        self.searching = False
        """Whether the search for the first put's room is to go on at the next Tick."""
        self.changed = False
        """Whether a put came, went or may fit under other limits since `serve`."""
        self._refuses = ""

    @property
    def ring_bytes(self) -> int:
        """The ring's size, once it has grown."""
        return self._limits.ring_bytes if self.ring_is_growing else self._memory.ring.capacity_bytes

    def press(self, *, refuse: bool, reason: str) -> None:
        """Whether puts that have no span yet are refused from now on, and why."""
        self._refuses = (reason or "memory is short") if refuse else ""
        self.puts.unpark()
        self.limit_changed()

    def commit(self, client: int, commit: messages.Commit, now: float) -> None:
        """A put begins."""
        if self.puts.of_request(client, commit.id) is not None:
            error = BadMessage(f"Commit id {commit.id} is in flight already; ids are not used twice")
            self._outbox.refuse(client, commit.id, error)
            return
        uid = self._outbox.clients[client].uid
        refusal = (
            unfit(commit, self._limits, self._memory.budget, self.ring_bytes)
            or unfit_block(commit)
            or self._past(commit.key)
            or crowded(self.puts.count_of(client), self._limits)
            or self._without_parent(commit)
        )
        if refusal is not None:
            self._refused(client, uid, commit, refusal)
            return
        stored = self._memory.entries.find(commit.key)
        if stored is not None:
            self._publication.existed(client, commit, stored, now)
            return
        if self._refuses:
            self._refused(client, uid, commit, self._under_pressure())
            return
        self.puts.begin(client, uid, commit, now)
        if commit.parent is not None:
            self._memory.sequences.follow(commit.parent)

    def part(self, client: int, part: messages.Part, now: float) -> None:
        """A part of a put arrived. Parts of puts that were answered are not wanted, and acknowledged at once."""
        put = self.puts.of_request(client, part.id)
        if put is None:
            self._outbox.send(client, messages.PartCopied(part.id, part.inbox_offset))
            return
        commit = put.commit
        received = put.received_bytes + part.part_bytes
        outstanding = len(put.parts) + len(put.copying)
        error: TensordError | None = None
        if received > commit.payload_bytes or part.last != (received == commit.payload_bytes):
            error = wrong_part(commit, received, part)
        elif outstanding >= self._limits.parts_in_flight_max:
            error = too_many_parts(outstanding, self._limits)
        if error is not None:
            self._outbox.send(client, messages.PartCopied(part.id, part.inbox_offset))
            self.refuse(put, error)
            return
        self.puts.received(put, part, now)
        if put.whole and commit.claim is not None:
            self._claims.committing(commit.claim, put.uid, commit.key)
        self.changed = True
        if put.stage is Stage.FILLING:
            self._hand_over(put)

    def copied(self, event: Copied, now: float) -> None:
        """A part is in the ring, or could not be copied."""
        put = self.puts.number(event.put_id)
        inbox_offset = put.copying.popleft()
        self._acknowledge(put, inbox_offset)
        if put.stage is Stage.ENDING:
            if not put.copying:
                self._discard(put)
        elif event.error is not None:
            self.refuse(put, event.error)
        elif put.whole and not put.copying:
            assert event.checksum is not None, "the last part was copied without a checksum"
            try:
                self._publication.publish(put, event.record, now)
            except TensordError as error:
                self.refuse(put, error)
            else:
                self._end(put)

    def serve(self, now: float) -> None:
        """Places what waits, in order, and asks for room for the first that does not fit."""
        self.searching = False
        self._serve(now)
        self.changed = False

    def _serve(self, now: float) -> None:
        puts = self.puts
        for _ in range(SERVED_MAX):
            put = puts.queue.head()
            if put is None:
                return
            commit = put.commit
            if self._ended_meanwhile(put, now):
                continue
            if self._refuses:
                self.refuse(put, self._under_pressure())
                continue
            entry = self._memory.place(put.key, commit.payload_bytes, commit.tree_bytes, commit.tokens, put.uid, now)
            if entry is not None:
                entry.cost_ms, entry.agent, entry.prefix_bytes = commit.cost_ms, commit.agent, commit.prefix_bytes
                puts.queue.take()
                self._reclaim.drop_attempt()
                puts.placed(put, entry)
                self._hand_over(put)
                continue
            progress = self._reclaim.make_room(put.need, self._admission_test(put))
            if progress == "none" and puts.settling:
                return
            if progress == "declined":
                self.refuse(put, not_worth_it(put.need))
            elif progress == "none":
                self._no_room(put)
            # Whoever is next needs a search of its own.
            self.searching = progress in ("declined", "none", "searching")
            return
        self.searching = True

    def _admission_test(self, put: PutProgress) -> Callable[[int], bool] | None:
        """Whether the policy would rather have the put than a span: asked only for blocks that have a parent."""
        memory, commit = self._memory, put.commit
        parent = memory.entries.find(commit.parent) if commit.parent is not None else None
        if parent is None:
            return None
        new = Candidate(
            memory.spans.next_span_id,
            commit.key,
            put.need.span_bytes,
            commit.tokens,
            commit.cost_ms,
            parent.depth + 1,
            parent.before_bytes + parent.span_bytes,
            commit.agent,
        )
        return lambda victim: memory.policy.admits(new, victim)

    def ring_grown(self, *, more: bool) -> None:
        """The ring has more bytes than before; `more` are to come."""
        self.ring_is_growing = more
        self.limit_changed()
        self.puts.unpark()

    def change_limits(self, limits: StoreLimits) -> None:
        """For commits and parts from now on."""
        self._limits = limits
        self._publication.change_limits(limits)
        self.puts.change_idle(limits.put_idle_s)
        self.puts.arrivals.change_limits(limits.announced_bytes_max, limits.announced_uid_bytes_max)
        self.limit_changed()

    def limit_changed(self) -> None:
        """What did not fit may fit now."""
        self._reclaim.drop_attempt()
        self.changed = True

    def client_left(self, client: int) -> None:
        """Puts not wholly received end; the others are carried out."""
        for put in self.puts.of_client(client):
            if put.stage is not Stage.ENDING and not put.whole:
                self._outbox.counters.puts["aborted"] += 1
                self._end(put)

    def expire(self, now: float, most: int) -> None:
        """Refuses up to `most` puts whose next part is overdue, and those held for which nothing comes."""
        while (held := self.puts.arrivals.overdue(now)) is not None:
            self.refuse(held, announces_too_much(held.uid, held.missing_bytes, self.puts.arrivals, self._limits))
        for _ in range(most):
            put = self.puts.idle(now)
            if put is None:
                return
            if put.parts or put.copying:
                # It is not the sender that keeps the others waiting.
                self.puts.renew(put, now)
                continue
            self.refuse(put, overdue(put.received_bytes, put.commit, self._limits))

    def refuse(self, put: PutProgress, error: TensordError) -> None:
        """Answers a put with an error, and lets go of what it has."""
        for part in put.parts:
            self._acknowledge(put, part.inbox_offset)
        self._refused(put.client, put.uid, put.commit, error)
        self._end(put)

    def _past(self, key: bytes) -> TensordError | None:
        return self._memory.index.generations.refusal(key)

    def _without_parent(self, commit: messages.Commit) -> TensordError | None:
        """Whether what the put follows is neither stored nor on its way, so that it can only be refused later."""
        parent, entries = commit.parent, self._memory.entries
        if parent is None or entries.find(parent) or entries.hidden(parent) or self.puts.on_its_way(parent):
            return None
        return parent_gone(parent)

    def _ended_meanwhile(self, put: PutProgress, now: float) -> bool:
        """Whether a put that waits for room needs none any more; then it was answered."""
        gone = self._past(put.key) or self._without_parent(put.commit)
        if gone is not None:
            # Nobody loses an entry for a put that can only be refused.
            self.refuse(put, gone)
            return True
        stored = self._memory.entries.find(put.key)
        if stored is None:
            return False
        for part in put.parts:
            self._acknowledge(put, part.inbox_offset)
        self._publication.existed(put.client, put.commit, stored, now)
        self._end(put)
        return True

    def _hand_over(self, put: PutProgress) -> None:
        """Gives the parts that have arrived to the copier."""
        entry, commit = put.entry, put.commit
        assert entry is not None
        payload_offset = entry.offset + SPAN_HEADER_BYTES
        while put.parts:
            part = put.parts.popleft()
            ring_offset = payload_offset + put.handed_bytes
            put.handed_bytes += part.part_bytes
            put.copying.append(part.inbox_offset)
            self._outbox.add(
                Copy(
                    put.client,
                    put.number,
                    part.inbox_offset,
                    part.part_bytes,
                    ring_offset,
                    payload_offset,
                    part.last,
                    self._publication.header(put) if part.last else None,
                    put.uid,
                    commit.inbox,
                )
            )
        assert put.handed_bytes <= commit.payload_bytes

    def _no_room(self, put: PutProgress) -> None:
        """Nothing that may go would make it fit: it waits for the ring to grow, or is refused."""
        if not self._room.unevictable.is_known and not self._room.unevictable.advance_survey():
            # It is asked for again.
            return
        obstacle = self._room.unevictable.obstacle(put.need)
        self._reclaim.drop_attempt()
        if obstacle == "ring" and self.ring_is_growing:
            self.puts.parked.append(self.puts.queue.take())
            return
        owners = self._room.evictable_uids(put.need)
        if obstacle is None and owners is not None and put.uid in owners:
            self.refuse(put, over_share(put.need, self._memory))
            return
        self.refuse(
            put, no_room(put.need, obstacle, self._memory, self._room.unevictable.size_bytes(), self._residency)
        )

    def _under_pressure(self) -> UnderPressure:
        return UnderPressure(f"puts are refused while memory is short: {self._refuses}. Compute without storing it")

    def _refused(self, client: int, uid: int, commit: messages.Commit, error: TensordError) -> None:
        """Answers a client, who may have left, and whoever waits for what it had claimed."""
        self._outbox.counters.puts["refused"] += 1
        self._outbox.count_refusal(client, error)
        body = messages.ErrorBody.of(error)
        self._outbox.send(client, messages.Committed(commit.id, "refused", body))
        if commit.claim is not None:
            self._outbox.send_verdicts(self._claims.refused(commit.claim, uid, commit.key))

    def _acknowledge(self, put: PutProgress, inbox_offset: int) -> None:
        if put.commit.acks:
            self._outbox.send(put.client, messages.PartCopied(put.commit.id, inbox_offset))

    def _end(self, put: PutProgress) -> None:
        """The put was answered, or nobody wants an answer: its span goes with the last copy."""
        self.changed = True
        if put.commit.parent is not None:
            self._memory.sequences.unfollow(put.commit.parent)
        if put.stage is Stage.WAITING:
            if self.puts.queue.head() is put:
                self._reclaim.drop_attempt()
            self.puts.leave_queue(put)
        self.puts.answered(put)
        if put.stage is not Stage.ENDING:
            self._discard(put)

    def _discard(self, put: PutProgress) -> None:
        self.changed = True
        if 0 < put.handed_bytes < put.commit.payload_bytes:
            self._outbox.add(Discard(put.client, put.number))
        if put.entry is not None:
            self._memory.discard(put.entry)
            put.entry = None
        self.puts.forget(put)
