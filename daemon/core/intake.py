"""Carries puts from Commit to Committed: Commit, parts, room, copies, publication, and the end of a put whose sender
leaves.

    Commit ─ limits, "existed" ─→ first part, or the Commit itself ─→ queue ─ room ─→ parts are handed to the copier as
    they come ─→ Copied of the last ─→ published, once no put of its parent is in flight, unless the key was stored, its
    namespace invalidated or its parent evicted meanwhile
    TakeSpan ─→ queue ─ room ─→ SpanTaken;  Commit of that span ─ the same ─→ queue ─ a slot ─→ Seal ─→ Copied ─→ …

Owns the decisions about a put until its payload is in the ring. Does not own memory, room, claims or publication: their
modules do their parts.

Invariants:
- Every Commit of a client that stays is answered by exactly one Committed, and every Part that a client sends for a put
  with `acks` by exactly one PartCopied, also after a refusal.
- A put whose last part has arrived is carried out even if its sender leaves.
- A put takes no room before bytes of its payload have come. Puts and TakeSpans get room in turns of uids and of
  clients, those of one client in order of arrival. A put that waits for the ring to grow lets later ones pass.
- The span that a Commit names goes to that put, or is revoked.
"""

from __future__ import annotations

from typing import Final

from ...errors import BadMessage, Refusal, TensordError
from ...ipc import messages
from ...shm.prefix import PrefixRecord
from .admission import (
    announces_too_much,
    crowded,
    no_room,
    not_worth_it,
    over_share,
    overdue,
    too_many_parts,
    under_pressure,
    unfit,
    unfit_block,
    unwritten,
    wrong_part,
)
from .arrivals import Arrivals
from .claims import NOBODY, ClaimTable
from .effects import Discard
from .entries import SpanEntry
from .events import Copied
from .handover import Handover
from .limits import StoreLimits
from .outbox import StoreOutbox
from .parents import Parents
from .publication import Publication
from .put_answers import PutAnswers
from .puts import PutProgress, PutTable, Stage
from .reclaim import Reclaim
from .residency import Residency
from .room import Room
from .span_table import SpanTable
from .taken_spans import TakenSpans

SERVED_MAX: Final = 64
"""Waiting puts placed or answered in one event: 1 to 2 ms. A failed search for room ends the event's work at once."""


class Intake:
    """Carries puts from Commit to Committed."""

    def __init__(
        self,
        memory: SpanTable,
        room: Room,
        residency: Residency,
        reclaim: Reclaim,
        publication: Publication,
        answers: PutAnswers,
        claims: ClaimTable,
        outbox: StoreOutbox,
        limits: StoreLimits,
    ) -> None:
        self._memory = memory
        self._room = room
        self._residency = residency
        self._reclaim = reclaim
        self._publication = publication
        self._answers = answers
        self._claims = claims
        self._outbox = outbox
        self._limits = limits
        self.puts = PutTable(limits.put_idle_s, Arrivals(limits.announced_bytes_max, limits.announced_uid_bytes_max))
        self.parents = Parents(memory, self.puts)
        self.taken = TakenSpans(memory, outbox, self.puts)
        self._handover = Handover(publication, outbox)
        self.ring_is_growing = memory.ring.capacity_bytes < limits.ring_bytes
        self.searching = False
        """Whether the next Tick continues the search for room for the first put."""
        self.changed = False
        """Whether a put came, ended, or may fit since the last `serve`."""
        self._refuses = ""

    @property
    def ring_bytes(self) -> int:
        """The ring's final size."""
        return self._limits.ring_bytes if self.ring_is_growing else self._memory.ring.capacity_bytes

    def press(self, *, refuse: bool, reason: str) -> None:
        """Sets whether puts without a span are refused from now on, and why."""
        self._refuses = (reason or "memory is short") if refuse else ""
        self.puts.unpark()
        self.limit_changed()

    def commit(self, client: int, commit: messages.Commit, now: float) -> None:
        """Begins a put."""
        if self.puts.of_request(client, commit.id) is not None:
            error = BadMessage(f"Commit id {commit.id} is in flight already; ids are not used twice")
            self._outbox.refuse(client, commit.id, error)
            return
        self._begin(client, self._outbox.clients[client].uid, commit, now)

    def fetch(self, uid: int, commit: messages.Commit, now: float) -> None:
        """Begins the put of an entry that was found in the remote store."""
        self._begin(NOBODY, uid, commit, now)

    def _begin(self, client: int, uid: int, commit: messages.Commit, now: float) -> None:
        span = self.taken.named_by(client, commit)
        never = unfit(commit, self._limits, self._memory.budget, self.ring_bytes) or unfit_block(commit)
        refusal = (
            unwritten(commit, span)
            or never
            or self._memory.index.generations.refusal(commit.key)
            or crowded(self.puts.count_of(client), self._limits)
            or self.parents.refusal(commit.parent)
        )
        stored = self._memory.entries.find(commit.key) if refusal is None else None
        if refusal is None and stored is None and self._refuses:
            refusal = under_pressure(self._refuses)
        if refusal is not None:
            self._answers.refused(client, uid, commit, refusal, now, for_good=refusal is never)
        elif stored is not None:
            self._answers.existed(client, commit, stored, now)
        else:
            put = self.puts.begin(client, uid, commit, now)
            self.parents.began(put)
            if span is not None:
                self.puts.written(put, span, now)
                self._last_part_came(put)
            elif commit.at is not None:
                self.puts.received(put, messages.Part(commit.id, commit.at, commit.payload_bytes, True), now)
                self._last_part_came(put)
            return
        if span is not None:
            self._memory.revoke(span)

    def take_span(self, client: int, request: messages.TakeSpan, now: float) -> None:
        """Queues a client that wants a span to write into, or answers why it gets none.

        A client without a span puts through the inbox. So no answer here counts as a refusal.

        Raises:
            BadMessage: the client may not ask for the span.
        """
        try:
            commit = self.taken.commit(client, request)
            if refusal := unfit(commit, self._limits, self._memory.budget, self.ring_bytes):
                raise refusal
            if self._refuses:
                raise under_pressure(self._refuses)
        except Refusal as error:
            self._outbox.send(client, messages.Error.of(error, request.id))
            return
        self.parents.began(self.puts.take(client, self._outbox.clients[client].uid, commit, now, ahead=request.ahead))
        self.changed = True

    def return_span(self, client: int, request: messages.ReturnSpan, now: float) -> None:
        """Takes a span back, or ends the wait for it."""
        self.taken.take_back(client, request.span)
        if (put := self.puts.of_request(client, request.span)) is not None and put.takes:
            self._end(put)
        self.changed = True

    def part(self, client: int, part: messages.Part, now: float) -> None:
        """Accepts a part of a put. A part of an answered put is not needed, and is acknowledged at once."""
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
        if put.whole:
            self._last_part_came(put)
        self.changed = True
        if put.stage is Stage.FILLING:
            self._handover.parts(put)

    def copied(self, event: Copied, now: float) -> None:
        """Processes a part that was copied into the ring, or could not be."""
        put = self.puts.number(event.put_id)
        inbox_offset = put.copying.popleft()
        self._answers.part_copied(put, inbox_offset)
        if put.stage is Stage.ENDING:
            if not put.copying:
                self._discard(put)
        elif event.error is not None:
            self.refuse(put, event.error)
        elif put.whole and not put.copying:
            assert event.checksum is not None, "the last part was copied without a checksum"
            self._publish(put, event.record, now)

    def serve(self, now: float) -> None:
        """Publishes puts that have waited for their parents. Then places waiting puts in order, and requests room for
        the first one that does not fit."""
        self.searching = False
        for _ in range(SERVED_MAX):
            if (ready := self.parents.take_ready()) is None:
                break
            self._publish(*ready, now)
        self._serve(now)
        self.searching |= self.parents.any_ready
        self.changed = False

    def _publish(self, put: PutProgress, record: PrefixRecord | None, now: float) -> None:
        """Publishes a put whose payload is in the ring, unless it has to wait for its parent."""
        if self.parents.waits(put, record):
            # A put without room may have waited for this one to settle.
            self.changed = True
            return
        try:
            if gone := self._answers.voided(put):
                raise gone
            self._publication.publish(put, record, self.parents.published(put, now), now)
            self._end(put)
        except TensordError as error:
            self.refuse(put, error)

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
                self.refuse(put, under_pressure(self._refuses))
                continue
            if (entry := self._entry_for(put, now)) is not None:
                entry.cost_ms, entry.agent, entry.prefix_bytes = commit.cost_ms, commit.agent, commit.prefix_bytes
                puts.queue.take()
                self._reclaim.placed()
                if put.takes:
                    self.taken.give(put, entry, now)
                    continue
                puts.placed(put, entry)
                if put.told:
                    self._handover.seal(put)
                else:
                    self._handover.parts(put)
                continue
            progress = self._reclaim.make_room(put.need, now, self.parents.admission_test(put))
            if progress == "none" and puts.settling:
                return
            if progress == "declined":
                self.refuse(put, not_worth_it(put.need))
            elif progress == "none":
                self._no_room(put)
            # The next put needs a search of its own.
            self.searching = progress in ("declined", "none", "searching")
            return
        self.searching = True

    def _entry_for(self, put: PutProgress, now: float) -> SpanEntry | None:
        """The entry of a waiting put: a new span, or the span that its client has written. None: there is no room."""
        commit, span = put.commit, put.span
        if span is None:
            return self._memory.place(put.key, commit.payload_bytes, commit.tree_bytes, commit.tokens, put.uid, now)
        if not self._memory.assign(span, put.key, commit.payload_bytes, commit.tree_bytes, commit.tokens, now):
            return None
        put.span, put.told = None, True
        return span

    def ring_grown(self, *, more: bool) -> None:
        """The ring has grown; `more`: it will grow further."""
        self.ring_is_growing = more
        self.limit_changed()
        self.puts.unpark()

    def change_limits(self, limits: StoreLimits) -> None:
        """Applies to later commits and parts."""
        self._limits = limits
        self._publication.change_limits(limits)
        self.puts.change_idle(limits.put_idle_s)
        self.puts.arrivals.change_limits(limits.announced_bytes_max, limits.announced_uid_bytes_max)
        self.limit_changed()

    def limit_changed(self) -> None:
        """Ends the attempt to make room, and has the queue served again: a put that did not fit may fit now."""
        self._reclaim.drop_attempt()
        self.changed = True

    def client_left(self, client: int) -> None:
        """Ends the client's puts that are not completely received. The others are carried out."""
        for put in self.puts.of_client(client):
            if put.stage is not Stage.ENDING and not put.whole:
                self._outbox.counters.puts["aborted"] += not put.takes
                self._end(put)
        self.taken.client_left(client)

    def expire(self, now: float, most: int) -> None:
        """Refuses up to `most` puts whose next part is overdue, and all held puts for which no bytes come. Takes up to
        `most` spans back whose time is over."""
        self.changed |= self.taken.expire(now, most)
        while (held := self.puts.arrivals.overdue(now)) is not None:
            self.refuse(held, announces_too_much(held.uid, held.missing_bytes, self.puts.arrivals, self._limits))
        for _ in range(most):
            put = self.puts.idle(now)
            if put is None:
                return
            if put.parts or put.copying:
                # The put waits for the copier, not for its sender.
                self.puts.renew(put, now)
                continue
            self.refuse(put, overdue(put.received_bytes, put.commit, self._limits))

    def refuse(self, put: PutProgress, error: TensordError, *, for_good: bool = False) -> None:
        """Answers a put with an error and releases all that it has. `for_good`: as for `PutAnswers.refused`."""
        for part in put.parts:
            self._answers.part_copied(put, part.inbox_offset)
        if put.takes:
            self._outbox.send(put.client, messages.Error.of(error, put.commit.id))
        else:
            self._answers.refused(put.client, put.uid, put.commit, error, self._outbox.now, for_good=for_good)
        self._end(put)

    def _last_part_came(self, put: PutProgress) -> None:
        """The put no longer needs its sender: its claim lasts until it is answered."""
        self.changed = True
        if put.commit.claim is not None:
            self._claims.committing(put.commit.claim, put.uid, put.key)

    def _ended_meanwhile(self, put: PutProgress, now: float) -> bool:
        """Answers a put that waits for room and no longer needs any; whether it did."""
        if gone := self._memory.index.generations.refusal(put.key) or self.parents.refusal(put.commit.parent, put):
            # Refused before the search for room, so that no entry is evicted for a put that cannot be published.
            self.refuse(put, gone)
            return True
        stored = self._memory.entries.find(put.key)
        if stored is None:
            return False
        for part in put.parts:
            self._answers.part_copied(put, part.inbox_offset)
        self._answers.existed(put.client, put.commit, stored, now)
        self._end(put)
        return True

    def _no_room(self, put: PutProgress) -> None:
        """Parks a put until the ring grows, or refuses it: no evictable entry would make it fit."""
        if not self._room.unevictable.is_known and not self._room.unevictable.advance_survey():
            # The next Tick asks again.
            return
        obstacle = self._room.unevictable.obstacle(put.need)
        self._reclaim.drop_attempt()
        if obstacle == "ring" and self.ring_is_growing:
            self.puts.parked.append(self.puts.queue.take())
            return
        owners = self._room.evictable_uids(put.need)
        if obstacle is None and owners is not None and put.uid in owners:
            self.refuse(put, over_share(put.need, self._memory), for_good=True)
            return
        self.refuse(
            put, no_room(put.need, obstacle, self._memory, self._room.unevictable.size_bytes(), self._residency)
        )

    def _end(self, put: PutProgress) -> None:
        """Ends a put that was answered, or whose sender has left. Its span is freed after the last pending copy."""
        self.changed = True
        self.parents.ended(put)
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
        if put.span is not None:
            self._memory.revoke(put.span)
        if put.entry is not None and put.told:
            self._memory.revoke(put.entry)
        elif put.entry is not None:
            self._memory.discard(put.entry)
        put.span, put.entry, put.told = None, None, False
        self.puts.forget(put)
