"""The memory of a store, played by the test: the ring's bytes and pages, the lanes, and readers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tensord.daemon.forms.effects import Allocate, Drain, Move, Punch, Scan
from tensord.daemon.forms.events import Accessed, Allocated, Drained, Moved, Punched, Scanned
from tensord.errors import NotEnoughMemory, TensordError
from tensord.shm.index.index import IndexReader
from tensord.shm.ring.layout import PAGE_BYTES, SPAN_HEADER_BYTES, IndexGeometry, SpanHeader

from .remote_side import RemoteSide


@dataclass(eq=False)
class View:
    """A pin in a lane, and the bytes that it must go on seeing."""

    span_id: int
    offset: int
    content: bytes


class MemorySide(RemoteSide):
    """`bytes` and `index_bytes`: the ring and the index, whichever daemon runs."""

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
        self.forget_work()

    def forget_work(self) -> None:
        """Nothing is under way."""
        self.forget_remote()
        self.moves: deque[Move] = deque()
        self.punches: deque[Punch] = deque()
        self.allocations: deque[Allocate] = deque()
        self.scans = 0
        self.drains = 0
        self.holds_drains = False
        """Whether a Drain is carried out by the test, with `drain`, and not at once."""
        self.recorded: list[int] = []
        """What lanes recorded and nobody has told the store."""

    def take_memory(self, effect: Any) -> None:
        """Keeps an effect for later, or carries it out."""
        match effect:
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
            case _:
                self.take_remote(effect)

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
        self.do(Moved(effect.number, error))

    def header(self, offset: int) -> SpanHeader:
        return SpanHeader.unpack(memoryview(self.bytes)[offset : offset + SPAN_HEADER_BYTES])

    def drain(self) -> None:
        """Carries a Drain out: reports the recorded reads."""
        if self.recorded:
            recorded, self.recorded = self.recorded, []
            self.do(Accessed(recorded))
        self.do(Drained())

    def scan(self, pinned: Iterable[int] = ()) -> None:
        """Carries the scan out. `pinned`: spans in use besides those of views."""
        self.scans -= 1
        self.do(Scanned(frozenset([*pinned, *(view.span_id for view in self.views)])))

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
