"""A store with everything around it played by the test: clients, the copier, the lanes, the ring's bytes and pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from tensord.daemon.core.effects import (
    Again,
    Allocate,
    Announce,
    AskGenerations,
    Copy,
    Discard,
    Drain,
    Effect,
    Forget,
    Move,
    Punch,
    RaiseGeneration,
    RemoteTurned,
    RemoveRemote,
    SaveRemote,
    Scan,
    Seal,
    Seek,
    SeekRun,
    Send,
    WithdrawClaim,
    WriteExpiry,
)
from tensord.daemon.core.entries import EntryState
from tensord.daemon.core.events import (
    Accessed,
    Allocated,
    ClaimWithdrawn,
    ClientJoined,
    ClientLeft,
    Copied,
    Drained,
    Event,
    GenerationRaised,
    GenerationsTold,
    Moved,
    PrefixAsked,
    Punched,
    Received,
    RemoteFound,
    RemoteSaved,
    RingGrown,
    RunSought,
    Scanned,
    Sought,
    Tick,
)
from tensord.daemon.core.host_memory import HostHolds, Pressed
from tensord.daemon.core.limits import StoreLimits
from tensord.daemon.core.store import Store
from tensord.daemon.policy.registry import by_name
from tensord.errors import BadPrefix, NotEnoughMemory, TensordError
from tensord.ipc import messages
from tensord.shm.allocator import SpanAllocator
from tensord.shm.index import IndexWriter
from tensord.shm.keys import generation_of, make_key
from tensord.shm.layout import PAGE_BYTES, SPAN_HEADER_BYTES, IndexGeometry, SpanHeader, aligned
from tensord.shm.prefix import PrefixRecord, Tokens

from .blocks import BLOCK, TAG, Block, block, name, query, text

UNIX_AT_ZERO_S = 1_000_000.0
SPAN = 256  # ring bytes of a payload of 64, its header included


def key(number: int, tag: bytes = b"namespac", generation: int = 0) -> bytes:
    """A key that is told from others by its number."""
    return make_key(tag, number.to_bytes(8, "little") * 3, generation)


@dataclass
class View:
    """What a reader holds: a pin, and the bytes that it must go on seeing."""

    span_id: int
    offset: int
    content: bytes


class Stand:
    """Carries effects out when told to; Copy writes `fill(put)` into the ring's bytes."""

    def __init__(
        self,
        ring_bytes: int = 4096,
        *,
        policy: str = "lru",
        buckets: int | None = None,
        grown_bytes: int | None = None,
        epoch: int = 1,
        page_bytes: int = PAGE_BYTES,
        namespaces_max: int = 64,
        **limits: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "ring_bytes": ring_bytes,
            "max_bytes": ring_bytes,
            "max_entries": 1000,
            "object_bytes_max": ring_bytes,
            "pinned_bytes_max": ring_bytes,
        }
        self.limits = StoreLimits(**(defaults | limits))
        geometry = IndexGeometry.for_entries(self.limits.max_entries, namespaces_max)
        self.index = IndexWriter.create(IndexGeometry(buckets, namespaces_max) if buckets else geometry)
        grown = ring_bytes if grown_bytes is None else grown_bytes
        self.bytes = bytearray(ring_bytes)
        self.headers: dict[int, SpanHeader] = {}
        self.page_bytes = page_bytes
        self.punches: deque[Punch] = deque()
        self.allocations: deque[Allocate] = deque()
        self.gone: set[int] = set()
        """The pages that the system has."""
        self.short = False
        """Whether no memory is to be had."""
        self.holds: HostHolds | None = None
        self.now = 0.0
        self.unix_at_zero_s = UNIX_AT_ZERO_S
        self.policy = policy
        self.store = self.make(SpanAllocator(grown, page_bytes), epoch)
        self.views: list[View] = []
        self.copies: deque[Copy | Seal] = deque()
        self.moves: deque[Move] = deque()
        self.seeks: deque[Seek] = deque()
        self.runs: deque[SeekRun] = deque()
        self.writes: deque[tuple[SaveRemote | RemoveRemote, bytes]] = deque()
        """Writes to the remote store, with the bytes that each must find in the ring."""
        self.remote: dict[bytes, RemoteFound] = {}
        """What is in the remote store."""
        self.others: dict[bytes, float] = {}
        """When another host has claimed a key in the remote store."""
        self.withdrawn: list[bytes] = []
        """Keys whose claims in the remote store were withdrawn."""
        self.remote_generations: dict[bytes, int] = {}
        self.generation_requests: deque[AskGenerations | RaiseGeneration] = deque()
        self.turned: list[str] = []
        """Why the remote store was left alone; empty when it served again."""
        self.takes_writes: list[str] = []
        """Why it took no writes; empty when it took them again."""
        self.takes_removals: list[str] = []
        """Why it removed nothing; empty when it removed again."""
        self.takes_generations: list[str] = []
        """Why it took no generations; empty when it took them again."""
        self.scans = 0
        self.drains = 0
        self.holds_drains = False
        """Whether a Drain is carried out by the test, with `drain`, and not at once."""
        self.recorded: list[int] = []
        """What lanes recorded and nobody has told the store."""
        self.seen: frozenset[int] | None = None
        self.answers: dict[int, list[Any]] = {}
        self.outcomes: dict[int, dict[int, messages.Committed]] = {}
        """How each put of a client ended, by its id."""
        self.told: list[dict[str, Any]] = []
        self.forgotten: list[int] = []
        self.half_copied: set[int] = set()
        """Puts of which the copier keeps a checksum."""
        self.records: dict[bytes, bytes] = {}
        """What the payloads of blocks begin with, by key."""

    def make(self, ring: SpanAllocator, epoch: int) -> Store:
        policy = by_name(self.policy)
        return Store(self.index, ring, policy, self.limits, epoch, self.unix_at_zero_s, read=self.read, seed=epoch)

    def read(self, offset: int, size_bytes: int) -> memoryview:
        """Bytes of the ring where a span is."""
        self.touch(offset, size_bytes)
        return memoryview(self.bytes)[offset : offset + size_bytes]

    # ---- one step at a time

    def do(self, event: Event) -> None:
        self.take(self.store.handle(event, self.now))

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(client, message):
                    assert client in self.answers, "an answer to a client that left"
                    self.answers[client].append(message)
                    if isinstance(message, messages.Committed):
                        assert message.id not in self.outcomes[client], "answered twice"
                        self.outcomes[client][message.id] = message
                case Copy() | Seal():
                    self.copies.append(effect)
                case Move():
                    self.moves.append(effect)
                case Drain():
                    self.drains += 1
                    if not self.holds_drains:
                        self.drain()
                case Scan():
                    assert self.scans == 0, "two scans in flight"
                    self.scans += 1
                case Punch():
                    assert effect.size_bytes > 0
                    self.punches.append(effect)
                case Allocate():
                    assert effect.size_bytes > 0
                    assert not self.punches, "memory is taken before what is to go has gone"
                    self.allocations.append(effect)
                case HostHolds():
                    self.holds = effect
                case Discard(_, put_id):
                    assert not any(copy.put_id == put_id for copy in self.copies)
                    # Of one whose copy failed nothing is kept.
                    self.half_copied.discard(put_id)
                case Forget(client):
                    assert client not in self.answers
                    assert not any(copy.client == client for copy in self.copies)
                    self.forgotten.append(client)
                case Seek():
                    self.seeks.append(effect)
                case SeekRun():
                    self.runs.append(effect)
                case SaveRemote(_, key, offset, payload_bytes):
                    assert self.headers[offset].key == key
                    start = offset + SPAN_HEADER_BYTES
                    self.writes.append((effect, bytes(self.bytes[start : start + payload_bytes])))
                case RemoveRemote():
                    self.writes.append((effect, b""))
                case WithdrawClaim():
                    self.withdrawn.append(effect.key)
                    self.do(ClaimWithdrawn(True))
                case AskGenerations() | RaiseGeneration():
                    self.generation_requests.append(effect)
                case RemoteTurned(why, what, first):
                    told = {
                        "store": self.turned,
                        "writes": self.takes_writes,
                        "removals": self.takes_removals,
                        "generations": self.takes_generations,
                    }
                    told[what].append("reached for the first time" if first else why)
                case WriteExpiry(offset, expires_s):
                    self.headers[offset] = replace(self.headers[offset], expires_s=expires_s)
                case Announce(body):
                    self.told.append(body)
                case Again(client, message, counted):
                    self.do(Received(client, message, counted))

    def join(self, *clients: int) -> None:
        for client in clients:
            self.answers[client], self.outcomes[client] = [], {}
            self.do(ClientJoined(client, 1000 + client, f"client {client}", writes=True))

    def join_as(self, uid: int, *clients: int) -> None:
        """Clients of one uid; `join` gives each client a uid of its own."""
        for client in clients:
            self.answers[client], self.outcomes[client] = [], {}
            self.do(ClientJoined(client, uid, f"client {client}"))

    def leave(self, client: int) -> None:
        del self.answers[client]
        self.do(ClientLeft(client))

    def send(self, client: int, message: Any) -> None:
        self.do(Received(client, message))

    def copy(self, at: int = 0, error: TensordError | None = None) -> None:
        """Carries out the oldest copy of the put that the at-th pending copy belongs to."""
        put_id = self.copies[at].put_id
        copy = next(c for c in self.copies if c.put_id == put_id)
        self.copies.remove(copy)
        record: PrefixRecord | None = None
        if isinstance(copy, Seal):
            if error is None:
                self.touch(copy.payload_offset, copy.header.payload_bytes)
                self.headers[copy.payload_offset - SPAN_HEADER_BYTES] = copy.header
                record = self.write_record(copy.payload_offset, copy.header)
            self.do(Copied(copy.client, put_id, copy.checksum if error is None else None, error, record))
            return
        if error is None:
            self.touch(copy.ring_offset, copy.part_bytes)
            stop = copy.ring_offset + copy.part_bytes
            self.bytes[copy.ring_offset : stop] = bytes([put_id % 251]) * copy.part_bytes
            if copy.header is not None:
                self.headers[copy.payload_offset - SPAN_HEADER_BYTES] = copy.header
                record = self.write_record(copy.payload_offset, copy.header)
        self.half_copied.discard(put_id)
        if error is None and not copy.last:
            self.half_copied.add(put_id)
        checksum = 1 if copy.last and error is None else None
        self.do(Copied(copy.client, put_id, checksum, error, record))

    def seek(self, at: int = 0, error: TensordError | None = None, answer_s: float = 0.0) -> None:
        """The remote store answers the at-th Seek, after so many seconds."""
        effect = self.seeks[at]
        del self.seeks[at]
        self.now += answer_s
        if error is not None:
            self.do(Sought(effect.number, error=error))
            return
        generation = self.remote_generation(effect)
        found = self.remote.get(effect.key) if generation in (None, generation_of(effect.key)) else None
        if found is None and effect.claims_s and effect.key in self.others:
            others_s = self.now - self.others[effect.key]
            self.do(Sought(effect.number, generation=generation, answer_s=answer_s, others_s=others_s))
            return
        claimed = found is None and effect.claims_s > 0
        self.do(Sought(effect.number, found, None, generation, answer_s, claimed))

    def seek_run(self, error: TensordError | None = None, answer_s: float = 0.0) -> None:
        """The remote store answers the oldest SeekRun, after so many seconds."""
        effect = self.runs.popleft()
        self.now += answer_s
        if error is not None:
            self.do(RunSought(effect.number, error=error))
            return
        generation = self.remote_generation(effect)
        shared = generation in (None, generation_of(effect.key))
        there = takewhile(lambda each: each in self.remote, effect.keys) if shared else ()
        found = tuple(self.remote[each] for each in there)
        self.do(RunSought(effect.number, found, generation=generation, answer_s=answer_s))

    def remote_generation(self, effect: Seek | SeekRun | SaveRemote) -> int | None:
        """The remote store's generation of a key's namespace, if it is asked for."""
        return self.remote_generations.get(effect.key[:8], 0) if effect.asks_generation else None

    def answer_generations(self, error: TensordError | None = None) -> None:
        """The remote store answers the oldest request about generations."""
        effect = self.generation_requests.popleft()
        if isinstance(effect, AskGenerations):
            told = {} if error else {tag: self.remote_generations.get(tag, 0) for tag in effect.tags}
            self.do(GenerationsTold(told, error))
            return
        if error is None:
            known = self.remote_generations.get(effect.tag, 0)
            if effect.new or known < effect.least:
                self.remote_generations[effect.tag] = max(known + 1, effect.least)
        self.do(GenerationRaised(effect.tag, None if error else self.remote_generations[effect.tag], error))

    def write_remote(self, at: int = 0, error: TensordError | None = None) -> None:
        """Carries the at-th write to the remote store out, or has it fail."""
        effect, content = self.writes[at]
        del self.writes[at]
        if isinstance(effect, RemoveRemote):
            for key in effect.keys if error is None else ():
                self.remote.pop(key, None)
        else:
            start = effect.offset + SPAN_HEADER_BYTES
            self.touch(effect.offset, SPAN_HEADER_BYTES + effect.payload_bytes)
            assert self.bytes[start : start + effect.payload_bytes] == content, "a span changed under a write"
            header = self.headers[effect.offset]
            generation = self.remote_generation(effect)
            if error is None and generation not in (None, generation_of(effect.key)):
                self.do(RemoteSaved(effect.number, written=False, generation=generation))
                return
            if error is None:
                sizes = header.payload_bytes, header.tree_bytes, header.tokens
                self.remote[effect.key] = RemoteFound(*sizes, header.cost_ms, parent=header.parent)
        generation = None if isinstance(effect, RemoveRemote) or error else self.remote_generation(effect)
        self.do(RemoteSaved(effect.number, error, generation=generation))

    def move(self, at: int = 0, error: TensordError | None = None) -> None:
        """Carries the at-th Move out, or has it fail halfway."""
        effect = self.moves[at]
        del self.moves[at]
        size_bytes = effect.size_bytes if error is None else effect.size_bytes // 2
        for offset in (effect.from_offset, effect.to_offset):
            self.touch(offset, effect.size_bytes)
        moved = self.bytes[effect.from_offset : effect.from_offset + size_bytes]
        self.bytes[effect.to_offset : effect.to_offset + size_bytes] = moved
        if error is None:
            self.headers[effect.to_offset] = self.headers[effect.from_offset].moved_to(effect.number)
        self.do(Moved(effect.number, error))

    def write_record(self, payload_offset: int, header: SpanHeader) -> PrefixRecord | None:
        """Has the payload of a block begin with its record, whatever was copied there."""
        if not header.prefix_bytes:
            return None
        record = self.records[header.key]
        start = payload_offset + aligned(header.tree_bytes)
        self.bytes[start : start + len(record)] = record
        return PrefixRecord.unpack(record)

    def piece_at(self, offset: int, header: SpanHeader | None) -> PrefixRecord | None:
        """What the next daemon reads where a span begins with a record."""
        if header is None or not header.prefix_bytes:
            return None
        start = offset + SPAN_HEADER_BYTES + aligned(header.tree_bytes)
        try:
            return PrefixRecord.unpack(bytes(self.bytes[start : start + header.prefix_bytes]))
        except BadPrefix:
            return None

    def read_lanes(self) -> None:
        """The first half of a scan: what is pinned now is all that it will have seen."""
        self.seen = frozenset(view.span_id for view in self.views)

    def drain(self) -> None:
        """Carries a Drain out: reports the recorded reads."""
        if self.recorded:
            recorded, self.recorded = self.recorded, []
            self.do(Accessed(recorded))
        self.do(Drained())

    def scan(self) -> None:
        """Carries the scan out, or its second half."""
        if self.seen is None:
            self.read_lanes()
        assert self.seen is not None
        pinned, self.seen = self.seen, None
        victims = [e for e in self.store.memory.victims_in_scan() if e.span_id in pinned]
        self.scans -= 1
        self.do(Scanned(pinned))
        while self.store.memory.scan_in_flight and not self.scans:
            # With many pins it takes several events to see whether the put can fit.
            self.do(Tick())
        for entry in victims:
            is_orphan = entry.parent is not None and entry.parent.state is EntryState.RETIRED
            assert is_orphan or self.find(entry.key) is not None, "a pinned entry was evicted for its room"

    def punch(self, at: int = 0) -> None:
        """Carries a Punch out: whatever stood there is lost."""
        effect = self.punches[at]
        del self.punches[at]
        self.bytes[effect.offset : effect.offset + effect.size_bytes] = b"\xdd" * effect.size_bytes
        pages = self.pages(effect.offset, effect.size_bytes)
        assert not pages & self.gone, "punched twice"
        self.gone |= pages
        self.do(Punched(effect.offset))

    def allocate(self, *, short: bool = False) -> None:
        """Carries an Allocate out, or says that no memory is to be had."""
        effect = self.allocations.popleft()
        pages = self.pages(effect.offset, effect.size_bytes)
        assert pages <= self.gone, "asked for what is there"
        if short or self.short:
            self.do(Allocated(effect.offset, NotEnoughMemory("no memory is to be had")))
            return
        self.gone -= pages
        self.do(Allocated(effect.offset))

    def pages(self, offset: int, size_bytes: int) -> set[int]:
        """The numbers of the pages in a range that has nothing but whole ones."""
        assert offset % self.page_bytes == size_bytes % self.page_bytes == 0, (offset, size_bytes)
        return set(range(offset // self.page_bytes, (offset + size_bytes) // self.page_bytes))

    def touch(self, offset: int, size_bytes: int) -> None:
        """Somebody reads or writes there."""
        page = self.page_bytes
        touched = set(range(offset // page, (offset + size_bytes - 1) // page + 1))
        assert not touched & self.gone, f"page {min(touched & self.gone)} is the system's"

    def settle(self, *, copies: bool = True) -> None:
        """Carries out whatever is under way, until nothing is."""
        self.go_on()
        while (
            (copies and self.copies)
            or self.moves
            or self.scans
            or self.punches
            or self.allocations
            or self.seeks
            or self.runs
            or self.writes
            or self.generation_requests
        ):
            while self.moves:
                self.move()
            while self.seeks:
                self.seek()
            while self.runs:
                self.seek_run()
            while self.writes:
                self.write_remote()
            while self.generation_requests:
                self.answer_generations()
            if copies and self.copies:
                self.copy()
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
        self.go_on()
        self.settle()

    def pass_time(self, seconds: float) -> None:
        """Time passes; Ticks come when they are due, scans are carried out at once."""
        end = self.now + seconds
        while True:
            self.settle(copies=False)
            timer = self.store.next_timer()
            if timer is None or timer > end:
                break
            self.now = max(self.now, timer)
            self.do(Tick())
        self.now = end

    def grow(self, ring_bytes: int, *, more: bool) -> None:
        self.do(RingGrown(ring_bytes, more))

    # ---- what clients do

    def commit(self, client: int, request: int, key: bytes, payload_bytes: int, **more: Any) -> None:
        self.send(client, messages.Commit(request, key, payload_bytes, more.pop("tree", 16), **more))

    def begin(self, client: int, request: int, key: bytes, payload_bytes: int, **more: Any) -> None:
        """A commit with the first byte of its payload: it takes room."""
        self.commit(client, request, key, payload_bytes, **more)
        self.part(client, request, 1, last=False)

    def part(self, client: int, request: int, part_bytes: int, *, last: bool) -> None:
        self.send(client, messages.Part(request, 0, part_bytes, last))

    def put(self, number: int | bytes, payload_bytes: int = 64, client: int = 1, **more: Any) -> str:
        """A whole put of key `number`, or of a whole key; its outcome, and with it the error's code."""
        request = 10_000 + len(self.answers[client])
        self.commit(client, request, key(number) if isinstance(number, int) else number, payload_bytes, **more)
        self.part(client, request, payload_bytes, last=True)
        self.settle()
        return self.ended(client, request)

    def take_span(self, client: int, request: int, payload_bytes: int = 64, **more: Any) -> None:
        self.send(client, messages.TakeSpan(request, payload_bytes, **more))

    def taken(self, client: int, request: int) -> messages.SpanTaken | None:
        """The span that a client was given; None if it was not."""
        answers = (a for a in self.answers[client] if isinstance(a, messages.SpanTaken) and a.id == request)
        return next(answers, None)

    def write(self, client: int, request: int, payload_bytes: int = 64) -> View | None:
        """The client pins a span that it has taken, and writes a payload. None if the span is not the client's."""
        taken = self.taken(client, request)
        assert taken is not None
        slot = self.index.read(taken.slot)
        seq, span_id = (int.from_bytes(word, "little") for word in (taken.seq, taken.span_id))
        if (slot.seq, slot.span_id) != (seq, span_id):
            return None
        start = taken.offset + SPAN_HEADER_BYTES
        content = bytes([request % 251]) * payload_bytes
        self.touch(taken.offset, SPAN_HEADER_BYTES + payload_bytes)
        self.bytes[start : start + payload_bytes] = content
        view = View(span_id, start, content)
        self.views.append(view)
        return view

    def put_span(self, client: int, request: int, key: bytes, payload_bytes: int = 64, **more: Any) -> None:
        """The Commit of a payload in a span: `span=`, the id of its TakeSpan."""
        self.commit(client, request, key, payload_bytes, **{"checksum": b"checksum", "acks": False, **more})

    def put_block(self, block: Block, client: int = 1, **more: Any) -> str:
        """A whole put of a block; its outcome, and with it the error's code."""
        request = 10_000 + len(self.answers[client])
        self.records[block.key] = block.packed
        self.send(client, block.commit(request, **more))
        self.part(client, request, block.payload_bytes, last=True)
        self.settle()
        return self.ended(client, request)

    def put_sequence(self, *words: int, **more: Any) -> list[str]:
        """A block of each word, one after the other; their outcomes."""
        return [self.put_block(block(words[: end + 1]), **more) for end in range(len(words))]

    def match(self, *words: int, rest: int = 1, agent: str = "", client: int = 1) -> messages.Matched | messages.Error:
        """What is cached of a sequence of these words with `rest` tokens behind it."""
        tokens = np.concatenate([text(words), np.full(rest, 999_999, np.uint32)])
        self.do(self.asked(query(tokens), tokens, agent, client))
        answer: messages.Matched | messages.Error = self.answers[client][-1]
        return answer

    def asked(self, record: PrefixRecord, tokens: Tokens, agent: str = "", client: int = 1) -> PrefixAsked:
        """A query, as the actor has taken it out of the inbox."""
        request = 10_000 + len(self.answers[client])
        return PrefixAsked(client, messages.MatchPrefix(request, TAG, 0, record.record_bytes, agent), record, tokens)

    def matched(self, *words: int) -> int:
        """How many blocks of these words are cached. Not a use of any."""
        tokens = np.append(text(words), np.uint32(999_999))
        found = self.store.memory.sequences.index.match(TAG, query(tokens), tokens)
        assert all(self.find(key) is not None for key in found.blocks), "matched, and not to be found"
        assert found.blocks == [name(words[: end + 1]) for end in range(len(found.blocks))]
        assert found.offset == BLOCK * len(found.blocks)
        return len(found.blocks)

    def has_block(self, *words: int) -> bool:
        """Whether a reader finds the last block of these words."""
        return self.find(name(words)) is not None

    def pin_block(self, *words: int) -> View:
        """A lease on the last block of these words."""
        view = self.find(name(words))
        assert view is not None, f"{words} is not there"
        self.views.append(view)
        return view

    def ended(self, client: int, request: int) -> str:
        """How a put ended, by its outcome or its error's code; "" while it has not."""
        done = self.outcome(client, request)
        if done is None:
            return ""
        return done.outcome if done.error is None else done.error.code

    def outcome(self, client: int, request: int) -> messages.Committed | None:
        return self.outcomes[client].get(request)

    def last(self, client: int = 1) -> Any:
        return self.answers[client][-1]

    def find(self, key: bytes) -> View | None:
        """What a reader sees: the published slot, as the index has it."""
        for number in self.index.slots_for(key):
            slot = self.index.read(number)
            if slot.span_id and slot.published and slot.key == key:
                start = slot.offset + SPAN_HEADER_BYTES
                self.touch(slot.offset, SPAN_HEADER_BYTES + slot.payload_bytes)
                content = bytes(self.bytes[start : start + slot.payload_bytes])
                return View(slot.span_id, start, content)
        return None

    def find_span(self, span_id: int) -> View | None:
        """What a reader holds that found the span before it was unpublished."""
        for slot in self.index.slots():
            if slot.span_id == span_id:
                start = slot.offset + SPAN_HEADER_BYTES
                self.touch(slot.offset, SPAN_HEADER_BYTES + slot.payload_bytes)
                content = bytes(self.bytes[start : start + slot.payload_bytes])
                return View(span_id, start, content)
        return None

    def pin(self, number: int) -> View:
        """A lease on key `number`."""
        view = self.find(key(number))
        assert view is not None, f"{number} is not there"
        self.views.append(view)
        return view

    def stored(self) -> set[int]:
        """The numbers of all keys that a reader finds."""
        slots = (slot for slot in self.index.slots() if slot.published)
        return {int.from_bytes(slot.key[8:16], "little") for slot in slots}

    def check(self) -> None:
        """No view has changed, and the store is sound."""
        for view in self.views:
            self.touch(view.offset, len(view.content))
            now = bytes(self.bytes[view.offset : view.offset + len(view.content)])
            assert now == view.content, "a pinned span was reused"
        self.store.check_invariants()
        assert (self.scans == 1) == self.store.memory.scan_in_flight
        ring = self.store.memory.ring
        status = self.store.status()
        assert status["withdrawn_bytes"] == len(self.gone) * self.page_bytes
        assert status["resident_bytes"] + status["withdrawn_bytes"] == ring.capacity_bytes
        withdrawn = set().union(*(self.pages(*extent) for extent in ring.withdrawn()))
        assert self.gone <= withdrawn, "something may be placed where nothing is"


Make = Callable[..., Stand]
