"""The whole store at random: clients, readers, copies and scans in any order, with real bytes under the views."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, product
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tensord.daemon.core.entries import EntryState
from tensord.daemon.core.events import Accessed, LimitsChanged, RemoteFound, Tick
from tensord.daemon.core.host_memory import Pressed
from tensord.daemon.policy.registry import POLICIES
from tensord.errors import BadTree, TierUnavailable
from tensord.ipc import messages

from .blocks import TAG, block, name
from .stand import Stand, View, key

RING_BYTES = 4096
PAGE_BYTES = 256
NUMBERS = st.integers(0, 9)
WORDS = st.lists(st.integers(1, 2), min_size=1, max_size=3)
SEQUENCES = {words: name(words) for length in (1, 2, 3) for words in product((1, 2), repeat=length)}


class AnyOrder(RuleBasedStateMachine):
    """Keys 0 to 4 are of one namespace, 5 to 9 of another; a third has sequences of up to three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0
        self.clients = 0
        self.unsent: dict[tuple[int, int], int] = {}
        self.parts_sent: dict[tuple[int, int], int] = {}
        self.taken: dict[tuple[int, int], tuple[int, View | None]] = {}
        """TakeSpans with the size of the span, or of the payload that the client has written and pins."""
        self.commits: set[tuple[int, int]] = set()
        self.contents: dict[int, bytes] = {}
        self.most_bytes = RING_BYTES

    @initialize(policy=st.sampled_from(list(POLICIES)), grown=st.sampled_from([1024, RING_BYTES]))
    def start(self, policy: str, grown: int) -> None:
        self.stand = Stand(
            RING_BYTES,
            policy=policy,
            grown_bytes=grown,
            page_bytes=PAGE_BYTES,
            max_entries=7,
            max_tokens=20,
            object_bytes_max=3000,
            commits_in_flight_max=4,
            claims_per_client_max=4,
            claim_s=5,
            claim_s_max=12,
            pins_per_client_max=2,
            pin_s_max=20,
            pinned_bytes_max=2000,
            put_idle_s=30,
            announced_bytes_max=1500,
            announced_uid_bytes_max=2500,
            remote_s=4.0,
            remote_writes=True,
            remote_queue_bytes=1500,
        )
        self.grown = grown

    def key(self, number: int) -> bytes:
        """As whoever knows the generation now has it."""
        tag = b"first ns" if number < 5 else b"other ns"
        return key(number, tag, self.stand.index.generations.current(tag))

    def some_client(self, data: st.DataObject) -> int:
        if not self.stand.answers:
            self.join()
        return data.draw(st.sampled_from(sorted(self.stand.answers)))

    def ask(self, data: st.DataObject, make: Any, *args: Any) -> int:
        client = self.some_client(data)
        self.requests += 1
        self.stand.send(client, make(self.requests, *args))
        return client

    @precondition(lambda self: len(self.stand.answers) < 3)
    @rule()
    def join(self) -> None:
        self.clients += 1
        self.stand.join(self.clients)

    @precondition(lambda self: self.stand.answers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        client = self.some_client(data)
        tables: tuple[dict[tuple[int, int], Any], ...] = (self.unsent, self.parts_sent, self.taken)
        for table in tables:
            for request in [r for r in table if r[0] == client]:
                del table[request]
        self.commits = {request for request in self.commits if request[0] != client}
        self.stand.leave(client)

    @rule(
        data=st.data(),
        number=NUMBERS,
        payload_bytes=st.integers(1, 24).map(lambda cells: cells * 100),
        tokens=st.integers(0, 12),
        ttl_s=st.sampled_from([None, None, 3.0, 50.0]),
        under_claim=st.booleans(),
        parent=st.none() | NUMBERS,
    )
    def commit(
        self,
        data: st.DataObject,
        number: int,
        payload_bytes: int,
        tokens: int,
        ttl_s: float | None,
        under_claim: bool,
        parent: int | None,
    ) -> None:
        client = self.some_client(data)
        tokens_held = [
            answer.token
            for answer in self.stand.answers[client]
            if isinstance(answer, messages.Claimed) and answer.token
        ]
        claim = tokens_held[-1] if under_claim and tokens_held else None
        self.requests += 1
        request = (client, self.requests)
        self.commits.add(request)
        self.unsent[request] = payload_bytes
        self.parts_sent[request] = 0
        self.stand.commit(
            client,
            self.requests,
            self.key(number),
            payload_bytes,
            tokens=tokens,
            ttl_s=ttl_s,
            claim=claim,
            parent=None if parent is None else self.key(parent),
        )

    def put(
        self, data: st.DataObject, number: int, cells: int, tokens: int, pieces: int = 1, parent: int | None = None
    ) -> None:
        client = self.some_client(data)
        self.requests += 1
        self.commits.add((client, self.requests))
        self.parts_sent[client, self.requests] = pieces
        before, at = None if parent is None else self.key(parent), None if pieces else 0
        # A third of the entries is worth its write to the remote store at once.
        about: dict[str, Any] = {"tokens": tokens, "cost_ms": float(number % 3 == 0), "parent": before, "at": at}
        self.stand.commit(client, self.requests, self.key(number), cells * 100, **about)
        for piece in range(pieces):
            size = cells * 100 // pieces if piece < pieces - 1 else cells * 100 - cells * 100 // pieces * piece
            self.stand.part(client, self.requests, size, last=piece == pieces - 1)

    @rule(data=st.data(), number=NUMBERS, cells=st.integers(1, 24), tokens=st.integers(0, 6), pieces=st.integers(0, 1))
    def put_at_once(self, data: st.DataObject, number: int, cells: int, tokens: int, pieces: int) -> None:
        """With `pieces` of 0, the Commit says where the whole payload is."""
        self.put(data, number, cells, tokens, pieces)
        self.stand.settle()

    @rule(data=st.data(), number=NUMBERS, cells=st.integers(1, 9))
    def put_and_copy(self, data: st.DataObject, number: int, cells: int) -> None:
        self.put(data, number, cells, 0)
        self.stand.settle(copies=False)
        while self.stand.copies:
            self.stand.copy()

    @rule(data=st.data(), number=NUMBERS, cells=st.integers(1, 9), pieces=st.integers(0, 3))
    def put_is_sent(self, data: st.DataObject, number: int, cells: int, pieces: int) -> None:
        self.put(data, number, cells, 2, pieces)

    @rule(data=st.data(), cells=st.integers(1, 9), parent=st.none() | NUMBERS, ahead=st.booleans())
    def client_takes_a_span(self, data: st.DataObject, cells: int, parent: int | None, ahead: bool) -> None:
        client = self.some_client(data)
        self.requests += 1
        self.taken[client, self.requests] = (cells, None)
        name = None if parent is None else self.key(parent)
        self.stand.take_span(client, self.requests, cells * 100, ahead=ahead, parent=name)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def client_writes_into_its_span(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.taken)))
        cells, view = self.taken[request]
        if view is None and self.stand.taken(*request) is not None:
            less = data.draw(st.integers(1, cells))
            self.taken[request] = (less, self.stand.write(*request, less * 100))

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), number=NUMBERS, tokens=st.integers(0, 6), lets_go=st.booleans())
    def client_puts_its_span(self, data: st.DataObject, number: int, tokens: int, lets_go: bool) -> None:
        request = data.draw(st.sampled_from(sorted(self.taken)))
        cells, view = self.taken.pop(request)
        if view is not None and lets_go:
            self.let_go(view)
        client, span = request
        if view is None:
            self.stand.send(client, messages.ReturnSpan(span))
            return
        self.requests += 1
        self.commits.add((client, self.requests))
        self.parts_sent[client, self.requests] = 0
        self.stand.put_span(client, self.requests, self.key(number), cells * 100, span=span, tokens=tokens)

    @rule(data=st.data(), words=WORDS, tokens=st.integers(0, 6), settles=st.booleans(), pieces=st.integers(1, 2))
    def put_block(self, data: st.DataObject, words: list[int], tokens: int, settles: bool, pieces: int) -> None:
        client = self.some_client(data)
        put = block(words)
        self.requests += 1
        self.commits.add((client, self.requests))
        self.parts_sent[client, self.requests] = pieces
        self.stand.records[put.key] = put.packed
        self.stand.send(client, put.commit(self.requests, tokens=tokens))
        for at in range(pieces):
            self.stand.part(client, self.requests, put.payload_bytes // pieces, last=at == pieces - 1)
        if settles:
            self.stand.settle()

    @rule(data=st.data(), words=WORDS, settles=st.booleans())
    def put_sequence(self, data: st.DataObject, words: list[int], settles: bool) -> None:
        for end in range(len(words)):
            self.put_block(data, words[: end + 1], 0, settles, 1)

    @rule(data=st.data(), numbers=st.permutations(range(5)), length=st.integers(2, 4), settles=st.booleans())
    def put_chain(self, data: st.DataObject, numbers: list[int], length: int, settles: bool) -> None:
        parent = None
        for number in numbers[:length]:
            self.put(data, number, 1, 0, parent=parent)
            parent = number
            if settles:
                self.stand.settle()

    @rule(data=st.data(), words=WORDS)
    def match(self, data: st.DataObject, words: list[int]) -> None:
        found = self.stand.match(*words, client=self.some_client(data))
        assert isinstance(found, messages.Matched)
        there = [self.stand.find(name(words[: end + 1])) is not None for end in range(len(words))]
        assert found.blocks == [name(words[: end + 1]) for end in range(sum(there))]

    @rule(words=WORDS)
    def reader_pins_a_block(self, words: list[int]) -> None:
        view = self.stand.find(name(words))
        if view is not None:
            self.stand.views.append(view)

    @rule(data=st.data(), words=WORDS, pin=st.booleans())
    def evict_or_pin_a_block(self, data: st.DataObject, words: list[int], pin: bool) -> None:
        if pin:
            self.ask(data, messages.Pin, name(words), 8.0)
        else:
            self.ask(data, messages.Evict, [name(words)])
            assert self.stand.matched(*words) < len(words)

    @precondition(lambda self: self.requests % 5 == 0)
    @rule(data=st.data())
    def evict_prefixes(self, data: st.DataObject) -> None:
        client = self.ask(data, messages.EvictPrefixes, TAG)
        assert isinstance(self.stand.last(client), messages.Counted)
        assert not any(self.stand.find(key) for key in SEQUENCES.values())

    @precondition(lambda self: self.stand.scans == 0)
    @rule(data=st.data(), cells=st.integers(3, 9))
    def puts_fill_the_store(self, data: st.DataObject, cells: int) -> None:
        for number in range(7):
            self.put(data, number, cells, 0)
            self.stand.settle()

    @rule(data=st.data(), number=NUMBERS, cells=st.integers(2, 9))
    def put_fails_in_the_middle(self, data: st.DataObject, number: int, cells: int) -> None:
        copies = len(self.stand.copies)
        self.put(data, number, cells, 1, pieces=3)
        if len(self.stand.copies) > copies:
            self.stand.copy(copies, BadTree("no tree"))

    @precondition(lambda self: self.unsent)
    @rule(data=st.data(), share=st.sampled_from([0.3, 1, 1, 1]), wrong=st.integers(0, 30))
    def part(self, data: st.DataObject, share: float, wrong: int) -> None:
        client, number = data.draw(st.sampled_from(sorted(self.unsent)))
        left = self.unsent[client, number]
        size = max(1, int(left * share))
        self.unsent[client, number] -= size
        last = size == left
        if last:
            del self.unsent[client, number]
        self.parts_sent[client, number] += 1
        self.stand.part(client, number, size, last=last != (wrong == 30))

    @precondition(lambda self: self.stand.copies)
    @rule(data=st.data(), fails=st.integers(0, 9))
    def copy(self, data: st.DataObject, fails: int) -> None:
        at = data.draw(st.integers(0, len(self.stand.copies) - 1))
        self.stand.copy(at, BadTree("no tree") if fails == 9 else None)

    @precondition(lambda self: self.stand.seeks)
    @rule(data=st.data(), fails=st.integers(0, 5))
    def remote_store_answers(self, data: st.DataObject, fails: int) -> None:
        at = data.draw(st.integers(0, len(self.stand.seeks) - 1))
        self.stand.seek(at, TierUnavailable("it is gone") if fails == 5 else None)

    @rule(data=st.data(), numbers=st.lists(NUMBERS, min_size=1, max_size=4), within_s=st.sampled_from([0.0, 30.0]))
    def fetch(self, data: st.DataObject, numbers: list[int], within_s: float) -> None:
        tag = b"first ns" if numbers[0] < 5 else b"other ns"
        self.ask(data, messages.FetchRun, [key(number, tag) for number in numbers], within_s)

    @precondition(lambda self: self.stand.runs)
    @rule(fails=st.integers(0, 5))
    def remote_store_answers_a_run(self, fails: int) -> None:
        self.stand.seek_run(TierUnavailable("it is gone") if fails == 5 else None)

    @precondition(lambda self: self.stand.writes)
    @rule(data=st.data(), fails=st.integers(0, 5))
    def remote_store_takes_a_write(self, data: st.DataObject, fails: int) -> None:
        at = data.draw(st.integers(0, len(self.stand.writes) - 1))
        self.stand.write_remote(at, TierUnavailable("it is gone") if fails == 5 else None)

    @rule(number=NUMBERS, cells=st.integers(1, 24), parent=st.none() | NUMBERS, lives_s=st.sampled_from([None, 6.0]))
    def another_host_stores(self, number: int, cells: int, parent: int | None, lives_s: float | None) -> None:
        tag = b"first ns" if number < 5 else b"other ns"
        above = None if parent is None else key(parent, tag)
        self.stand.remote[key(number, tag)] = RemoteFound(cells * 100, 16, lives_s=lives_s, parent=above)

    @precondition(lambda self: self.stand.generation_requests)
    @rule(fails=st.integers(0, 5))
    def remote_store_answers_about_generations(self, fails: int) -> None:
        self.stand.answer_generations(TierUnavailable("it is gone") if fails == 5 else None)

    @precondition(lambda self: self.requests % 5 == 0)
    @rule(by=st.integers(-1, 2))
    def another_host_invalidates(self, by: int) -> None:
        """Or the store has lost its numbers."""
        known = self.stand.remote_generations.get(b"other ns", 0)
        self.stand.remote_generations[b"other ns"] = max(0, known + by)

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

    @rule(number=NUMBERS)
    def reader_pins(self, number: int) -> None:
        view = self.stand.find(self.key(number))
        if view is not None:
            self.stand.views.append(view)
            self.stand.do(Accessed([view.span_id, 77]))

    @precondition(lambda self: len(self.stand.store.memory.policy) > 0 and self.stand.seen is None)
    @rule()
    def reader_pins_the_coldest(self) -> None:
        memory = self.stand.store.memory
        victims = (entry.span_id for entry in memory.unpublished() if entry.state is EntryState.VICTIM)
        coldest = next(chain(memory.policy.coldest(), victims), None)
        view = self.stand.find_span(coldest) if coldest is not None else None
        if view is not None:
            # If it is a victim by now, it was found before it was hidden; the lanes have not been read since.
            self.stand.views.append(view)

    @precondition(lambda self: self.stand.views)
    @rule(data=st.data())
    def reader_releases(self, data: st.DataObject) -> None:
        view = self.stand.views[data.draw(st.integers(0, len(self.stand.views) - 1))]
        if not any(view is written for _, written in self.taken.values()):
            self.let_go(view)

    def let_go(self, view: View) -> None:
        self.stand.views = [other for other in self.stand.views if other is not view]

    @rule(data=st.data(), number=NUMBERS, within_s=st.sampled_from([0.0, 3.0]))
    def claim(self, data: st.DataObject, number: int, within_s: float) -> None:
        self.ask(data, messages.RequestClaim, self.key(number), within_s)

    @rule(data=st.data(), abandon=st.booleans())
    def renew_or_abandon(self, data: st.DataObject, abandon: bool) -> None:
        client = self.some_client(data)
        tokens = [
            answer.token
            for answer in self.stand.answers[client]
            if isinstance(answer, messages.Claimed) and answer.token
        ]
        if tokens:
            error = messages.ErrorBody("ObjectTooLarge", "too large") if data.draw(st.booleans()) else None
            message = messages.Abandon(tokens[-1], error) if abandon else messages.Renew(tokens)
            self.stand.send(client, message)

    @rule(data=st.data(), numbers=st.lists(NUMBERS, max_size=4), evict=st.booleans())
    def evict_or_touch(self, data: st.DataObject, numbers: list[int], evict: bool) -> None:
        there = {n for n in numbers if self.stand.find(self.key(n)) is not None}
        keys = [self.key(number) for number in numbers]
        client = self.ask(data, messages.Evict if evict else messages.Touch, keys)
        answer = self.stand.last(client)
        assert isinstance(answer, messages.Counted)
        assert len(there) <= answer.count <= len(set(numbers))
        if evict:
            assert all(self.stand.find(self.key(number)) is None for number in numbers)

    @precondition(lambda self: self.requests % 7 == 0)
    @rule(data=st.data(), tag=st.sampled_from([None, b"first ns"]))
    def clear(self, data: st.DataObject, tag: bytes | None) -> None:
        client = self.ask(data, messages.Clear, tag)
        assert isinstance(self.stand.last(client), messages.Counted)
        gone = range(10) if tag is None else range(5)
        assert all(self.stand.find(self.key(number)) is None for number in gone)

    @precondition(lambda self: self.requests % 5 == 0)
    @rule(data=st.data(), generation=st.integers(0, 3))
    def invalidate(self, data: st.DataObject, generation: int) -> None:
        self.ask(data, messages.Invalidate, b"first ns", generation)

    @precondition(lambda self: self.stand.index.generations.current(b"first ns"))
    @rule(data=st.data(), number=st.integers(0, 4), back=st.integers(1, 4))
    def put_under_a_past_generation(self, data: st.DataObject, number: int, back: int) -> None:
        past = max(0, self.stand.index.generations.current(b"first ns") - back)
        client = self.ask(data, messages.RequestClaim, key(number, b"first ns", past))
        assert self.stand.last(client).code == "Invalidated"
        self.requests += 1
        self.stand.commit(client, self.requests, key(number, b"first ns", past), 100)
        assert self.stand.ended(client, self.requests) == "Invalidated"

    @rule(data=st.data(), number=NUMBERS, unpin=st.booleans())
    def pin_by_message(self, data: st.DataObject, number: int, unpin: bool) -> None:
        if unpin:
            self.ask(data, messages.Unpin, self.key(number))
        else:
            self.ask(data, messages.Pin, self.key(number), 8.0)

    @rule(data=st.data(), limit_bytes=st.sampled_from([1000, 2500, RING_BYTES, 9999]))
    def limit(self, data: st.DataObject, limit_bytes: int) -> None:
        self.ask(data, messages.Limit, limit_bytes)

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

    @rule(copies=st.booleans())
    def all_settles(self, copies: bool) -> None:
        self.stand.settle(copies=copies)
        holds = self.stand.holds
        # The first event tells it.
        if holds is not None and not self.stand.store.residency.exchanging:
            assert holds.resident_bytes == self.stand.store.status()["resident_bytes"]

    @rule(seconds=st.sampled_from([0.0, 0.1, 2.0, 7.0]))
    def tick(self, seconds: float) -> None:
        self.stand.now += seconds
        self.stand.do(Tick())

    @precondition(lambda self: self.grown < RING_BYTES)
    @rule()
    def grow(self) -> None:
        self.grown += 1024
        self.stand.grow(self.grown, more=self.grown < RING_BYTES)

    @invariant()
    def nothing_pinned_is_reused_and_all_is_sound(self) -> None:
        if not hasattr(self, "stand"):
            return
        self.stand.check()

    @invariant()
    def no_block_is_shown_without_the_one_before(self) -> None:
        if hasattr(self, "stand"):
            shown = {slot.key for slot in self.stand.index.slots() if slot.published}
            for words, key in SEQUENCES.items():
                assert key not in shown or len(words) == 1 or SEQUENCES[words[:-1]] in shown, words

    @invariant()
    def no_child_is_shown_without_its_parent(self) -> None:
        if hasattr(self, "stand"):
            shown = {slot.key: slot for slot in self.stand.index.slots() if slot.published}
            for key, slot in shown.items():
                parent = self.stand.headers[slot.offset].parent
                assert parent is None or parent in shown, key

    @invariant()
    def budgets_hold(self) -> None:
        if not hasattr(self, "stand"):
            return
        memory = self.stand.store.memory
        assert memory.spans.taken_entries <= 7
        assert memory.spans.taken_tokens <= 20
        # A lowered budget is passed until enough has gone; it is never passed by more than before.
        used = memory.ring.used_bytes
        assert used <= max(memory.budget.max_bytes, self.most_bytes)
        self.most_bytes = used

    @invariant()
    def contents_belong_to_their_span(self) -> None:
        if not hasattr(self, "stand"):
            return
        for number in range(10):
            view = self.stand.find(self.key(number))
            if view is not None:
                assert len(set(view.content)) == 1, "published before all of it was copied"
                assert self.contents.setdefault(view.span_id, view.content) == view.content

    def check_answers(self, commits: set[tuple[int, int]]) -> None:
        """Each of them was answered once, and each of its parts."""
        for client, request in commits:
            answers = [a for a in self.stand.answers[client] if getattr(a, "id", None) == request]
            copied = sum(isinstance(a, messages.PartCopied) for a in answers)
            assert copied == self.parts_sent[client, request], "a part was not acknowledged"
            assert sum(isinstance(a, messages.Committed) for a in answers) == 1

    def waiting_for_bytes(self) -> set[tuple[int, int]]:
        """The puts whose bytes do not all come, and those that wait for such a put because it is their parent's."""
        found = set(self.unsent)
        puts = {(put.client, put.commit.id): put.commit for put in self.stand.store.intake.puts}
        while True:
            keys = {puts[request].key for request in found if request in puts}
            more = {request for request, commit in puts.items() if commit.parent in keys} - found
            if not more:
                return found
            found |= more

    def teardown(self) -> None:
        if not hasattr(self, "stand"):
            return
        stand = self.stand
        while self.grown < RING_BYTES:
            self.grow()
        stand.do(Pressed())
        for client, span in self.taken:
            stand.send(client, messages.ReturnSpan(span))
        stand.settle()
        self.check_answers(self.commits - self.waiting_for_bytes())
        # What waits for bytes that never come, or for others that do, ends by time.
        for _ in range(4):
            stand.pass_time(40)
            stand.settle()
        self.check_answers(self.commits)
        for client in list(stand.answers):
            stand.leave(client)
        stand.settle()
        assert sorted(stand.forgotten) == list(range(1, self.clients + 1))
        assert len(stand.store.claims) == len(stand.store.pins) == len(stand.store.intake.puts) == 0
        stand.views.clear()
        stand.join(10_000)
        stand.send(10_000, messages.Limit(3, 1000))
        stand.pass_time(10)
        assert stand.store.status()["resident_bytes"] <= 1024, "more is in memory than may be, and nobody holds it"
        stand.send(10_000, messages.Clear(1))
        stand.send(10_000, messages.Limit(2, RING_BYTES))
        stand.pass_time(100)
        assert not stand.gone, "a limit was lifted, and not all is back"
        assert stand.holds is not None and stand.holds.settled
        assert stand.holds.resident_bytes == stand.holds.wanted_bytes == RING_BYTES
        assert stand.store.memory.ring.used_bytes == 0, "memory leaked"
        # A remote store would be asked for its generations for ever.
        stand.do(LimitsChanged(replace(stand.limits, remote_s=0.0)))
        assert stand.store.next_timer() is None
        assert stand.store.status()["evicted_while_pinned"] == 0
        stand.check()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_thousand_puts_through_a_small_ring_all_succeed(policy: str) -> None:
    stand = Stand(4096, policy=policy)
    stand.join(1)
    for number in range(1000):
        assert stand.put(number, 64 + number * 37 % 1500) == "stored"
    stand.check()
