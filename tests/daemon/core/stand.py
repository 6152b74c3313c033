"""A store with everything around it played by the test: clients, the lanes, the ring's bytes and pages."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensord.daemon.claims.quotas import Quotas
from tensord.daemon.core.store import Store
from tensord.daemon.forms.effects import Announce, Effect, HostHolds, Send
from tensord.daemon.forms.events import (
    Accessed,
    ClientJoined,
    ClientLeft,
    Event,
    PrefixAsked,
    Pressed,
    Received,
    RingGrown,
    Tick,
    WritesInPlace,
)
from tensord.daemon.forms.limits import StoreLimits
from tensord.daemon.store.entries import StoreMemory
from tensord.errors import TensordError
from tensord.ipc.messages import control as messages
from tensord.shm.index.index import IndexWriter
from tensord.shm.index.keys import make_key
from tensord.shm.lanes.records import NO_KEY, RECORD
from tensord.shm.payloads.prefix import PrefixRecord, Tokens
from tensord.shm.ring.layout import PAGE_BYTES, SPAN_HEADER_BYTES, IndexGeometry, span_bytes

from .blocks import BLOCK, TAG, TREE_BYTES, Block, block, name, query, text
from .memory_side import MemorySide, View

SPAN = 256  # ring bytes of a payload of 64, its header included
_NUMBERS: dict[bytes, int] = {}


def key(number: int, tag: bytes = b"namespac", generation: int = 0) -> bytes:
    """A key that is told from others by its number."""
    made = make_key(tag, hashlib.sha256(number.to_bytes(8, "little")).digest(), generation)
    _NUMBERS[made] = number
    return made


@dataclass(eq=False)
class Place:
    """A place that a client was lent, as far as it is not used. `view`: the client's pin, with what it has written at
    the beginning."""

    grant: int
    offset: int
    size: int
    view: View


class Stand(MemorySide):
    """One daemon's store, and everything that it has to do with. Effects are carried out when the test says so."""

    def __init__(
        self,
        ring_bytes: int = 4096,
        *,
        policy: str = "lru",
        grown_bytes: int | None = None,
        epoch: int = 1,
        namespaces_max: int = 64,
        **limits: Any,
    ) -> None:
        defaults = dict.fromkeys(("ring_bytes", "max_bytes", "object_bytes_max", "pinned_bytes_max"), ring_bytes)
        self.limits = StoreLimits(**{"max_entries": 1000, **defaults, **limits})
        super().__init__(ring_bytes, IndexGeometry.for_entries(self.limits.max_entries, namespaces_max))
        self.policy = policy
        self.requests = 10_000
        self.ready_bytes = ring_bytes if grown_bytes is None else grown_bytes
        self._begin(IndexWriter.create(self.geometry, self.index_bytes), epoch)
        if self.ready_bytes < ring_bytes:
            self.grow(self.ready_bytes, more=True)

    def _begin(self, index: IndexWriter, epoch: int) -> None:
        """A daemon begins, with nothing under way and no client."""
        self.epoch = epoch
        self.index = index
        memory = StoreMemory(
            index, memoryview(self.index_bytes), self.geometry, memoryview(self.bytes), self.ready_bytes
        )
        quotas = Quotas({}, own_uid=0)
        self.store = Store(memory, self.policy, self.limits, epoch, seed=epoch, quotas=quotas)
        self.forget_work()
        self.holds: HostHolds | None = None
        self.answers: dict[int, list[Any]] = {}
        self.refused: dict[int, dict[int, messages.PutRefused]] = {}
        """By client and number of the record."""
        self.records: dict[int, int] = {}
        """The number of each client's last record."""
        self.places: dict[int, list[Place]] = {}
        """Places that a client has."""
        self.told: list[dict[str, Any]] = []

    def restart(self, *clients: int, settles: bool = True) -> None:
        """The next daemon takes the memory over. Views stay; what was under way is lost."""
        starts = sorted(page * PAGE_BYTES for page in self.gone if page * PAGE_BYTES < self.ready_bytes)
        self._begin(IndexWriter(self.index_bytes, self.geometry), self.epoch + 1)
        for _ in self.store.recover(self.now, [(start, PAGE_BYTES) for start in starts]):
            pass
        self.grow(self.ready_bytes, more=self.ready_bytes < len(self.bytes))
        self.join(*clients)
        if settles:
            self.settle()

    # ---- one step at a time

    def do(self, event: Event) -> None:
        self.take(self.store.handle(event, self.now))

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(client, message):
                    assert client in self.answers, "an answer to a client that left"
                    self.answers[client].append(message)
                    if isinstance(message, messages.PutRefused):
                        assert message.number not in self.refused[client], "refused twice"
                        self.refused[client][message.number] = message
                    elif isinstance(message, messages.GrantsLent):
                        self._lent(client, message)
                case HostHolds():
                    self.holds = effect
                case Announce(body):
                    self.told.append(body)
                case Received():
                    self.do(effect)
                case _:
                    self.take_memory(effect)

    def join(self, *clients: int, uid: int | None = None) -> None:
        """Clients that write into the ring, each of a uid of its own if none is given."""
        for client in clients:
            self.answers[client], self.refused[client], self.places[client] = [], {}, []
            self.records[client] = 0
            self.do(ClientJoined(client, 1000 + client if uid is None else uid))
            self.do(WritesInPlace(client))

    def leave(self, client: int) -> list[View]:
        """Returns the pins of the places that the client had: its process may still write there."""
        del self.answers[client], self.refused[client]
        views = [place.view for place in self.places.pop(client)]
        self.do(ClientLeft(client))
        return views

    def send(self, client: int, message: Any) -> None:
        self.do(Received(client, message))

    def settle(self) -> None:
        """Carries out whatever is under way, until nothing is."""
        self.go_on()
        while self.moves or self.scans or self.punches or self.allocations or self.remote_waits:
            while self.moves:
                self.move()
            self.settle_remote()
            if self.scans:
                self.scan()
            if self.punches:
                self.punch()
            if self.allocations:
                self.allocate()
            self.go_on()

    def go_on(self) -> None:
        """Ticks, for as long as the store wants to go on at once."""
        for _ in range(1000):
            timer = self.store.next_timer()
            if timer is None or timer > self.now:
                return
            self.do(Tick())
        raise AssertionError("it goes on for ever")

    def press(self, resident_bytes_max: int | None = None, **more: Any) -> None:
        """The governor says so; and all that follows from it at once."""
        self.do(Pressed(resident_bytes_max, **more))
        self.settle()

    def pass_time(self, seconds: float) -> None:
        """Time passes; Ticks come when they are due, scans are carried out at once."""
        end = self.now + seconds
        while True:
            self.settle()
            timer = self.store.next_timer()
            if timer is None or timer > end:
                break
            self.now = max(self.now, timer)
            self.do(Tick())
        self.now = end

    def grow(self, ring_bytes: int, *, more: bool) -> None:
        self.ready_bytes = ring_bytes
        self.do(RingGrown(ring_bytes, more))

    # ---- what clients do

    def next_request(self) -> int:
        self.requests += 1
        return self.requests

    def ask(self, client: int, *payload_bytes: int, returned: Sequence[Place] = ()) -> int:
        """Asks for places of such payloads. Returns the request's number."""
        request = self.next_request()
        self.give_up(client, returned)
        sizes, numbers = [span_bytes(size) for size in payload_bytes], [place.grant for place in returned]
        self.send(client, messages.AskForGrants(request, sizes, numbers))
        return request

    def give_up(self, client: int, places: Sequence[Place]) -> None:
        """Nothing more is written there by the client, and it releases its pins."""
        for place in places:
            self.places[client].remove(place)
            self.release(place.view)

    def _lent(self, client: int, answer: messages.GrantsLent) -> None:
        """The client pins what it is lent, and looks at the slots."""
        for grant, offset, size, span_id, slot, seq in answer.places():
            found = self.index.read(slot)
            assert (found.span_id, found.seq) == (span_id, seq)
            view = View(span_id, offset + SPAN_HEADER_BYTES, b"")
            self.places[client].append(Place(grant, offset, size, view))
            self.views.append(view)

    def answered(self, client: int, request: int) -> messages.GrantsLent | None:
        asked = (a for a in self.answers[client] if isinstance(a, messages.GrantsLent) and a.id == request)
        return next(asked, None)

    def write(self, place: Place, content: bytes) -> None:
        self.touch(place.offset, SPAN_HEADER_BYTES + len(content))
        start = place.offset + SPAN_HEADER_BYTES
        self.bytes[start : start + len(content)] = content
        place.view.content = content

    def record(
        self,
        client: int,
        place: Place,
        key: bytes,
        *,
        tree: int = 16,
        tokens: int = 0,
        ttl_s: float | None = None,
        cost_ms: float = 0.0,
        parent: bytes | None = None,
        claim: int | None = None,
        prefix: int = 0,
        agent: int = 0,
    ) -> bytes:
        """The client's next record, of what it has written into a place. What is left of the place stays its own."""
        self.records[client] += 1
        record = RECORD.pack(
            self.records[client], key, place.offset, len(place.view.content), 1, claim or 0, parent or NO_KEY, cost_ms,
            ttl_s or 0.0, place.grant, min(tree, len(place.view.content)), tokens, prefix, agent, 0,
        )  # fmt: skip
        used = span_bytes(len(place.view.content))
        place.offset, place.size = place.offset + used, place.size - used
        place.view.offset, place.view.content = place.offset + SPAN_HEADER_BYTES, b""
        if not place.size:
            self.give_up(client, [place])
        return record

    def submit(self, client: int, *records: bytes, errors: dict[int, TensordError] | None = None) -> None:
        """The daemon takes records out of the client's queue. `errors`: as for `Store.submitted`."""
        batch = memoryview(bytearray(b"".join(records)))
        last, effects = self.store.submitted(client, batch, self.now, errors or {})
        assert last == self.records[client]
        self.take(effects)

    def put(self, number: int | bytes, payload_bytes: int | bytes = 64, client: int = 1, **more: Any) -> str:
        """A whole put of key `number`, or of a whole key: "stored", "existed", or the error's code."""
        name = key(number) if isinstance(number, int) else number
        size = payload_bytes if isinstance(payload_bytes, int) else len(payload_bytes)
        content = name[8:9] * size if isinstance(payload_bytes, int) else payload_bytes
        # The client returns what it has not used.
        request = self.ask(client, size, returned=self.places[client][:])
        self.settle()
        answer = self.answered(client, request)
        assert answer is not None, "the request still waits"
        if answer.error is not None:
            return answer.error.code
        (place,) = self.places[client]
        self.write(place, content)
        return self.finish(client, place, name, **more)

    def finish(self, client: int, place: Place, name: bytes, **more: Any) -> str:
        """Puts what is written in a place; all settles."""
        self.submit(client, self.record(client, place, name, **more))
        number = self.records[client]
        self.settle()
        return self.outcome(client, number)

    def begin(self, client: int, payload_bytes: int = 64) -> Place:
        """A put for which the client has a place, and no record yet."""
        answer = self.answered(client, self.ask(client, payload_bytes))
        assert answer is not None and answer.error is None
        return self.places[client][-1]

    def outcome(self, client: int, number: int) -> str:
        """How the put with a record ended: "stored", "existed", or the error's code."""
        refused = self.refused[client].get(number)
        if refused is None:
            return "stored"
        return "existed" if refused.error is None else refused.error.code

    def put_block(self, block: Block, client: int = 1, **more: Any) -> str:
        about = {"prefix": len(block.packed), "parent": block.record.parent, "tree": TREE_BYTES, **more}
        return self.put(block.key, block.payload, client, **about)

    def put_sequence(self, *words: int, **more: Any) -> list[str]:
        """A block of each word, one after the other; their outcomes."""
        return [self.put_block(block(words[: end + 1]), **more) for end in range(len(words))]

    def evict(self, *numbers: int | bytes, client: int = 1) -> None:
        """The client evicts these keys by name; all settles."""
        names = [key(each) if isinstance(each, int) else each for each in numbers]
        self.send(client, messages.Evict(self.next_request(), names))
        self.settle()

    def match(self, *words: int, client: int = 1, agent: str = "") -> messages.Matched | None:
        """What is cached of a sequence of these words with a token behind it; None while a new daemon does not know."""
        tokens: Tokens = np.append(text(words), np.uint32(999_999))
        record: PrefixRecord = query(tokens)
        request = self.next_request()
        self.do(PrefixAsked(client, messages.MatchPrefix(request, TAG, 0, record.record_bytes, agent), record, tokens))
        found = (a for a in self.answers[client] if isinstance(a, messages.Matched) and a.id == request)
        return next(found, None)

    def matched(self, *words: int) -> int:
        """How many blocks of these words are cached. Not a use of any."""
        tokens: Tokens = np.append(text(words), np.uint32(999_999))
        parts = self.store.parts
        found = parts.blocks.index.match(TAG, query(tokens), tokens)
        keys = [parts.slots.key(parts.table.slots[row]) for row in found.blocks]
        assert keys == [name(words[: end + 1]) for end in range(len(keys))]
        assert all(self.find(key) is not None for key in keys), "matched, and not to be found"
        assert found.offset == BLOCK * len(found.blocks)
        return len(found.blocks)

    def last(self, client: int = 1) -> Any:
        return self.answers[client][-1]

    # ---- what readers do

    def pin(self, number: int | bytes) -> View:
        """A lease on key `number`, or on a whole key."""
        view = self.find(key(number) if isinstance(number, int) else number)
        assert view is not None, f"{number!r} is not there"
        self.views.append(view)
        return view

    def release(self, view: View) -> None:
        self.views.remove(view)

    def use(self, *numbers: int | bytes) -> None:
        """Readers read these keys, and it is reported."""
        found = [self.find(key(each) if isinstance(each, int) else each) for each in numbers]
        self.do(Accessed([view.span_id for view in found if view is not None]))

    def stored(self) -> set[int]:
        """The numbers of all keys that a reader finds."""
        return {_NUMBERS[slot.key] for slot in self.index.slots() if slot.published and slot.key in _NUMBERS}

    @property
    def used_bytes(self) -> int:
        """The ring's bytes that are not free."""
        return self.store.parts.runway.places.used_bytes

    def check(self) -> None:
        """No view has changed, and the store is sound."""
        for view in self.views:
            if view.content:
                self.touch(view.offset, len(view.content))
            now = bytes(self.bytes[view.offset : view.offset + len(view.content)])
            assert now == view.content, "a pinned span was reused"
        self.store.check_invariants()
        status = self.store.status()
        assert status["withdrawn_bytes"] == len(self.gone) * PAGE_BYTES
        assert status["resident_bytes"] + status["withdrawn_bytes"] == self.store.parts.holes.capacity_bytes
        assert status["used_bytes"] == self.used_bytes
        for slot in self.index.slots():
            if slot.published:
                self.touch(slot.offset, span_bytes(slot.payload_bytes))


def with_clients(*args: Any, **more: Any) -> Stand:
    """A store with the clients 1, 2 and 3."""
    stand = Stand(*args, **more)
    stand.join(1, 2, 3)
    return stand
