"""The whole store at random: clients, readers, moves, scans, pages and restarts in any order, with real bytes under the
views."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tensord.daemon.core.events import Accessed, FoundCorrupt, LimitsChanged, RemoteFound, Tick
from tensord.daemon.core.host_memory import Pressed
from tensord.daemon.replacement import POLICIES
from tensord.errors import BadTree, TierUnavailable
from tensord.ipc.messages import control as messages
from tensord.shm.ring.layout import PAGE_BYTES, span_bytes

from .blocks import TAG, TREE_BYTES, block, name
from .stand import Place, Stand, View, key

RING_BYTES = 16 * PAGE_BYTES
CELL = 1600
ENTRIES_MAX, TOKENS_MAX = 9, 20
NUMBERS = st.integers(0, 9)
WORDS = st.lists(st.integers(1, 2), min_size=1, max_size=3)
SEQUENCES = {words: name(words) for length in (1, 2, 3) for words in product((1, 2), repeat=length)}
LIMITS: dict[str, Any] = {
    "max_entries": ENTRIES_MAX,
    "max_tokens": TOKENS_MAX,
    "object_bytes_max": 48_000,
    "claims_per_client_max": 4,
    "claim_s": 5.0,
    "claim_s_max": 12.0,
    "pins_per_client_max": 2,
    "pin_s_max": 20.0,
    "pinned_bytes_max": 32_000,
    "remote_s": 4.0,
    "remote_writes": True,
    "remote_queue_bytes": 24_000,
}
REFUSALS = {"Invalidated", "ParentGone", "BadPrefix", "LimitReached", "StoreFull", "BadTree", "existed", "stored"}


class AnyOrder(RuleBasedStateMachine):
    """Keys 0 to 4 are of one namespace, 5 to 9 of another; a third has sequences of up to three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.clients = 0
        self.byte = 0
        self.queues: dict[int, list[tuple[bytes, bytes, bytes]]] = {}
        """Records that the daemon has not taken, with their keys and payloads."""
        self.asked: set[tuple[int, int]] = set()
        self.strays: list[View] = []
        """Pins of clients that the daemon does not know any more, and that may still write."""
        self.contents: dict[int, bytes] = {}
        self.most_bytes = RING_BYTES

    @initialize(policy=st.sampled_from(list(POLICIES)), grown=st.sampled_from([4 * PAGE_BYTES, RING_BYTES]))
    def start(self, policy: str, grown: int) -> None:
        self.stand = Stand(RING_BYTES, policy=policy, grown_bytes=grown, **LIMITS)

    # ---- clients

    def key(self, number: int) -> bytes:
        """As whoever knows the generation now has it."""
        tag = b"first ns" if number < 5 else b"other ns"
        return key(number, tag, self.stand.index.generations.current(tag))

    def some_client(self, data: st.DataObject) -> int:
        if not self.stand.answers:
            self.join(None)
        return data.draw(st.sampled_from(sorted(self.stand.answers)))

    def send(self, data: st.DataObject, make: Any, *args: Any) -> int:
        """A message of some client. What it has put before is carried out first."""
        client = self.some_client(data)
        self.take_all(client)
        self.stand.send(client, make(self.stand.next_request(), *args))
        return client

    @precondition(lambda self: len(self.stand.answers) < 3)
    @rule(uid=st.sampled_from([None, 7]))
    def join(self, uid: int | None) -> None:
        self.clients += 1
        self.queues[self.clients] = []
        self.stand.join(self.clients, uid=uid)

    @precondition(lambda self: self.stand.answers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        client = self.some_client(data)
        self.take_all(client)
        del self.queues[client]
        self.strays += self.stand.leave(client)
        self.asked = {each for each in self.asked if each[0] != client}

    @precondition(lambda self: self.strays)
    @rule(data=st.data(), writes=st.booleans())
    def client_without_a_connection_writes_or_dies(self, data: st.DataObject, writes: bool) -> None:
        view = data.draw(st.sampled_from(self.strays))
        if writes and view.content:
            self.byte = self.byte % 250 + 1
            view.content = bytes([self.byte]) * len(view.content)
            self.stand.bytes[view.offset : view.offset + len(view.content)] = view.content
        else:
            self.strays.remove(view)
            self.stand.release(view)

    @rule(data=st.data(), cells=st.lists(st.integers(1, 24), min_size=1, max_size=3), returns=st.booleans())
    def client_asks_for_places(self, data: st.DataObject, cells: list[int], returns: bool) -> None:
        client = self.some_client(data)
        self.take_all(client)
        returned = self.stand.places[client][:] if returns else []
        sizes = [each * CELL for each in cells]
        self.asked.add((client, self.stand.ask(client, *sizes, returned=returned)))

    @precondition(lambda self: any(self.stand.places.values()))
    @rule(data=st.data())
    def client_returns_places(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from([client for client, places in self.stand.places.items() if places]))
        self.take_all(client)
        places = data.draw(st.lists(st.sampled_from(self.stand.places[client]), unique=True))
        self.stand.give_up(client, places)
        self.stand.send(client, messages.ReturnGrants([place.grant for place in places]))

    def place(self, client: int, size: int) -> Place | None:
        """The smallest place of a client that is large enough."""
        fits = [place for place in self.stand.places[client] if place.size >= span_bytes(size)]
        return min(fits, key=lambda place: place.size, default=None)

    @rule(data=st.data(), cells=st.integers(1, 9))
    def client_writes(self, data: st.DataObject, cells: int) -> None:
        """It may leave it at that: an exception in the middle of a put."""
        client = self.some_client(data)
        place = self.place(client, cells * CELL)
        if place is not None:
            self.byte = self.byte % 250 + 1
            self.stand.write(place, bytes([self.byte]) * cells * CELL)

    def add(self, client: int, name: bytes, payload: bytes, **about: Any) -> bool:
        """A client adds a record to its queue; whether it has a place."""
        place = self.place(client, len(payload))
        if place is None:
            return False
        self.stand.write(place, payload)
        self.queues[client].append((self.stand.record(client, place, name, **about), name, payload))
        return True

    def put(self, data: st.DataObject, number: int, cells: int, settles: bool, **about: Any) -> None:
        """A put; a client without a place asks for one. A third of the entries is worth its write to the remote
        store at once."""
        client = self.some_client(data)
        self.byte = self.byte % 250 + 1
        payload = bytes([self.byte]) * (cells * CELL)
        about = {"cost_ms": float(number % 3 == 0), **about}
        if not self.add(client, self.key(number), payload, **about) and settles:
            self.take_all(client)
            self.asked.add((client, self.stand.ask(client, len(payload), returned=self.stand.places[client][:])))
            self.stand.settle()
            self.add(client, self.key(number), payload, **about)
        if settles:
            self.take_all(client)
            self.stand.settle()

    @rule(
        data=st.data(),
        number=NUMBERS,
        cells=st.integers(1, 24),
        tokens=st.integers(0, 25),
        ttl_s=st.sampled_from([None, None, 3.0, 50.0]),
        under_claim=st.booleans(),
        parent=st.none() | NUMBERS,
        settles=st.booleans(),
    )
    def client_puts(
        self,
        data: st.DataObject,
        number: int,
        cells: int,
        tokens: int,
        ttl_s: float | None,
        under_claim: bool,
        parent: int | None,
        settles: bool,
    ) -> None:
        held = [token for answers in self.stand.answers.values() for token in tokens_of(answers)]
        claim = held[-1] if under_claim and held else None
        above = None if parent is None else self.key(parent)
        self.put(data, number, cells, settles, tokens=tokens, ttl_s=ttl_s, claim=claim, parent=above)

    @rule(data=st.data(), cells=st.integers(1, 5), settles=st.booleans())
    def puts_fill_the_store(self, data: st.DataObject, cells: int, settles: bool) -> None:
        for number in range(9):
            self.put(data, number, cells, settles)

    @rule(data=st.data(), numbers=st.permutations(range(5)), length=st.integers(2, 4), settles=st.booleans())
    def put_chain(self, data: st.DataObject, numbers: list[int], length: int, settles: bool) -> None:
        parent = None
        for number in numbers[:length]:
            self.put(data, number, 1, settles, parent=parent)
            parent = self.key(number)

    @rule(data=st.data(), words=WORDS, tokens=st.integers(0, 6), damaged=st.integers(0, 9))
    def put_sequence(self, data: st.DataObject, words: list[int], tokens: int, damaged: int) -> None:
        client = self.some_client(data)
        for end in range(len(words)):
            put = block(words[: end + 1])
            if self.place(client, len(put.payload)) is None:
                self.take_all(client)
                self.stand.ask(client, 4 * CELL)
                self.stand.settle()
            payload = put.payload[:-4] if damaged == 9 else put.payload
            about = {"prefix": len(put.packed), "parent": put.record.parent, "tree": TREE_BYTES}
            self.add(client, put.key, payload, tokens=tokens, **about)

    # ---- the daemon takes records

    @precondition(lambda self: any(self.queues.values()))
    @rule(data=st.data(), most=st.integers(1, 4), damaged=st.integers(0, 9))
    def daemon_takes_records(self, data: st.DataObject, most: int, damaged: int) -> None:
        client = data.draw(st.sampled_from([client for client, queue in self.queues.items() if queue]))
        self.take(client, most, damaged=damaged == 9)

    def take_all(self, client: int) -> None:
        self.take(client, len(self.queues[client]))

    def take(self, client: int, most: int, damaged: bool = False) -> None:
        """`damaged`: the payload of the first one could not be copied out of an inbox."""
        stand, taken = self.stand, self.queues[client][:most]
        if not taken:
            return
        del self.queues[client][:most]
        first = stand.records[client] - len(taken) - len(self.queues[client]) + 1
        written = stand.records[client]
        stand.records[client] = first + len(taken) - 1
        records = [record for record, _, _ in taken]
        if damaged:
            records[0] = records[0][:124] + bytes(4) + records[0][128:]
        before = {named: stand.find(named) for _, named, _ in taken}
        stand.submit(client, *records, errors={first: BadTree("no tree")} if damaged else None)
        stand.records[client] = written
        for number, (_, named, payload) in enumerate(taken, first):
            outcome = stand.outcome(client, number)
            assert outcome in REFUSALS, outcome
            view = stand.find(named)
            if outcome == "stored" and before[named] is None and view is not None:
                # The same batch may have held the key twice.
                assert view.content in [other for _, same, other in taken if same == named]
                assert payload

    # ---- readers

    @rule(data=st.data(), words=WORDS)
    def match(self, data: st.DataObject, words: list[int]) -> None:
        client = self.some_client(data)
        self.take_all(client)
        found = self.stand.match(*words, client=client)
        if found is None:
            assert self.stand.store.parts.blocks.rebuilding
            return
        there = [self.stand.find(name(words[: end + 1])) is not None for end in range(len(words))]
        assert found.blocks == [name(words[: end + 1]) for end in range(sum(there))]

    @rule(of=NUMBERS | WORDS)
    def reader_pins(self, of: int | list[int]) -> None:
        view = self.stand.find(self.key(of) if isinstance(of, int) else name(of))
        if view is not None:
            self.stand.views.append(view)
            self.stand.do(Accessed([view.span_id, 77]))

    @precondition(lambda self: self.stand.seen is None)
    @rule(data=st.data())
    def reader_pins_what_is_hidden(self, data: st.DataObject) -> None:
        """It was found before it was hidden; the lanes have not been read since."""
        parts = self.stand.store.parts
        if rows := sorted(parts.spans.hidden.values()):
            row = data.draw(st.sampled_from(rows))
            start, size = parts.table.offsets[row] + 192, parts.table.payloads[row]
            content = bytes(self.stand.bytes[start : start + size])
            self.stand.views.append(View(parts.table.span_ids[row], start, content))

    @precondition(lambda self: self.readers())
    @rule(data=st.data())
    def reader_releases(self, data: st.DataObject) -> None:
        self.stand.release(data.draw(st.sampled_from(self.readers())))

    def readers(self) -> list[View]:
        writers = {place.view for places in self.stand.places.values() for place in places}
        return [view for view in self.stand.views if view not in writers and view not in self.strays]

    # ---- requests

    @rule(data=st.data(), number=NUMBERS, within_s=st.sampled_from([0.0, 3.0]))
    def claim(self, data: st.DataObject, number: int, within_s: float) -> None:
        self.send(data, messages.RequestClaim, self.key(number), within_s)

    @rule(data=st.data(), abandon=st.booleans(), never=st.booleans())
    def renew_or_abandon(self, data: st.DataObject, abandon: bool, never: bool) -> None:
        client = self.some_client(data)
        if tokens := tokens_of(self.stand.answers[client]):
            error = messages.ErrorBody("ObjectTooLarge", "too large") if never else None
            self.take_all(client)
            self.stand.send(client, messages.Abandon(tokens[-1], error) if abandon else messages.Renew(tokens))

    @rule(data=st.data(), numbers=st.lists(NUMBERS, max_size=4), words=st.none() | WORDS, evict=st.booleans())
    def evict_or_touch(self, data: st.DataObject, numbers: list[int], words: list[int] | None, evict: bool) -> None:
        keys = [self.key(number) for number in numbers] + ([] if words is None else [name(words)])
        client = self.send(data, messages.Evict if evict else messages.Touch, keys)
        # Requests for places that waited may be served next, since entries have gone.
        answer = [each for each in self.stand.answers[client] if isinstance(each, messages.Counted)][-1]
        assert answer.count <= len(set(keys))
        if evict:
            assert all(self.stand.find(each) is None for each in keys)

    @precondition(lambda self: self.byte % 5 == 0)
    @rule(data=st.data(), of=st.sampled_from(["all", "first ns", "prefixes"]))
    def clear(self, data: st.DataObject, of: str) -> None:
        if of == "prefixes":
            self.send(data, messages.EvictPrefixes, TAG)
            assert not any(self.stand.find(each) for each in SEQUENCES.values())
            return
        self.send(data, messages.Clear, None if of == "all" else of.encode())
        gone = range(10) if of == "all" else range(5)
        assert all(self.stand.find(self.key(number)) is None for number in gone)

    @precondition(lambda self: self.byte % 5 == 0)
    @rule(data=st.data(), generation=st.integers(0, 3))
    def invalidate(self, data: st.DataObject, generation: int) -> None:
        self.send(data, messages.Invalidate, b"first ns", generation)

    @rule(data=st.data(), of=NUMBERS | WORDS, unpin=st.booleans())
    def pin_by_message(self, data: st.DataObject, of: int | list[int], unpin: bool) -> None:
        wanted = self.key(of) if isinstance(of, int) else name(of)
        self.send(data, *((messages.Unpin, wanted) if unpin else (messages.Pin, wanted, 8.0)))

    @rule(data=st.data(), limit_bytes=st.sampled_from([16_000, 40_000, RING_BYTES, 99_999]))
    def limit(self, data: st.DataObject, limit_bytes: int) -> None:
        self.send(data, messages.Limit, limit_bytes)

    @rule(number=NUMBERS)
    def payload_is_found_corrupt(self, number: int) -> None:
        view = self.stand.find(self.key(number))
        if view is not None and self.byte % 5 == 0:
            self.stand.do(FoundCorrupt(view.span_id))
            assert self.stand.find(self.key(number)) is None

    # ---- the host

    @rule(
        pages=st.sampled_from([None, 16, 12, 7, 3, 0]),
        idle_s=st.sampled_from([None, None, 0.0, 5.0]),
        refuse=st.booleans(),
    )
    def pressed(self, pages: int | None, idle_s: float | None, refuse: bool) -> None:
        most = None if pages is None else pages * PAGE_BYTES - 64 * (pages % 2)
        self.stand.do(Pressed(most, idle_s, refuse and idle_s is not None, "the share" if refuse else ""))

    @rule()
    def pressure_is_gone(self) -> None:
        self.stand.do(Pressed())

    @precondition(lambda self: self.stand.punches)
    @rule(data=st.data())
    def pages_are_given_back(self, data: st.DataObject) -> None:
        self.stand.punch(data.draw(st.integers(0, len(self.stand.punches) - 1)))

    @precondition(lambda self: self.stand.allocations)
    @rule(short=st.booleans())
    def pages_are_asked_for(self, short: bool) -> None:
        self.stand.allocate(short=short)

    @precondition(lambda self: self.stand.moves)
    @rule(data=st.data(), fails=st.integers(0, 9))
    def move(self, data: st.DataObject, fails: int) -> None:
        at = data.draw(st.integers(0, len(self.stand.moves) - 1))
        self.stand.move(at, BadTree("no header") if fails == 9 else None)

    @precondition(lambda self: self.stand.scans and self.stand.seen is None)
    @rule()
    def lanes_are_read(self) -> None:
        self.stand.read_lanes()

    @precondition(lambda self: self.stand.scans)
    @rule()
    def scan(self) -> None:
        self.stand.scan()

    @rule()
    def all_settles(self) -> None:
        for client in self.queues:
            self.take_all(client)
        self.stand.settle()
        holds = self.stand.holds
        if holds is not None and not self.stand.store.parts.host_memory.residency.exchanging:
            assert holds.resident_bytes == self.stand.store.status()["resident_bytes"]

    @rule(seconds=st.sampled_from([0.0, 0.1, 2.0, 7.0]))
    def tick(self, seconds: float) -> None:
        self.stand.now += seconds
        self.stand.do(Tick())

    @precondition(lambda self: self.stand.ready_bytes < RING_BYTES)
    @rule()
    def grow(self) -> None:
        grown = self.stand.ready_bytes + 4 * PAGE_BYTES
        self.stand.grow(grown, more=grown < RING_BYTES)

    @precondition(lambda self: self.byte % 3 == 0)
    @rule(settles=st.booleans())
    def daemon_is_killed(self, settles: bool) -> None:
        """The next one takes over. Clients lose what is not settled, and may still write."""
        if settles:
            self.all_settles()
        stand = self.stand
        there = {slot.key: slot.span_id for slot in stand.index.slots() if slot.published}
        self.strays += [place.view for places in stand.places.values() for place in places]
        self.queues, self.asked = {}, set()
        stand.restart(settles=False)
        for each in there:
            past = stand.index.generations.is_past(each)
            assert past or stand.find(each) is not None, "a stored entry is lost"

    # ---- the remote store

    @precondition(lambda self: self.stand.remote_waits)
    @rule(data=st.data(), fails=st.integers(0, 5))
    def remote_store_answers(self, data: st.DataObject, fails: int) -> None:
        stand, error = self.stand, TierUnavailable("it is gone") if fails == 5 else None
        kinds: dict[str, Any] = {
            "seek": stand.seeks,
            "run": stand.runs,
            "read": stand.reads,
            "write": stand.writes,
            "generations": stand.generation_requests,
        }
        kind = data.draw(st.sampled_from([kind for kind, waiting in kinds.items() if waiting]))
        at = data.draw(st.integers(0, len(kinds[kind]) - 1))
        match kind:
            case "seek":
                stand.seek(at, error)
            case "run":
                stand.seek_run(error)
            case "read":
                stand.read_remote(at, error)
            case "write":
                stand.write_remote(at, error)
            case _:
                stand.answer_generations(error)

    @rule(data=st.data(), numbers=st.lists(NUMBERS, min_size=1, max_size=4), within_s=st.sampled_from([0.0, 30.0]))
    def fetch(self, data: st.DataObject, numbers: list[int], within_s: float) -> None:
        tag = b"first ns" if numbers[0] < 5 else b"other ns"
        self.send(data, messages.FetchRun, [key(number, tag) for number in numbers], within_s)

    @rule(number=NUMBERS, cells=st.integers(1, 24), parent=st.none() | NUMBERS, lives_s=st.sampled_from([None, 6.0]))
    def another_host_stores(self, number: int, cells: int, parent: int | None, lives_s: float | None) -> None:
        tag = b"first ns" if number < 5 else b"other ns"
        above = None if parent is None else key(parent, tag)
        self.stand.remote[key(number, tag)] = RemoteFound(cells * CELL, 16, lives_s=lives_s, parent=above)

    @precondition(lambda self: self.byte % 5 == 0)
    @rule(by=st.integers(-1, 2))
    def another_host_invalidates(self, by: int) -> None:
        """Or the store has lost its numbers."""
        known = self.stand.remote_generations.get(b"other ns", 0)
        self.stand.remote_generations[b"other ns"] = max(0, known + by)

    # ---- what holds at every moment

    @invariant()
    def nothing_pinned_is_reused_and_all_is_sound(self) -> None:
        if hasattr(self, "stand"):
            self.stand.check()

    @invariant()
    def no_child_is_shown_without_its_parent(self) -> None:
        if hasattr(self, "stand"):
            shown = {slot.key: slot for slot in self.stand.index.slots() if slot.published}
            for each, slot in shown.items():
                parent = self.stand.header(slot.offset).parent
                assert parent is None or parent in shown, each
            for words, each in SEQUENCES.items():
                assert each not in shown or len(words) == 1 or SEQUENCES[words[:-1]] in shown, words

    @invariant()
    def budgets_hold(self) -> None:
        if hasattr(self, "stand"):
            parts = self.stand.store.parts
            # Several puts in one place pass the limit, until the victims of the next round are known to be unpinned.
            if not (parts.spans.held or parts.spans.scanning or parts.spans.victims or parts.spans.scan_due):
                assert parts.tenants.total_entries <= ENTRIES_MAX
            # A lowered budget is passed until enough has gone; it is never passed by more than before.
            used = self.stand.used_bytes
            assert used <= max(parts.budget.max_bytes, self.most_bytes)
            self.most_bytes = used

    @invariant()
    def contents_belong_to_their_span(self) -> None:
        if not hasattr(self, "stand"):
            return
        for number in range(10):
            view = self.stand.find(self.key(number))
            if view is not None:
                assert len(set(view.content)) == 1, "published before all of it was there"
                assert self.contents.setdefault(view.span_id, view.content) == view.content

    @invariant()
    def requests_are_answered_once_and_with_what_was_asked_for(self) -> None:
        if hasattr(self, "stand"):
            for client, request in self.asked:
                answers = self.stand.answers[client]
                assert sum(isinstance(a, messages.GrantsLent) and a.id == request for a in answers) <= 1

    def teardown(self) -> None:
        if not hasattr(self, "stand"):
            return
        stand = self.stand
        while stand.ready_bytes < RING_BYTES:
            self.grow()
        stand.do(Pressed())
        for client in self.queues:
            self.take_all(client)
            self.give_back(client)
        # One that waits for its client to use what it has gets its turn once that is given back.
        for _ in range(10 + len(self.asked)):
            stand.pass_time(4)
            for client in self.queues:
                self.give_back(client)
        waiting = {each for each in self.asked if stand.answered(*each) is None}
        assert not waiting, "a request is never answered"
        for client in self.queues:
            self.give_back(client)
            stand.leave(client)
        stand.pass_time(40)
        stand.views.clear()
        status = stand.store.status()
        assert status["claims_held"] == status["pins"] == status["grants_waiting"] == 0
        stand.join(10_000)
        stand.send(10_000, messages.Limit(3, 16_000))
        stand.pass_time(10)
        assert stand.store.status()["resident_bytes"] <= 4 * PAGE_BYTES, (
            "more is in memory than may be, and nobody holds it"
        )
        stand.send(10_000, messages.Clear(1))
        stand.send(10_000, messages.Limit(2, RING_BYTES))
        stand.pass_time(100)
        assert not stand.gone, "a limit was lifted, and not all is back"
        assert stand.holds is not None and stand.holds.settled
        assert stand.holds.resident_bytes == stand.holds.wanted_bytes == RING_BYTES
        assert stand.used_bytes == 0 and stand.store.status()["lent_bytes"] == 0, "memory leaked"
        assert not any(slot.span_id for slot in stand.index.slots()), "a slot leaked"
        # A remote store would be asked for its generations for ever.
        stand.do(LimitsChanged(replace(stand.limits, remote_s=0.0)))
        assert stand.store.next_timer() is None
        stand.check()

    def give_back(self, client: int) -> None:
        places = self.stand.places[client][:]
        self.stand.give_up(client, places)
        self.stand.send(client, messages.ReturnGrants([place.grant for place in places]))


def tokens_of(answers: list[Any]) -> list[int]:
    """The tokens of the claims that a client got."""
    return [answer.token for answer in answers if isinstance(answer, messages.Claimed) and answer.token]


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
