"""The memory of a store, played by the test: the ring's bytes and pages, lanes and readers; and its remote store."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from tensord.daemon.forms import effects, events
from tensord.daemon.forms.effects import AskGenerations, RaiseGeneration, ReadRemote, RemoveRemote, SaveRemote, Seek
from tensord.daemon.forms.events import Event, RemoteDone, RemoteEntry, RemoteSaved, Sought
from tensord.errors import NotEnoughMemory, TensordError
from tensord.shm.index.index import IndexReader
from tensord.shm.index.keys import generation_of
from tensord.shm.ring.layout import PAGE_BYTES, SPAN_HEADER_BYTES, IndexGeometry, SpanHeader

from ..checked import Checked


@dataclass(eq=False)
class View:
    """A pin in a lane, and the bytes that it must go on seeing."""

    span_id: int
    offset: int
    content: bytes


class MemorySide(Checked):
    """`bytes`, `index_bytes` and `remote`: the ring, the index and the remote store, whichever daemon runs."""

    def __init__(self, ring_bytes: int, geometry: IndexGeometry) -> None:
        super().__init__()
        self.geometry = geometry
        self.index_bytes = bytearray(geometry.index_bytes)
        self.bytes = bytearray(ring_bytes)
        self.now = 0.0
        self.views: list[View] = []
        self.gone: set[int] = set()
        """The pages that the system has."""
        self.short = False
        """Whether no memory is to be had."""
        self.remote: dict[bytes, RemoteEntry] = {}
        self.remote_generations: dict[bytes, int] = {}
        self.others: dict[bytes, float] = {}
        """When another host has claimed a key there."""
        self.withdrawn: list[bytes] = []
        self.turned: dict[str, list[str]] = {"store": [], "writes": []}
        """Why the store was left alone, and the like; empty when it served again."""
        self.forget_work()

    def forget_work(self) -> None:
        """Nothing is under way."""
        self.seeks: deque[Seek] = deque()
        self.reads: deque[tuple[ReadRemote, RemoteEntry]] = deque()
        """With what each finds."""
        self.writes: deque[tuple[SaveRemote | RemoveRemote, bytes]] = deque()
        """With the bytes that each must find in the ring."""
        self.generation_requests: deque[AskGenerations | RaiseGeneration] = deque()
        self.moves: deque[effects.Move] = deque()
        self.punches: deque[effects.Punch] = deque()
        self.allocations: deque[effects.Allocate] = deque()
        self.scans = 0
        self.drains = 0
        self.holds_drains = False
        """Whether a Drain is carried out by the test, with `drain`, and not at once."""
        self.recorded: list[int] = []
        """What lanes recorded and nobody has told the store."""

    def do(self, event: Event) -> None:
        """Passes an event to the store."""
        raise NotImplementedError

    def take_memory(self, effect: Any) -> None:
        """Keeps an effect for later, or carries it out."""
        match effect:
            case effects.Move():
                self.moves.append(effect)
            case effects.Drain():
                self.drains += 1
                if not self.holds_drains:
                    self.drain()
            case effects.Scan():
                assert self.scans == 0, "two scans in flight"
                self.scans += 1
            case effects.Punch():
                assert effect.size_bytes > 0
                self.punches.append(effect)
            case effects.Allocate():
                assert effect.size_bytes > 0
                assert not self.punches, "memory is taken before what is to go has gone"
                self.allocations.append(effect)
            case Seek():
                self.seeks.append(effect)
            case ReadRemote():
                self.reads.append((effect, self.remote[effect.key]))
            case SaveRemote(key, offset, payload_bytes):
                assert self.header(offset).key == key
                start = offset + SPAN_HEADER_BYTES
                self.writes.append((effect, bytes(self.bytes[start : start + payload_bytes])))
            case RemoveRemote():
                self.writes.append((effect, b""))
            case effects.WithdrawClaim():
                self.withdrawn.append(effect.key)
                self.do(RemoteDone(effect, True))
            case AskGenerations() | RaiseGeneration():
                self.generation_requests.append(effect)
            case effects.RemoteTurned(why, what):
                self.turned[what].append(why)
            case _:
                raise AssertionError(effect)

    def move(self, at: int = 0, error: TensordError | None = None) -> None:
        """Carries the at-th Move out, or has it fail halfway."""
        effect = self.moves[at]
        del self.moves[at]
        size = effect.size_bytes if error is None else effect.size_bytes // 2
        low, to = effect.from_offset, effect.to_offset
        for offset in (low, to):
            self.touch(offset, effect.size_bytes)
        self.bytes[to : to + size] = self.bytes[low : low + size]
        if error is None:
            self.bytes[to : to + SPAN_HEADER_BYTES] = self.header(low).moved_to(effect.number).pack()
        self.do(events.Moved(effect.number, error))

    def header(self, offset: int) -> SpanHeader:
        return SpanHeader.unpack(memoryview(self.bytes)[offset : offset + SPAN_HEADER_BYTES])

    def drain(self) -> None:
        """Carries a Drain out: reports the recorded reads."""
        if self.recorded:
            recorded, self.recorded = self.recorded, []
            self.do(events.Accessed(recorded))
        self.do(events.Drained())

    def scan(self, pinned: Iterable[int] = ()) -> None:
        """Carries the scan out. `pinned`: spans in use besides those of views."""
        self.scans -= 1
        self.do(events.Scanned(frozenset([*pinned, *(view.span_id for view in self.views)])))

    def punch(self, at: int = 0) -> None:
        """Carries a Punch out: whatever stood there is lost."""
        effect = self.punches[at]
        del self.punches[at]
        self.bytes[effect.offset : effect.offset + effect.size_bytes] = b"\xdd" * effect.size_bytes
        pages = self.pages(effect.offset, effect.size_bytes)
        assert not pages & self.gone, "punched twice"
        self.gone |= pages
        self.do(events.Punched(effect.offset))

    def allocate(self, *, short: bool = False) -> None:
        """Carries an Allocate out, or says that no memory is to be had."""
        effect = self.allocations.popleft()
        pages = self.pages(effect.offset, effect.size_bytes)
        assert pages <= self.gone, "asked for what is there"
        if short or self.short:
            self.do(events.Allocated(effect.offset, NotEnoughMemory("no memory is to be had")))
            return
        self.gone -= pages
        self.do(events.Allocated(effect.offset))

    def pages(self, offset: int, size_bytes: int) -> set[int]:
        """The numbers of the pages in a range that has nothing but whole ones."""
        assert offset % PAGE_BYTES == size_bytes % PAGE_BYTES == 0, (offset, size_bytes)
        return set(range(offset // PAGE_BYTES, (offset + size_bytes) // PAGE_BYTES))

    def touch(self, offset: int, size_bytes: int) -> None:
        """Somebody reads or writes there."""
        touched = set(range(offset // PAGE_BYTES, (offset + size_bytes - 1) // PAGE_BYTES + 1))
        assert not touched & self.gone, f"page {min(touched & self.gone)} is the system's"

    def find(self, key: bytes) -> View | None:
        """What a reader sees, as the index has it."""
        hit = IndexReader(self.index_bytes, self.geometry).find(key)  # type: ignore[arg-type]
        if hit is None:
            return None
        _, _, span_id, place, payload_bytes = hit
        offset = place & ((1 << 48) - 64)
        self.touch(offset, SPAN_HEADER_BYTES + payload_bytes)
        header = self.header(offset)
        assert (header.key, header.span_id, header.payload_bytes) == (key, span_id, payload_bytes)
        start = offset + SPAN_HEADER_BYTES
        return View(span_id, start, bytes(self.bytes[start : start + payload_bytes]))

    # ---- the remote store

    @property
    def remote_waits(self) -> bool:
        return bool(self.seeks or self.reads or self.writes or self.generation_requests)

    def settle_remote(self) -> None:
        while self.seeks:
            self.seek()
        while self.reads:
            self.read_remote()
        while self.writes:
            self.write_remote()
        while self.generation_requests:
            self.answer_generations()

    def seek(self, at: int = 0, error: TensordError | None = None, answer_s: float = 0.0) -> None:
        """The remote store answers the at-th Seek, after so many seconds."""
        effect = self.seeks[at]
        del self.seeks[at]
        self.now += answer_s
        if error is not None:
            self.do(RemoteDone(effect, error=error))
            return
        first, generation = effect.keys[0], self._generation(effect)
        shared = generation == generation_of(first)
        there = takewhile(lambda each: each in self.remote, effect.keys) if shared else ()
        found = tuple(self.remote[each] for each in there)
        asks_claim = shared and not found and effect.claims_s > 0
        others_s = self.now - self.others[first] if asks_claim and first in self.others else None
        claimed = asks_claim and others_s is None
        self.do(RemoteDone(effect, Sought(generation, found, answer_s, claimed, others_s)))

    def read_remote(self, at: int = 0, error: TensordError | None = None) -> None:
        """The at-th read is carried out, or fails halfway."""
        effect, found = self.reads[at]
        del self.reads[at]
        start, size = effect.ring_offset + SPAN_HEADER_BYTES, effect.payload_bytes
        size = size if error is None else size // 2
        self.touch(start, size)
        self.bytes[start : start + size] = effect.key[8:9] * size
        self.do(RemoteDone(effect, found if error is None else None, error))

    def write_remote(self, at: int = 0, error: TensordError | None = None) -> None:
        """Carries the at-th write to the remote store out, or has it fail."""
        effect, content = self.writes[at]
        del self.writes[at]
        if isinstance(effect, RemoveRemote):
            for key in effect.keys if error is None else ():
                self.remote.pop(key, None)
            self.do(RemoteDone(effect, error=error))
            return
        start = effect.offset + SPAN_HEADER_BYTES
        self.touch(effect.offset, SPAN_HEADER_BYTES + effect.payload_bytes)
        assert self.bytes[start : start + effect.payload_bytes] == content, "a span changed under a write"
        if error is not None:
            self.do(RemoteDone(effect, error=error))
            return
        generation = self._generation(effect)
        written = generation == generation_of(effect.key)
        if written:
            header = self.header(effect.offset)
            sizes = header.payload_bytes, header.tree_bytes, header.tokens
            self.remote[effect.key] = RemoteEntry(*sizes, header.cost_ms, parent=header.parent)
        self.do(RemoteDone(effect, RemoteSaved(generation, written)))

    def answer_generations(self, error: TensordError | None = None) -> None:
        """The remote store answers the oldest request about generations."""
        effect = self.generation_requests.popleft()
        if isinstance(effect, AskGenerations):
            told = {} if error else {tag: self.remote_generations.get(tag, 0) for tag in effect.tags}
            self.do(RemoteDone(effect, told, error))
            return
        if error is None:
            known = self.remote_generations.get(effect.tag, 0)
            if effect.new or known < effect.least:
                self.remote_generations[effect.tag] = max(known + 1, effect.least)
        self.do(RemoteDone(effect, None if error else self.remote_generations[effect.tag], error))

    def _generation(self, effect: Seek | SaveRemote) -> int:
        """The remote store's generation of a key's namespace."""
        name = effect.keys[0] if isinstance(effect, Seek) else effect.key
        return self.remote_generations.get(name[:8], 0)
