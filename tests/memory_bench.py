"""Ring, index and lanes in one process, without a daemon: what a view reads through, with the writer's side at hand.

Owns: anonymous segments of the real layout. `put` does what a daemon does up to publication, `reclaim` what it does to
take a span back: unpublish, fence, look at all lanes, free what nobody pins.
"""

from __future__ import annotations

import fcntl
import os
from mmap import mmap
from typing import Any, Self

import numpy as np

from tensord.client.reading.view import View
from tensord.daemon.store.holes import Holes
from tensord.daemon.store.slots import Slots
from tensord.daemon.store.table import EDGE, LIVE, RowTable
from tensord.shm.index.index import KEY_HASHES, IndexWriter, Slot, _second_bucket
from tensord.shm.lanes.fence import fence, register
from tensord.shm.lanes.lane import Lane
from tensord.shm.lanes.reader import LaneReader
from tensord.shm.payloads.copy import checksum_of
from tensord.shm.payloads.packing import pack
from tensord.shm.ring.layout import (
    BUCKET_SLOTS,
    LANE_BYTES,
    LANE_WORDS,
    SPAN_HEADER_BYTES,
    IndexGeometry,
    SpanHeader,
    Superblock,
    pack_lane_header,
    span_bytes,
)


def key(number: int, tag: bytes = b"namespac") -> bytes:
    """A key told from others by its number, in buckets and with a fingerprint of its own."""
    words = np.array([number * 2 + 1], np.uint64) * np.array(
        [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64
    )
    return tag + words.tobytes()


def slots_for(at: bytes, geometry: IndexGeometry) -> list[int]:
    """The numbers of the 8 or 16 slots in which a key may be."""
    first, second, _ = KEY_HASHES.unpack(at)
    mask = geometry.bucket_count - 1
    buckets = dict.fromkeys((first & mask, _second_bucket(first, second, mask)))
    return [bucket * BUCKET_SLOTS + cell for bucket in buckets for cell in range(BUCKET_SLOTS)]


def memory_file(size_bytes: int, name: str = "tensord-test") -> int:
    fd = os.memfd_create(name)
    os.ftruncate(fd, size_bytes)
    return fd


def opened_anew(fd: int) -> int:
    """A descriptor on the same file with a file description, and so locks, of its own."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR)


def lane_file(lane_id: int = 1) -> int:
    """A descriptor on a lane as a daemon makes it, without a lock."""
    fd = memory_file(LANE_BYTES)
    os.pwrite(fd, pack_lane_header(lane_id), 0)
    return fd


def lent(fd: int) -> int:
    """A descriptor on the lane behind `fd` as a client gets it: it carries the lock that says the client lives."""
    client_fd = opened_anew(fd)
    fcntl.flock(client_fd, fcntl.LOCK_SH)
    return client_fd


def attached() -> tuple[Lane, LaneReader]:
    """Both ends of a new lane; the client's descriptor is closed again, as a client does it."""
    fd = lane_file(7)
    client_fd = lent(fd)
    lane = Lane(client_fd)
    os.close(client_fd)
    return lane, LaneReader(fd, 7)


class MemoryBench:
    """One ring with its index. Use as a context manager: descriptors are closed, and the index is checked."""

    def __init__(self, ring_bytes: int = 1 << 20, buckets: int = 64, epoch: int = 1) -> None:
        register()
        self.geometry = IndexGeometry(buckets)
        self.superblock = Superblock(7, epoch, ring_bytes, self.geometry, ring_bytes, self.geometry.entries_max)
        self.ring_fd = memory_file(ring_bytes)
        self.index_fd = memory_file(self.geometry.index_bytes)
        self._index_map = mmap(self.index_fd, self.geometry.index_bytes)
        packed = self.superblock.pack()
        self._index_map[: len(packed)] = packed
        self.index = IndexWriter.create(self.geometry, self._index_map)
        self.slots = Slots(memoryview(self._index_map), self.geometry)
        self.table = RowTable(16, epoch)
        self.holes = Holes(self.table, ring_bytes)
        self._rows: dict[int, int] = {}
        self.bytes: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(mmap(self.ring_fd, ring_bytes), np.uint8)
        self.readers: list[LaneReader] = []
        self.evicted: dict[int, Slot] = {}
        self._scratch = np.empty(LANE_WORDS, np.uint64)
        self._spans = 0
        self._lanes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for reader in self.readers:
            reader.close()
        os.close(self.ring_fd)
        os.close(self.index_fd)
        if error[0] is None:
            self.index.check_invariants()
            self.holes.check_invariants()

    # ---- readers

    def lane(self) -> Lane:
        self._lanes += 1
        fd = lane_file(self._lanes)
        client_fd = lent(fd)
        self.readers.append(LaneReader(fd, self._lanes))
        lane = Lane(client_fd)
        os.close(client_fd)
        return lane

    def view(self, lane: Lane | None = None) -> View:
        """A view of all that is published, through `lane` or a lane of its own."""
        return View.open(self.ring_fd, self.index_fd, lane or self.lane())

    # ---- the writer

    def write(self, at: bytes, tree: Any, *, corrupt: bool = False) -> Slot | None:
        """Puts the payload into the ring and reserves a slot for it; None where one of them is full."""
        payload = pack(tree)
        slot = self._taken(at, len(payload.header), payload.payload_bytes)
        if slot is None:
            return None
        start = slot.offset + SPAN_HEADER_BYTES
        there = self.bytes[start : start + payload.payload_bytes]
        payload.write(there.data, 0)
        checksum = checksum_of(there) ^ corrupt
        header = SpanHeader(at, slot.span_id, payload.payload_bytes, len(payload.header), checksum, 5, 100.0, 0.0, 1000)
        self.bytes[slot.offset : start] = np.frombuffer(header.pack(), np.uint8)
        return slot

    def _taken(self, at: bytes, tree_bytes: int, payload_bytes: int) -> Slot | None:
        """A place in the ring and a slot for it; None where one of them is full."""
        row = self.holes.take(span_bytes(payload_bytes), LIVE)
        if row == EDGE:
            return None
        self._spans += 1
        offset = int(self.table.offsets[row])
        slot = self.slots.take(at, self.superblock.epoch << 48 | self._spans, tree_bytes << 48 | offset, payload_bytes)
        if slot < 0:
            self.holes.free(row)
            return None
        self._rows[slot] = row
        return self.index.read(slot)

    def put(self, at: bytes, tree: Any, *, unverified: bool = False, corrupt: bool = False) -> Slot:
        """Writes and publishes; `unverified` as a restarted daemon marks it, `corrupt` with a wrong checksum."""
        slot = self.write(at, tree, corrupt=corrupt)
        assert slot is not None, "the test's ring or index is full"
        self.index.mark(slot.number, unverified=unverified)
        self.slots.publish(slot.number)
        return self.index.read(slot.number)

    def find(self, at: bytes) -> Slot | None:
        slots = map(self.index.read, slots_for(at, self.geometry))
        found = [slot for slot in slots if slot.published and slot.key == at]
        assert len(found) <= 1
        return found[0] if found else None

    def pins(self) -> set[int]:
        """Every span id pinned in any lane, after the fence."""
        fence(expedited=True)
        return {int(number) for reader in self.readers for number in reader.pins(self._scratch)}

    def evict(self, at: bytes) -> Slot:
        """Unpublishes the entry; its span waits for `reclaim`."""
        slot = self.find(at)
        assert slot is not None
        self.slots.unpublish(slot.number)
        self.evicted[slot.span_id] = slot
        return slot

    def move(self, at: bytes) -> bool:
        """Copies the entry to another place, shows the copy and hides the entry; False without room for it."""
        old = self.find(at)
        assert old is not None
        slot = self._taken(at, old.tree_bytes, old.payload_bytes)
        if slot is None:
            return False
        size = span_bytes(old.payload_bytes)
        self.bytes[slot.offset : slot.offset + size] = self.bytes[old.offset : old.offset + size]
        header = SpanHeader.unpack(self.bytes[old.offset : old.offset + SPAN_HEADER_BYTES].tobytes())
        packed = np.frombuffer(header.moved_to(slot.span_id).pack(), np.uint8)
        self.bytes[slot.offset : slot.offset + SPAN_HEADER_BYTES] = packed
        self.slots.move(old.number, slot.number)
        self.evicted[old.span_id] = old
        return True

    def reclaim(self) -> set[int]:
        """Frees evicted spans that no lane pins, and writes 0xEE over them.

        Returns:
            The span ids that were freed.
        """
        freed = self.evicted.keys() - self.pins()
        for number in freed:
            slot = self.evicted.pop(number)
            size = span_bytes(slot.payload_bytes)
            self.slots.release(slot.number)
            self.holes.free(self._rows.pop(slot.number))
            self.bytes[slot.offset : slot.offset + size] = 0xEE
        return set(freed)
