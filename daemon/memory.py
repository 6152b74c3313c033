"""The instance's shared memory as the daemon holds it: ring, index, and the lanes of everybody who ever attached.

Owns: making, finding again and removing the segments; which pages of the ring are there; which descriptors a client
gets; reading all lanes after the fence. Does not own what is stored: that is the core's.

Invariants: what may have been given back is read through the descriptor, never through the mapping, where looking at a
page would have it made. A lane is forgotten only when no process holds it any more; until then it is scanned, whoever's
socket closed.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from mmap import mmap
from typing import Any, Final, Self

import numpy as np

from ..errors import BadPrefix, Corrupt, LayoutMismatch, SegmentError
from ..shm import segments
from ..shm.copy import PIECE_BYTES, checksum_of_pieces
from ..shm.fence import fence
from ..shm.index import IndexWriter, Slot
from ..shm.lanes import LaneReader
from ..shm.layout import (
    LANE_BYTES,
    LANE_WORDS,
    PAGE_BYTES,
    SPAN_HEADER_BYTES,
    IndexGeometry,
    SpanHeader,
    Superblock,
    aligned,
    pack_lane_header,
    unpack_lane_header,
)
from ..shm.prefix import Piece
from .core.recovery import Recovered

Array = np.ndarray[Any, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
EPOCH_MAX: Final = (1 << 16) - 1
_LANE_COUNTER_BITS: Final = 32


@dataclass(slots=True)
class HeldLane:
    """A lane and who holds it: `client` is None once its connection is gone. `fenced`: its process registered."""

    reader: LaneReader
    name: str
    identity: tuple[int, int]
    fenced: bool
    client: int | None


class Memory:
    """Ring, index and lanes of one instance."""

    def __init__(
        self,
        instance: str,
        superblock: Superblock,
        ring_fd: int,
        index_fd: int,
        *,
        recovered: bool,
        missing: list[tuple[int, int]],
    ) -> None:
        self.instance = instance
        self.superblock = superblock
        self.recovered = recovered
        self.missing = missing
        """Stretches of the ring, whole pages, that a former daemon had given back or never had."""
        self._ring_fd = ring_fd
        self._ring_map = mmap(ring_fd, superblock.ring_bytes)
        self._index_map = mmap(index_fd, superblock.geometry.index_bytes)
        os.close(index_fd)
        self._shared_ring_fd = segments.attach(
            segments.segment_name(instance, "ring"), read_only=True
        )
        self._shared_index_fd = segments.attach(
            segments.segment_name(instance, "index"), read_only=True
        )
        self._lanes: dict[int, HeldLane] = {}
        self._lanes_made = 0
        self._scratch = np.empty(LANE_WORDS, np.uint64)
        self.ring: Bytes = np.frombuffer(self._ring_map, np.uint8)
        self._ring_view = memoryview(self._ring_map).toreadonly()
        packed = superblock.pack()
        if recovered:
            self.index = IndexWriter(self._index_map, superblock.geometry)
            self._index_map[: len(packed)] = packed
            self._find_lanes()
        else:
            self.index = IndexWriter.create(superblock.geometry, self._index_map)
            # Last: who finds a superblock finds a whole index.
            self._index_map[: len(packed)] = packed

    @classmethod
    def open(cls, instance: str, ring_bytes: int, max_entries: int, namespaces_max: int = 1024) -> Self:
        """The instance's memory as a former daemon left it, else new memory of which nothing is allocated yet.

        Memory that is found keeps its sizes, whatever is asked for now.

        Raises:
            InstanceBusy: another daemon serves the instance.
            LayoutMismatch: what is there was written by another layout version.
            NotEnoughMemory: the machine cannot hold the ring.
        """
        ring_name, index_name = (
            segments.segment_name(instance, part) for part in ("ring", "index")
        )
        there = segments.existing(instance)
        if ring_name in there:
            ring_fd = segments.attach(ring_name)
            try:
                segments.claim_instance(ring_fd, instance)
                former = _former(index_name, ring_fd) if index_name in there else None
            except BaseException:
                os.close(ring_fd)
                raise
            if former is not None:
                missing = segments.missing(ring_fd)
                for start, size_bytes in missing:
                    # Pages that were set aside, and that nobody wrote to, look the same: now they are.
                    segments.punch(ring_fd, start, size_bytes)
                index_fd = segments.attach(index_name)
                return cls(instance, former, ring_fd, index_fd, recovered=True, missing=missing)
            # A daemon that was killed while it made its memory: nobody can have attached.
            os.close(ring_fd)
        # Lanes too: their pins are of a ring that is gone, and a new lane could not have a stale one's name.
        for name in there:
            segments.remove(name)
        geometry = IndexGeometry.for_entries(max_entries, namespaces_max)
        size_bytes = aligned(ring_bytes)
        segments.check_memory(
            size_bytes + geometry.index_bytes, f"a ring of {ring_bytes} bytes with its index"
        )
        ring_fd = segments.create(ring_name, size_bytes)
        try:
            segments.claim_instance(ring_fd, instance)
            index_fd = segments.create(index_name, geometry.index_bytes)
            segments.allocate(index_fd, 0, geometry.index_bytes)
        except BaseException:
            segments.remove(ring_name)
            segments.remove(index_name)
            raise
        superblock = Superblock(secrets.randbits(63) | 1, 1, size_bytes, geometry)
        return cls(instance, superblock, ring_fd, index_fd, recovered=False, missing=[])

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
        address = segments.address_of(self._ring_map) + start
        if huge_pages:
            segments.advise_huge(address, size_bytes)
        if prefault:
            segments.prefault(address, size_bytes, write=True)

    def punch(self, start: int, size_bytes: int) -> None:
        """Gives pages of the ring back to the system; for a thread. Nobody may look at them until `allocate`."""
        segments.punch(self._ring_fd, start, size_bytes)

    def found(self) -> Iterator[Recovered]:
        """What a former daemon left in the index, slot by slot; published slots are marked for checking."""
        for slot in self.index.slots():
            header: SpanHeader | None = None
            span = os.pread(self._ring_fd, SPAN_HEADER_BYTES, slot.offset)
            if len(span) == SPAN_HEADER_BYTES:
                try:
                    header = SpanHeader.unpack(span)
                except Corrupt:
                    header = None
            piece: Piece | None = None
            if slot.published:
                self.index.mark(slot.number, unverified=True)
                piece = self._piece(slot, header) if header is not None and header.prefix_bytes else None
            yield Recovered(slot.number, header, slot.published, piece)

    def _piece(self, slot: Slot, header: SpanHeader) -> Piece | None:
        """What the record says at an image's beginning, if there is one."""
        at = aligned(slot.tree_bytes)
        if at + header.prefix_bytes > slot.image_bytes:
            return None
        try:
            return Piece.unpack(os.pread(self._ring_fd, header.prefix_bytes, slot.offset + SPAN_HEADER_BYTES + at))
        except BadPrefix:
            return None

    def unverified(self) -> list[Slot]:
        """The published slots whose spans nobody has checked since they were found."""
        return [slot for slot in self.index.slots() if slot.published and slot.unverified]

    def read(self, offset: int, size_bytes: int) -> memoryview:
        """What stands at a place of the ring where a span is: looked at, not copied."""
        return self._ring_view[offset : offset + size_bytes]

    def is_sound(self, slot: Slot) -> bool:
        """Whether a span's image matches its checksum; for a thread. A span that is reused meanwhile may say either."""
        start = slot.offset + SPAN_HEADER_BYTES
        try:
            header = SpanHeader.unpack(os.pread(self._ring_fd, SPAN_HEADER_BYTES, slot.offset))
        except Corrupt:
            return False
        return header.checksum == checksum_of_pieces(self._read(start, start + slot.image_bytes))

    def lend_lane(self, client: int, *, fenced: bool, brought: int | None) -> tuple[int, list[int]]:
        """A lane for `client`: the one it brought along, where that can be had, else a new one.

        Args:
            brought: a descriptor of the lane it had; it stays the caller's.

        Returns:
            The lane's id, and (ring, index, lane) descriptors to send: the first two stay ours, the last is the
            caller's to close, and carries the lock that says the client lives.
        """
        lane = self._lane_brought(brought) if brought is not None else None
        lane = lane or self._new_lane(fenced=fenced)
        lane.client = client
        fd = self._locked(lane)
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
        gone = [
            n for n, lane in self._lanes.items() if lane.client is None and lane.reader.abandoned()
        ]
        for number in gone:
            lane = self._lanes.pop(number)
            segments.remove(lane.name)
            lane.reader.close()
        return len(gone)

    @property
    def fence_is_quick(self) -> bool:
        """Whether every lane's process registered for the expedited fence; else `pins` takes 8 to 16 ms."""
        return all(lane.fenced for lane in self._lanes.values())

    def pins(self) -> frozenset[int]:
        """Every span id that any lane pins, as of now or later: what was pinned before this call is in it."""
        lanes = self.lanes
        if lanes:
            fence(expedited=all(lane.fenced for lane in lanes))
        pinned: set[int] = set()
        for lane in lanes:
            pinned.update(lane.reader.pins(self._scratch).tolist())
        return frozenset(pinned)

    def read_pins(self) -> list[HeldLane]:
        """The lanes, with their numbers of pins brought up to date: to look at, not to reclaim by."""
        for lane in self._lanes.values():
            lane.reader.pins(self._scratch)
        return self.lanes

    def pins_by_lane(self) -> list[Array]:
        """The span ids that each lane pins, (n,) uint64 with repetitions: to look at, not to reclaim by."""
        return [lane.reader.pins(self._scratch) for lane in self._lanes.values()]

    @property
    def lanes(self) -> list[HeldLane]:
        return list(self._lanes.values())

    def close(self, *, drop: bool) -> None:
        """Ends this daemon's hold. `drop` removes the segments' names, else the next daemon finds all as it is."""
        if drop:
            for name in segments.existing(self.instance):
                segments.remove(name)
        for lane in self._lanes.values():
            lane.reader.close()
        for fd in (self._ring_fd, self._shared_ring_fd, self._shared_index_fd):
            os.close(fd)

    def _read(self, start: int, end: int) -> Iterator[bytes]:
        """The ring's [start, end) in pieces; less where the ring's file ends."""
        while start < end and (piece := os.pread(self._ring_fd, min(PIECE_BYTES, end - start), start)):
            yield piece
            start += len(piece)

    def _new_lane(self, *, fenced: bool) -> HeldLane:
        self._lanes_made += 1
        lane_id = self.superblock.epoch << _LANE_COUNTER_BITS | self._lanes_made
        name = segments.segment_name(self.instance, f"lane.{lane_id:x}")
        fd = segments.create(name, LANE_BYTES)
        try:
            segments.allocate(fd, 0, LANE_BYTES)
            os.pwrite(fd, pack_lane_header(lane_id, fenced=fenced), 0)
            return self._hold(name, segments.attach(name, read_only=True))
        except BaseException:
            segments.remove(name)
            raise
        finally:
            os.close(fd)

    def _hold(self, name: str, fd: int) -> HeldLane:
        status = os.fstat(fd)
        lane_id, fenced = unpack_lane_header(os.pread(fd, PAGE_BYTES, 0).ljust(PAGE_BYTES, b"\0"))
        lane = HeldLane(LaneReader(fd, lane_id), name, (status.st_dev, status.st_ino), fenced, None)
        self._lanes[lane_id] = lane
        return lane

    def _lane_brought(self, fd: int) -> HeldLane | None:
        """The lane behind a descriptor that a client sent, if it is one of ours and nobody else's now."""
        status = os.fstat(fd)
        for lane in self._lanes.values():
            if lane.identity == (status.st_dev, status.st_ino):
                return lane if lane.client is None else None
        return None

    def _locked(self, lane: HeldLane) -> int:
        fd = segments.attach(lane.name)
        fcntl.flock(fd, fcntl.LOCK_SH)
        return fd

    def _find_lanes(self) -> None:
        """Takes up the lanes that stand by name, whoever holds them."""
        prefix = segments.segment_name(self.instance, "lane.")
        for name in segments.existing(self.instance):
            if not name.startswith(prefix):
                continue
            fd = segments.attach(name, read_only=True)
            try:
                self._hold(name, fd)
            except (LayoutMismatch, OSError):
                os.close(fd)
                segments.remove(name)


def _former(index_name: str, ring_fd: int) -> Superblock | None:
    """What the index says of a former daemon's memory, with the epoch that is ours now; None if it was never whole."""
    fd = segments.attach(index_name)
    try:
        page = os.pread(fd, PAGE_BYTES, 0)
        index_bytes = os.fstat(fd).st_size
    finally:
        os.close(fd)
    if not any(page):
        return None
    former = Superblock.unpack(page)
    ring_bytes = os.fstat(ring_fd).st_size
    if ring_bytes != former.ring_bytes or index_bytes != former.geometry.index_bytes:
        raise LayoutMismatch(
            f"the superblock says {former.ring_bytes} bytes of ring and {former.geometry.index_bytes} of index, and "
            f"{ring_bytes} and {index_bytes} are there; free them with `tensorctl purge --instance NAME`"
        )
    if former.epoch >= EPOCH_MAX:
        raise SegmentError(
            f"epoch {former.epoch} is the last one; free the memory with `tensorctl purge --instance NAME`"
        )
    return Superblock(former.instance_id, former.epoch + 1, former.ring_bytes, former.geometry)
