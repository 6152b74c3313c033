"""The table of puts in flight, from Commit to answer, and the queue of puts that wait for room.

Owns the table, the queue, and each put's stage, received parts and pending copies. Decides nothing about memory.

    ANNOUNCED ─ first part → WAITING ─ placed → FILLING ─ all copied → stored, existed or refused
       │                        │                  │ refused, or its sender left before its last part
       └ refused, left          └ refused, left    └→ ENDING: answered; its span is freed after its pending copies

A WAITING put is queued for room, parked until the ring has grown, or held (`arrivals`).

A put whose payload is in a span of the ring already waits for a slot only. A TakeSpan waits like a put, and leaves the
table once it has its span.

Invariants: a put waits for room only after its first part, and has an entry only from FILLING on. Uids take turns in
the queue, and so do the clients of each uid. Parts are handed to the copier in order of arrival. A client has at most
`commits_in_flight_max` puts in the table.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from ...ipc import messages
from ...shm.layout import span_bytes
from .arrivals import Arrivals
from .claims import NOBODY
from .deadlines import Deadlines
from .entries import SpanEntry
from .need import Need
from .turns import Turns


class Stage(Enum):
    """The stage of a put."""

    ANNOUNCED = "announced"
    WAITING = "waiting"
    FILLING = "filling"
    ENDING = "ending"


@dataclass(slots=True, eq=False)
class PutProgress:
    """One put. `received_bytes` of the payload have arrived in parts; `handed_bytes` were handed to the copier.
    `admitted`: the put may take room for bytes that have not arrived. `span`: the span that its client has written
    the payload into, until the put gets it as its entry. `told`: the client knows the entry's span. `takes`: this
    is no put, but a TakeSpan that waits for room; `ahead`: it is for a later put. `waits_for_parent`: the payload
    is complete in the ring, and the put waits for its parent (`parents`)."""

    number: int
    client: int
    uid: int
    commit: messages.Commit
    stage: Stage = Stage.ANNOUNCED
    entry: SpanEntry | None = None
    span: SpanEntry | None = None
    told: bool = False
    takes: bool = False
    ahead: bool = False
    parts: deque[messages.Part] = field(default_factory=deque)
    copying: deque[int] = field(default_factory=deque)
    received_bytes: int = 0
    handed_bytes: int = 0
    admitted: bool = False
    waits_for_parent: bool = False

    @property
    def key(self) -> bytes:
        return self.commit.key

    @property
    def fetched(self) -> bool:
        """Whether the daemon itself puts the entry, which it has found in the remote store."""
        return self.client == NOBODY

    @property
    def whole(self) -> bool:
        """Whether the last part has arrived. The put no longer needs its sender then."""
        return self.received_bytes == self.commit.payload_bytes

    @property
    def missing_bytes(self) -> int:
        """Bytes of the payload that have not arrived. A TakeSpan announces none: `taken_spans` bounds what is taken."""
        return 0 if self.takes else self.commit.payload_bytes - self.received_bytes

    @property
    def need(self) -> Need:
        commit, has_span = self.commit, self.span is not None
        size = 0 if has_span else span_bytes(commit.payload_bytes)
        return Need(commit.key, size, commit.tokens, self.uid, has_span)


class PutTable:
    """The table. A put with missing parts is refused after `idle_s` without one."""

    def __init__(self, idle_s: float, arrivals: Arrivals) -> None:
        self._idle_s = idle_s
        self.arrivals = arrivals
        self._made = 0
        self._by_number: dict[int, PutProgress] = {}
        self._by_request: dict[tuple[int, int], PutProgress] = {}
        self._by_client: dict[int, set[int]] = {}
        self._keys: dict[bytes, list[int]] = {}
        self._settling: set[int] = set()
        self._idle: Deadlines[int] = Deadlines()
        self.queue: Turns[PutProgress] = Turns()
        self.parked: deque[PutProgress] = deque()
        self.announced = 0
        """The number of puts without any part yet."""
        self.takers: Counter[int] = Counter()
        """The number of each client's TakeSpans in the table."""
        self.taking_bytes = 0
        """The total bytes of spans for which TakeSpans wait."""

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def settling(self) -> bool:
        """Whether puts are about to publish or free their spans without further action of their senders."""
        return bool(self._settling)

    def begin(self, client: int, uid: int, commit: messages.Commit, now: float) -> PutProgress:
        """Adds a put without any part."""
        self._made += 1
        put = PutProgress(self._made, client, uid, commit)
        self.announced += 1
        self._by_number[put.number] = put
        self._by_request[client, commit.id] = put
        self._by_client.setdefault(client, set()).add(put.number)
        self._keys.setdefault(commit.key, []).append(put.number)
        self._idle.set(put.number, now + self._idle_s)
        return put

    def number(self, number: int) -> PutProgress:
        """The put with this number."""
        return self._by_number[number]

    def of_request(self, client: int, request: int) -> PutProgress | None:
        """The put of a client's request; None if it was answered."""
        return self._by_request.get((client, request))

    def of_client(self, client: int) -> list[PutProgress]:
        """A client's puts, oldest first."""
        return [self._by_number[n] for n in sorted(self._by_client.get(client, ()))]

    def in_flight(self, key: bytes, before: PutProgress | None = None) -> bool:
        """Whether a put of the key may still be published; with `before`, one that began before that put."""
        numbers = self._keys.get(key)
        return numbers is not None and (before is None or numbers[0] < before.number)

    def set_waiting(self, put: PutProgress, *, waits: bool) -> None:
        """A put whose payload is complete begins to wait for its parent, or waits no more."""
        put.waits_for_parent = waits
        (self._settling.discard if waits else self._settling.add)(put.number)

    def count_of(self, client: int) -> int:
        """The number of the client's puts, without its TakeSpans."""
        return len(self._by_client.get(client, ())) - self.takers[client]

    def has_any(self, client: int) -> bool:
        """Whether the client has a put or a TakeSpan."""
        return client in self._by_client

    def received(self, put: PutProgress, part: messages.Part, now: float) -> None:
        """Records the put's next part. With its first part, the put starts to wait for room, unless it is held."""
        put.received_bytes += part.part_bytes
        put.parts.append(part)
        if put.stage is Stage.ANNOUNCED:
            self._wait(put, now)
        else:
            self.arrivals.came(put, part.part_bytes, now)
            self._admit(put.uid)
        if put.whole:
            self._idle.drop(put.number)
            if put.stage is Stage.FILLING:
                self._settling.add(put.number)
        else:
            self._idle.set(put.number, now + self._idle_s)

    def take(self, client: int, uid: int, commit: messages.Commit, now: float, *, ahead: bool) -> PutProgress:
        """Adds a TakeSpan, as a put that is never filled. It waits for room."""
        put = self.begin(client, uid, commit, now)
        put.takes, put.ahead = True, ahead
        self.takers[client] += 1
        self.taking_bytes += span_bytes(commit.payload_bytes)
        self._wait(put, now)
        return put

    def written(self, put: PutProgress, span: SpanEntry, now: float) -> None:
        """Records that the put's payload is in `span` already."""
        put.span, put.received_bytes = span, put.commit.payload_bytes
        self._idle.drop(put.number)
        self._wait(put, now)

    def placed(self, put: PutProgress, entry: SpanEntry) -> None:
        """Gives the put its span."""
        put.entry = entry
        put.stage = Stage.FILLING
        if put.whole:
            self._settling.add(put.number)

    def answered(self, put: PutProgress) -> None:
        """Records that the put was answered. It is ENDING while copies are pending; otherwise `forget` must follow."""
        put.parts.clear()
        self.arrivals.ended(put)
        self._admit(put.uid)
        self._keys[put.key].remove(put.number)
        if not self._keys[put.key]:
            del self._keys[put.key]
        self._by_request.pop((put.client, put.commit.id), None)
        self._idle.drop(put.number)
        if put.copying:
            put.stage = Stage.ENDING
            self._settling.add(put.number)

    def forget(self, put: PutProgress) -> None:
        """Removes a put without pending copies."""
        if put.takes:
            self.takers[put.client] -= 1
            if not self.takers[put.client]:
                del self.takers[put.client]
            self.taking_bytes -= span_bytes(put.commit.payload_bytes)
        del self._by_number[put.number]
        self.announced -= put.stage is Stage.ANNOUNCED
        self._settling.discard(put.number)
        own = self._by_client[put.client]
        own.discard(put.number)
        if not own:
            del self._by_client[put.client]

    def renew(self, put: PutProgress, now: float) -> None:
        """Restarts the put's idle time."""
        self._idle.set(put.number, now + self._idle_s)

    def idle(self, now: float) -> PutProgress | None:
        """A put whose next part is overdue. Removes the put's deadline: the caller renews it, or refuses the put."""
        number = self._idle.pop_due(now)
        return None if number is None else self._by_number[number]

    def next_timer(self) -> float | None:
        timers = (self._idle.next_timer(), self.arrivals.next_timer())
        return min((timer for timer in timers if timer is not None), default=None)

    def leave_queue(self, put: PutProgress) -> None:
        """Removes the put from the queue, or from the parked puts."""
        if not self.queue.remove(put.uid, put.client, put) and put in self.parked:
            self.parked.remove(put)

    def unpark(self) -> None:
        """Returns the parked puts to the queue, each as the first of its client."""
        while self.parked:
            put = self.parked.pop()
            self.queue.push_first(put.uid, put.client, put)

    @property
    def waiting(self) -> int:
        """The number of puts that have a part and no room."""
        return len(self.queue) + len(self.parked) + self.arrivals.held

    def __iter__(self) -> Iterator[PutProgress]:
        return iter(self._by_number.values())

    def change_idle(self, idle_s: float) -> None:
        """Sets the idle time of a put from its next part on."""
        self._idle_s = idle_s

    def check_invariants(self, in_flight_max: int) -> None:
        """Asserts what the module's docstring promises."""
        self._idle.check_invariants()
        self.queue.check_invariants()
        self.arrivals.check_invariants(list(self))
        waiting = {put.number for put in (*self.queue, *self.parked)}
        assert len(waiting) == len(self.queue) + len(self.parked)
        held = sum(put.stage is Stage.WAITING and not put.admitted for put in self)
        assert held == self.arrivals.held
        assert self.announced == sum(put.stage is Stage.ANNOUNCED for put in self)
        for put in self:
            assert (put.stage in (Stage.ANNOUNCED, Stage.WAITING)) == (put.entry is None)
            assert put.takes or (put.stage is Stage.ANNOUNCED) == (put.received_bytes == 0)
            assert not put.told or (put.entry is not None and put.commit.span is not None)
            assert put.span is None or (put.stage is Stage.WAITING and put.commit.span is not None)
            assert not put.takes or put.stage is Stage.WAITING
            assert (put.stage is Stage.WAITING and put.admitted) == (put.number in waiting)
            assert put.handed_bytes <= put.received_bytes <= put.commit.payload_bytes
            filled = put.stage is Stage.FILLING and put.whole
            settling = put.stage is Stage.ENDING or (filled and not put.waits_for_parent)
            assert filled or not put.waits_for_parent
            assert settling == (put.number in self._settling)
            assert put.stage is not Stage.ENDING or put.copying
            assert put.stage is not Stage.FILLING or not put.parts
            waits_for_parts = put.stage is not Stage.ENDING and not put.whole
            assert waits_for_parts == (put.number in self._idle)
        assert sum(map(len, self._by_client.values())) == len(self)
        under_way = [put.number for put in self if put.stage is not Stage.ENDING]
        assert sorted(number for own in self._keys.values() for number in own) == sorted(under_way)
        assert all(own and own == sorted(own) for own in self._keys.values())
        assert all(len(own) - self.takers[client] <= in_flight_max for client, own in self._by_client.items())
        takers = [put for put in self if put.takes]
        assert self.takers == Counter(put.client for put in takers) and all(self.takers.values())
        assert self.taking_bytes == sum(span_bytes(put.commit.payload_bytes) for put in takers)

    def _wait(self, put: PutProgress, now: float) -> None:
        """The put waits for room from now on, unless it is held."""
        put.stage = Stage.WAITING
        self.announced -= 1
        if self.arrivals.began(put, now):
            self.queue.push(put.uid, put.client, put)

    def _admit(self, uid: int) -> None:
        """Queues the held puts that may be announced now."""
        for put in self.arrivals.admit(uid):
            self.queue.push(put.uid, put.client, put)
