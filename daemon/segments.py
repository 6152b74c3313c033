"""The instance's shared memory as the daemon holds it: ring, index, and the lanes of everybody who ever attached.

Owns: making, finding again and removing the segments; which pages of the ring are there; which descriptors a client
gets; reading all lanes after the fence. Does not own what is stored: that is the core's.

Invariants: what may have been given back is read through the descriptor, never through the mapping, where looking at a
page would have it made. A lane is forgotten only when no process holds it any more; until then it is scanned, whoever's
socket closed. Which lane it is, and which fence reaches it, is believed of its name alone: its memory is its client's.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from mmap import mmap
from typing import Any, Final, Self

import numpy as np

from ..errors import BadPrefix, NameTaken, SegmentError
from ..shm import segments
from ..shm.copy import PIECE_BYTES, checksum_of_pieces
from ..shm.fence import check, fence, works
from ..shm.index import IndexWriter
from ..shm.lanes import LaneReader
from ..shm.layout import (
    LANE_BYTES,
    LANE_COUNTER_BITS,
    LANE_WORDS,
    PAGE_BYTES,
    SPAN_EXPIRES_AT,
    SPAN_HEADER_BYTES,
    SpanHeader,
    aligned,
    expiry_word,
    pack_lane_header,
)
from ..shm.prefix import PrefixRecord
from ..shm.slots import Slot
from .core.recovery import Recovered
from .opening import Opened, header_at, opened
from .sizes import ConfiguredSizes

Array = np.ndarray[Any, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
LANES_READ_MAX: Final = 1024
"""Lanes that one question about pins has read: 6 to 8 ms."""
_LANE_NAMES_TRIED: Final = 64
_FOREIGN_TOLD: Final = 16


@dataclass(slots=True)
class HeldLane:
    """A lane and who holds it: `client` is None once its connection is gone. `fenced`: its process registered. `uid`:
    of the client that it was last lent to; None where only a former daemon knew.
    """

    reader: LaneReader
    name: str
    identity: tuple[int, int]
    fenced: bool
    client: int | None
    uid: int | None = None


class Segments:
    """Ring, index and lanes of one instance."""

    def __init__(self, instance: str, found: Opened) -> None:
        self.instance = instance
        self.superblock = superblock = found.superblock
        self.recovered = found.recovered
        self.missing = found.missing
        self.ready_bytes = found.ready_bytes
        """The ring's first bytes, of which all but `missing` were allocated by a former daemon."""
        self.shortage = found.shortage
        self.notices = list(found.notices)
        """What an operator should know, and does not keep from service."""
        self._lock_fd = found.lock_fd
        self._ring_fd = found.ring_fd
        self._ring_map = mmap(found.ring_fd, superblock.ring_bytes)
        self._index_map = mmap(found.index_fd, superblock.geometry.index_bytes)
        os.close(found.index_fd)
        self._shared_ring_fd = segments.attach(segments.segment_name(instance, "ring"), read_only=True)
        self._shared_index_fd = segments.attach(segments.segment_name(instance, "index"), read_only=True)
        self._lanes: dict[str, HeldLane] = {}
        self._lanes_made = 0
        self._has_quick_fence, self._has_slow_fence = works(expedited=True), False
        self._scratch = np.empty(LANE_WORDS, np.uint64)
        self.ring: Bytes = np.frombuffer(self._ring_map, np.uint8)
        self._ring_view = memoryview(self._ring_map).toreadonly()
        packed = superblock.pack()
        if found.recovered:
            self.index = IndexWriter(self._index_map, superblock.geometry)
            self._index_map[: len(packed)] = packed
            self._find_lanes()
        else:
            self.index = IndexWriter.create(superblock.geometry, self._index_map)
            # Last: who finds a superblock finds a whole index.
            self._index_map[: len(packed)] = packed

    @classmethod
    def open(
        cls,
        instance: str,
        ring_bytes: int,
        max_entries: int,
        namespaces_max: int = 1024,
        derived: frozenset[str] = frozenset(),
    ) -> Self:
        """The instance's memory as a former daemon left it, else new memory of which nothing is allocated yet.

        Args:
            derived: those of "ring_bytes" and "max_entries" that nobody has configured: memory that is found keeps its.

        Raises:
            SegmentError: of whatever kind `opened` raises.
        """
        return cls(instance, opened(instance, ConfiguredSizes(ring_bytes, max_entries, namespaces_max, derived)))

    def grow(self, start: int, *, prefault: bool, huge_pages: bool = False) -> int:
        """Allocates the next piece of the ring behind `start`; for a thread.

        Returns:
            Up to where the ring may be used now.

        Raises:
            NotEnoughMemory: /dev/shm has no room for it.
        """
        size_bytes = min(segments.PREFAULT_PIECE_BYTES, self.superblock.ring_bytes - start)
        self.allocate(start, size_bytes, prefault=prefault, huge_pages=huge_pages)
        return start + size_bytes

    def allocate(self, start: int, size_bytes: int, *, prefault: bool, huge_pages: bool = False) -> None:
        """Has pages of the ring set aside, so that they may be written; for a thread.

        Raises:
            NotEnoughMemory: they are not to be had.
        """
        segments.allocate(self._ring_fd, start, size_bytes)
        # madvise(2) takes whole pages; a ring need not have ended with one.
        within = start % PAGE_BYTES
        address = segments.address_of(self._ring_map) + start - within
        if huge_pages:
            segments.advise_huge(address, size_bytes + within)
        if prefault:
            segments.prefault(address, size_bytes + within, write=True)

    def punch(self, start: int, size_bytes: int) -> None:
        """Gives pages of the ring back to the system; for a thread. Nobody may look at them until `allocate`."""
        segments.punch(self._ring_fd, start, size_bytes)

    def found(self) -> Iterator[Recovered]:
        """What a former daemon left in the index, slot by slot; published slots are marked for checking."""
        for slot in self.index.slots():
            header = header_at(self._ring_fd, slot.offset)
            record: PrefixRecord | None = None
            if slot.published:
                self.index.mark(slot.number, unverified=True)
                record = self._record(slot, header) if header is not None and header.prefix_bytes else None
            yield Recovered(slot.number, header, slot.published, record)

    def _record(self, slot: Slot, header: SpanHeader) -> PrefixRecord | None:
        """What the record says at a payload's beginning, if there is one."""
        at = aligned(slot.tree_bytes)
        if at + header.prefix_bytes > slot.payload_bytes:
            return None
        try:
            return PrefixRecord.unpack(
                os.pread(self._ring_fd, header.prefix_bytes, slot.offset + SPAN_HEADER_BYTES + at)
            )
        except BadPrefix:
            return None

    def read(self, offset: int, size_bytes: int) -> memoryview:
        """What stands at a place of the ring where a span is: looked at, not copied."""
        return self._ring_view[offset : offset + size_bytes]

    def write_expiry(self, offset: int, expires_s: float) -> None:
        """Writes into the header of the span at `offset` when its entry ends. One word: a reader sees either time."""
        self.ring[offset + SPAN_EXPIRES_AT :][:8].view(np.uint64)[0] = expiry_word(expires_s)

    def is_sound(self, slot: Slot) -> bool:
        """Whether a span's payload matches its checksum; for a thread. Either, of a span that is reused meanwhile."""
        start = slot.offset + SPAN_HEADER_BYTES
        header = header_at(self._ring_fd, slot.offset)
        pieces = self._read(start, start + slot.payload_bytes)
        return header is not None and header.checksum == checksum_of_pieces(pieces)

    def lend_lane(
        self, client: int, *, fenced: bool, brought: int | None, uid: int | None = None
    ) -> tuple[int, list[int]]:
        """A lane for `client`: the one it brought along, where that can be had, else a new one.

        Args:
            brought: a descriptor of the lane it had; it stays the caller's.

        Returns:
            The lane's id, and (ring, index, lane) descriptors to send: the first two stay ours, the last is the
            caller's to close, and carries the lock that says the client lives.
        """
        lane = self._lane_brought(brought) if brought is not None else None
        lane = lane or self._new_lane(uid, fenced=fenced)
        fd = self._locked(lane)
        lane.client, lane.uid = client, uid
        return lane.reader.lane_id, [self._shared_ring_fd, self._shared_index_fd, fd]

    def has_lane_for(self, brought: int) -> bool:
        """Whether the lane behind a descriptor that a client brought along can be had again."""
        return self._lane_brought(brought) is not None

    def orphan(self, client: int) -> None:
        """The client's connection is gone; its lane counts until no process holds it."""
        for lane in self._lanes.values():
            if lane.client == client:
                lane.client = None

    def forget_abandoned(self) -> int:
        """Removes the lanes that no process holds any more.

        Returns:
            How many there were.
        """
        gone = [name for name, lane in self._lanes.items() if lane.client is None and lane.reader.abandoned()]
        for name in gone:
            lane = self._lanes.pop(name)
            segments.remove(lane.name)
            lane.reader.close()
        return len(gone)

    @property
    def fence_is_quick(self) -> bool:
        """Whether every lane's process registered for the expedited fence; else `fence` takes 8 to 16 ms."""
        return all(lane.fenced for lane in self._lanes.values())

    def fence(self) -> None:
        """Orders what was unpublished before it and pins of readers that still saw it; before the lanes are read.

        Raises:
            OSError: the kernel refused.
        """
        if self._lanes:
            fence(expedited=self.fence_is_quick)

    @property
    def readers(self) -> list[LaneReader]:
        """The lanes as they are read; `forget_abandoned` closes some."""
        return [lane.reader for lane in self._lanes.values()]

    def read_pins(self) -> list[HeldLane]:
        """The lanes, with their numbers of pins brought up to date: to look at, not to reclaim by.

        Of the lanes behind the first LANES_READ_MAX, the numbers are as of the last scan or count.
        """
        for lane in islice(self._lanes.values(), LANES_READ_MAX):
            lane.reader.pins(self._scratch)
        return self.lanes

    @property
    def lanes(self) -> list[HeldLane]:
        return list(self._lanes.values())

    def close(self, *, drop: bool) -> None:
        """Ends this daemon's hold. `drop` removes the segments' names, else the next daemon finds all as it is."""
        if drop:
            lock = segments.segment_name(self.instance, "lock")
            # The lock last: until then no other daemon makes anything here.
            for name in sorted(segments.own(self.instance), key=lambda name: name == lock):
                segments.remove(name)
        for lane in self._lanes.values():
            lane.reader.close()
        for fd in (self._ring_fd, self._shared_ring_fd, self._shared_index_fd, self._lock_fd):
            os.close(fd)

    def _read(self, start: int, end: int) -> Iterator[bytes]:
        """The ring's [start, end) in pieces; less where the ring's file ends."""
        while start < end and (piece := os.pread(self._ring_fd, min(PIECE_BYTES, end - start), start)):
            yield piece
            start += len(piece)

    def _new_lane(self, uid: int | None, *, fenced: bool) -> HeldLane:
        self._check_fence(fenced=fenced)
        lane_id, name, fd = self._lane_file(uid, fenced=fenced)
        try:
            segments.allocate(fd, 0, LANE_BYTES)
            os.pwrite(fd, pack_lane_header(lane_id), 0)
            return self._hold(name, segments.attach(name, read_only=True), lane_id, uid, fenced=fenced)
        except BaseException:
            segments.remove(name)
            raise
        finally:
            os.close(fd)

    def _lane_file(self, uid: int | None, *, fenced: bool) -> tuple[int, str, int]:
        """(id, name, descriptor) of a new segment for a lane, under a name that nobody has taken."""
        for _ in range(_LANE_NAMES_TRIED):
            self._lanes_made += 1
            lane_id = self.superblock.epoch << LANE_COUNTER_BITS | self._lanes_made
            name = segments.lane_name(self.instance, lane_id, uid=uid, fenced=fenced)
            try:
                return lane_id, name, segments.create(name, LANE_BYTES)
            except NameTaken as error:
                # Another user's file: who took this name may have taken the next ones too.
                self._lanes_made = secrets.randbits(LANE_COUNTER_BITS - 1)
                taken = error
        raise taken

    def _hold(self, name: str, fd: int, lane_id: int, uid: int | None, *, fenced: bool) -> HeldLane:
        status = os.fstat(fd)
        identity = status.st_dev, status.st_ino
        lane = HeldLane(LaneReader(fd, lane_id), name, identity, fenced and self._has_quick_fence, None, uid)
        self._lanes[name] = lane
        return lane

    def _check_fence(self, *, fenced: bool) -> None:
        """Makes sure that a fence reaches the process of a lane.

        Raises:
            NoFence: the process did not register for the expedited one, and the other one cannot be made.
        """
        if not (fenced and self._has_quick_fence) and not self._has_slow_fence:
            check(expedited=False)
            self._has_slow_fence = True

    def _lane_brought(self, fd: int) -> HeldLane | None:
        """The lane behind a descriptor that a client sent, if it is one of ours, and it can be had."""
        status = os.fstat(fd)
        for lane in self._lanes.values():
            if lane.identity == (status.st_dev, status.st_ino) and lane.client is None:
                try:
                    os.close(self._locked(lane))
                except BlockingIOError:
                    return None
                return lane
        return None

    def _locked(self, lane: HeldLane) -> int:
        """A descriptor on the lane that carries the lock of whoever has the lane.

        Raises:
            BlockingIOError: its client has made an exclusive lock of its own.
        """
        fd = segments.attach(lane.name)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _find_lanes(self) -> None:
        """Takes up the lanes that stand by name, whoever holds them."""
        prefix = segments.segment_name(self.instance, "lane.")
        foreign = 0
        for name in segments.existing(self.instance):
            if not name.startswith(prefix):
                continue
            said = segments.read_lane_name(self.instance, name)
            try:
                if said is None:
                    raise SegmentError(f"{name} in {segments.SHM_FOLDER} is no lane's name: remove it")
                lane_id, uid, fenced = said
                fd = segments.attach(name, read_only=True)
            except SegmentError as error:
                foreign += 1
                if foreign <= _FOREIGN_TOLD:
                    self.notices.append(str(error))
                continue
            self._check_fence(fenced=fenced)
            self._hold(name, fd, lane_id, uid, fenced=fenced)
        if foreign > _FOREIGN_TOLD:
            self.notices.append(f"and {foreign - _FOREIGN_TOLD} more files like these")
