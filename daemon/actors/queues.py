"""The submission queues of the lanes: takes records out, and tells clients what is settled.

    lane's queue ─ take ─┬─ a client that writes into the ring ─────────────────────────→ the core (`submitted`)
                         └─ one with an inbox ─ the payload is copied into the ring first ──↗       │
    refusals (messages) ← then `settled`, in memory that the client reads ← the bell, if it waits ←─┘

Owns: whose turn it is, the copies from inboxes, the words that clients read, and when clients have to ring. Does not
own the memory of lanes (`Segments`), nor what a record means.

Invariants: the records of a client are carried out in their order. `settled` is stored after all that follows from the
records up to it: the entries are published, and their refusals counted in `refusals`. No bytes are copied out of an
inbox to a place that was not lent to its client.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from ...errors import BadMessage, TensordError
from ...shm.lanes.records import AWAKE, NAPS, RECORD, SLEEPS
from ...shm.ring.layout import RECORD_BYTES, SPAN_HEADER_BYTES
from ..memory.copier import Copier, InboxCopied, InboxCopy
from ..memory.segments import HeldLane, Segments
from .mailbox import Mailbox

AT_ONCE: Final = 64
"""Records of one client that are carried out in one turn: 1 to 2 ms."""

_CHECKSUM: Final = struct.Struct("<Q")
_TREE: Final = struct.Struct("<I")
_CHECKSUM_AT, _TREE_AT = 56, 124

LOOK_S: Final = 0.0002
"""How long the actor looks for further records before it rests: a client that waits for each put has the next one by
then, and rings no bell, which takes longer than the put."""
NAP_S: Final = 0.001
"""How long the actor waits for further records before it sleeps: the event loop's timers are no finer."""


@dataclass(slots=True)
class LaneQueue:
    """One client's queue. `settled`: the number of the last record that was carried out; `rung`: up to which a bell was
    sent. `records`: taken out, and not carried out because a copy is under way. `after`: what follows once that has
    ended. `damaged`: nothing more is taken out."""

    client: int
    uid: int
    lane: HeldLane
    has_inbox: bool
    settled: int
    rung: int = 0
    records: memoryview = field(default_factory=lambda: memoryview(b""))
    copying: bool = False
    damaged: bool = False
    after: list[Callable[[], object]] = field(default_factory=list)


class Queues:
    """The queues of all attached clients. `submitted` carries records out, of which the errors of payloads are given by
    number, and returns the number of the last one; it raises BadMessage if a record is none of the client's. `is_lent`:
    whether bytes of the ring are those of a client's grant. `ring` sends a client the bell. `hang_up` ends the
    connection of a client whose queue is damaged."""

    def __init__(
        self,
        memory: Segments,
        copier: Copier,
        *,
        submitted: Callable[[int, memoryview, dict[int, TensordError]], int],
        is_lent: Callable[[int, int, int, int], bool],
        ring: Callable[[int], object],
        hang_up: Callable[[int, str], object],
    ) -> None:
        self._memory = memory
        self._copier = copier
        self._submitted = submitted
        self._is_lent = is_lent
        self._ring = ring
        self._hang_up = hang_up
        self._queues: dict[int, LaneQueue] = {}
        self._turns: list[LaneQueue] = []

    def attached(self, client: int, uid: int, lane: HeldLane) -> None:
        """A client has a lane, of which everything up to now is settled."""
        self.detached(client)
        self._queues[client] = LaneQueue(client, uid, lane, True, lane.queue.tail)
        self._turns.append(self._queues[client])

    def writes_in_place(self, client: int) -> None:
        if client in self._queues:
            self._queues[client].has_inbox = False

    def refused(self, client: int) -> None:
        if (queue := self._queues.get(client)) is not None:
            # SYNC POINT: before `settled` is stored.
            self._memory.refusals[queue.lane.place] += 1

    def detached(self, client: int) -> None:
        queue = self._queues.pop(client, None)
        if queue is not None:
            self._turns.remove(queue)

    @property
    def waiting(self) -> bool:
        """Whether a record was added that can be carried out now."""
        return any(
            not queue.copying and (queue.records or queue.lane.queue.head() > queue.lane.queue.tail)
            for queue in self._turns
        )

    @property
    def settled(self) -> bool:
        return not self.waiting and not any(queue.copying for queue in self._turns)

    def turn(self) -> bool:
        """Carries out up to AT_ONCE records of each client. Returns whether there were any."""
        worked = False
        for queue in self._turns[:]:
            worked |= self._advance(queue)
        if worked and self._turns:
            # Another client is the first one next time.
            self._turns.append(self._turns.pop(0))
        return worked

    def after_added(self, client: int, do: Callable[[], object]) -> None:
        """Calls `do` once all that the client has added until now is carried out: at once, unless a copy is under
        way."""
        queue = self._queues.get(client)
        if queue is not None:
            queue.after.append(do)
            self._catch_up(queue)
        else:
            do()

    def copied(self, done: InboxCopied) -> None:
        queue = self._queues.get(done.client)
        if queue is not None and queue.copying:
            queue.copying = False
            self._submit_copied(queue, done)
            self._catch_up(queue)

    def _catch_up(self, queue: LaneQueue) -> None:
        while self._advance(queue):
            pass
        self._settle(queue)
        if not queue.copying:
            after, queue.after = queue.after, []
            for do in after:
                do()

    def _advance(self, queue: LaneQueue) -> bool:
        """Carries out the next records of one client. Returns whether there were any."""
        if queue.copying or queue.damaged:
            return False
        if not queue.records:
            taken = queue.lane.queue.take(AT_ONCE)
            if taken is None:
                return False
            queue.records = taken
        if queue.has_inbox:
            self._copy_next(queue)
        else:
            self._submit(queue, AT_ONCE, {})
        self._settle(queue)
        return True

    def _copy_next(self, queue: LaneQueue) -> None:
        """Copies the payloads of the records that were taken out, until one has to wait for the copier's thread."""
        while queue.records and not queue.copying:
            _, _, offset, payload, *_, grant, tree, _, _, _, _ = RECORD.unpack_from(queue.records)
            if not payload or not self._is_lent(queue.client, grant, offset, SPAN_HEADER_BYTES + payload):
                # The core refuses it.
                self._submit(queue, 1, {})
                continue
            part = InboxCopy(queue.client, queue.uid, offset + SPAN_HEADER_BYTES, payload, tree)
            if self._copier.is_small(part):
                done = self._copier.copy_now(part)
                assert isinstance(done, InboxCopied)
                self._submit_copied(queue, done)
            else:
                queue.copying = True
                self._copier.copy(part)

    def _submit_copied(self, queue: LaneQueue, done: InboxCopied) -> None:
        errors = {}
        _CHECKSUM.pack_into(queue.records, _CHECKSUM_AT, done.checksum)
        if done.error is not None:
            errors[queue.settled + 1] = done.error
            _TREE.pack_into(queue.records, _TREE_AT, 0)
        self._submit(queue, 1, errors)

    def _submit(self, queue: LaneQueue, count: int, errors: dict[int, TensordError]) -> None:
        """Has up to `count` of the records that were taken out carried out."""
        size_bytes = count * RECORD_BYTES
        records, queue.records = queue.records[:size_bytes], queue.records[size_bytes:]
        try:
            queue.settled = self._submitted(queue.client, records, errors)
        except BadMessage as error:
            queue.records, queue.damaged = memoryview(b""), True
            self.detached(queue.client)
            self._hang_up(queue.client, str(error))

    def _settle(self, queue: LaneQueue) -> None:
        # SYNC POINT: after the entries are published and `refusals` was stored. x86-64 keeps stores in order.
        self._memory.settled[queue.lane.place] = queue.settled
        waits = queue.lane.queue.waits_for()
        if queue.rung < waits <= queue.settled:
            queue.rung = waits
            self._ring(queue.client)


class Lookout:
    """How the actor waits for further records: after the last one it looks for them for LOOK_S, then it naps for NAP_S,
    so that a client which writes one put after another rings no bell; then it sleeps, and each record wakes it.
    `awake`: the actor has not napped since the last record."""

    def __init__(self, memory: Segments, queues: Queues, clock: Callable[[], float]) -> None:
        self.awake = False
        self._memory = memory
        self._queues = queues
        self._clock = clock
        self._look_until = 0.0

    def begin(self) -> None:
        """There were records, or a client rang."""
        self.awake, self._look_until = True, self._clock() + LOOK_S

    @property
    def looks(self) -> bool:
        """Whether the actor looks at once for further records."""
        return self.awake and self._clock() < self._look_until

    async def rest(self, inbox: Mailbox[Any], idle_s: float) -> None:
        """Naps or sleeps until a message comes, for `idle_s` at most."""
        memory = self._memory
        memory.asleep[0] = NAPS if self.awake else SLEEPS
        # SYNC POINT: a client stores its queue's head before it loads `asleep`. Between the store of `asleep` and this
        # look at the heads is a fence in all clients, so one of the two sees the other's store. A client that is not
        # reached by the quick fence rings each time.
        memory.fence_quickly()
        if not self._queues.waiting:
            await inbox.wait(min(idle_s, NAP_S) if self.awake else idle_s)
        self.awake = False
        memory.asleep[0] = AWAKE
