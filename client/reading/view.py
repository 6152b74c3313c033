"""The read path of a get: probe, read the slot, pin, check the slot again, make a view. No message, no lock.

Owns: one attachment's mappings (ring, index, lane) and every read through them, also after the daemon has gone.
Invariants: a view of ring bytes exists only under a pin that was published before the slot's seq was seen unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from mmap import MAP_SHARED, PROT_READ, mmap
from struct import error as struct_error
from typing import Any, Self
from weakref import ref

import numpy as np
from numpy import ndarray, uint8

from ...errors import BadTree, Corrupt, LayoutMismatch
from ...shm.index.index import KEY_HASHES, PLACE_OFFSET_MASK, PLACE_UNVERIFIED, SLOT, IndexReader, bad_key
from ...shm.lanes.lane import HEAD_AT, LOG_AT, LOG_MASK, Lane
from ...shm.ring.layout import BUCKET_BYTES, PAGE_BYTES, SLOT_BYTES, SLOT_WORDS, SPAN_HEADER_BYTES, Superblock
from ..arguments.checks import check_key
from .lease import ArrayLease, Batch, Lease, Recipes, RingReader, lease_over
from .ring_mapping import LOOKS_MAX, Entry, RingMapping, check_span, read_entry

Array = np.ndarray[Any, Any]


class View:
    """One attachment: the ring and the index, mapped read-only, and this client's own lane.

    `wait_for_own`: called at a miss. Waits for a put of the key by this client; returns whether to look again.
    """

    __slots__ = ("_identity", "_recipes", "_ring", "geometry", "index", "lane", "ring", "ring_bytes", "wait_for_own")

    def __init__(
        self, ring: RingMapping, index: IndexReader, superblock: Superblock, identity: tuple[int, int]
    ) -> None:
        self._ring = ring
        self.index = index
        self._identity = identity
        self._recipes = Recipes()
        self.lane = ring.lane
        self.ring = RingReader(ring, self._recipes)
        self.ring_bytes = superblock.limit_bytes
        self.geometry = superblock.geometry
        self.wait_for_own: Callable[[bytes], bool] = _no_put

    @classmethod
    def open(cls, ring_fd: int, index_fd: int, lane: Lane) -> Self:
        """Maps the segments that the daemon sent. The caller keeps the descriptors. Raises LayoutMismatch for another
        layout."""
        index_bytes = os.fstat(index_fd).st_size
        if index_bytes < PAGE_BYTES:
            raise LayoutMismatch(f"the index has {index_bytes} bytes, less than its superblock's {PAGE_BYTES}")
        memory = mmap(index_fd, index_bytes, MAP_SHARED, PROT_READ)
        superblock = Superblock.unpack(memory[:PAGE_BYTES])
        if superblock.geometry.index_bytes != index_bytes:
            raise LayoutMismatch(
                f"the index has {index_bytes} bytes; its superblock says {superblock.geometry.index_bytes}"
            )
        ring = RingMapping(ring_fd, superblock.ring_bytes, MAP_SHARED, PROT_READ)
        ring.begin(lane, ring_fd, superblock.instance_id, memory)
        return cls(ring, IndexReader(memory, superblock.geometry), superblock, _identity(index_fd))

    def is_over(self, index_fd: int) -> bool:
        """Whether the mapped index is the memory behind `index_fd`."""
        return self._identity == _identity(index_fd)

    @property
    def mapped_bytes(self) -> int:
        """The bytes of the ring that are mapped."""
        return len(self._ring)

    @property
    def is_whole(self) -> bool:
        """Whether all of the ring is mapped. A restarted daemon may have enlarged the ring."""
        return len(self._ring) >= Superblock.unpack(self.index.memory[:PAGE_BYTES]).ring_bytes

    def get(self, key: bytes) -> Lease | None:
        """Returns a lease on the entry of `key`, or None on a miss. Raises BadKey unless `key` is 32 bytes.

        The whole hit path stands in this one function, because each call between two steps would slow a hit by about 5
        %. Rare cases go to `_get_slowly`: a changed slot, a full lane, an unverified entry.
        """
        try:
            first, second, fingerprint = KEY_HASHES.unpack(key)
        except (struct_error, TypeError, ValueError, BufferError):
            given: object = key
            if isinstance(given, memoryview):
                # Its bytes may not lie side by side.
                return self._get_slowly(key)
            raise bad_key(key) from None

        # Probe: the bucket's line of eight fingerprints gives the slot to read.
        index = self.index
        memory = index.memory
        mask = index.mask
        line = index.buckets_at + (first & mask) * BUCKET_BYTES
        at = memory.find(fingerprint, line, line + SLOT_BYTES)
        if at < 0:
            if not (first ^ second) & mask:
                # Both hashes give one bucket: the second bucket is its neighbour.
                second ^= 1
            line = index.buckets_at + (second & mask) * BUCKET_BYTES
            at = memory.find(fingerprint, line, line + SLOT_BYTES)
            if at < 0:
                if type(key) is not bytes:
                    check_key(key)
                # The entry may have been moved meanwhile: see `IndexReader.find`.
                if self.index.probe(key) is not None or self.wait_for_own(key):
                    return self._get_slowly(key)
                self.lane.log_miss()
                return None

        # Read the slot. SYNC POINT: seq first, then the body, as in IndexReader.find.
        slot_at = line + SLOT_BYTES + (at - line) * SLOT_WORDS
        seq, found, span_id, place, payload_bytes = SLOT.unpack_from(memory, slot_at)
        try:
            unusual = found != key or seq & 1 or place & PLACE_UNVERIFIED
        except ValueError:
            # `key` is a numpy array: its comparison is elementwise.
            raise bad_key(key) from None
        if unusual:
            return self._get_slowly(key)

        # Pin. Load `words` before the free list: Lane.freeze depends on this order.
        lane = self.lane
        words = lane.words
        try:
            word = lane.free.pop()
        except IndexError:
            return self._get_slowly(key)
        try:
            words[word] = span_id
            # Check the slot again. SYNC POINT: the pin is stored before seq is loaded; the daemon's fence covers the
            # store-load reordering that x86-64 allows.
            if index.words[slot_at >> 3] == seq:
                # View.
                ring = self._ring
                start = (place & PLACE_OFFSET_MASK) + SPAN_HEADER_BYTES
                known = self._recipes[ring[start : start + (place >> 48)]]
                if known.single is None:
                    root: Array = ndarray((payload_bytes,), uint8, ring, start)
                    lease = Lease(root, known, payload_bytes)
                else:
                    shape, dtype, offset = known.single
                    root = ndarray(shape, dtype, ring, start + offset)
                    lease = ArrayLease(root, known, payload_bytes)

                # Log the hit.
                head = next(lane.heads)
                words[LOG_AT + (head & LOG_MASK)] = span_id
                words[HEAD_AT] = head + 1

                # Tie the pin to the root's lifetime. This is the last step: an exception of a signal handler comes
                # before it, or not in this function. So no word is given back twice.
                lane.refs[word] = ref(root, lane.releases[word] or lane.new_release(word))
                return lease
        except (BadTree, TypeError):
            # TypeError: the buffer is too small. The ring has grown, and the span is beyond the part mapped here
            # (`is_whole`).
            lane.unpin(word)
            lane.log_miss()
            return None
        except BaseException:
            lane.unpin(word)
            raise
        lane.unpin(word)
        return self._get_slowly(key)

    def hold(self, key: bytes) -> Lease | None:
        """`get` that counts neither a use, nor a hit, nor a miss."""
        return self._get_slowly(key, counted=False)

    def get_many(self, keys: Array) -> Batch:
        """Leases on the entries of (n, 32) uint8 keys, all pinned before the first is read."""
        batch, spans, rest = self._pinned_many(keys)
        found = batch.found
        self.lane.log_many(spans[found])
        self.lane.log_misses(len(keys) - len(rest) - int(np.count_nonzero(found)))
        for i in rest:
            # A full lane copies the payload, as in get.
            batch.add_copy(int(i), self._get_slowly(keys[i].tobytes(), check=True))
        return batch

    def hold_many(self, keys: Array) -> Batch:
        """`get_many` that counts no uses, hits or misses. An entry for which the lane has no free word is a miss."""
        return self._pinned_many(keys)[0]

    def current(self, tag: bytes) -> int:
        """The current generation of a namespace; 0 if it was never invalidated."""
        return self.index.generations.current(tag)

    def contains(self, key: bytes) -> bool:
        """Whether a get would hit now. Takes no lease and counts no use."""
        hit = self.index.find(key) or (self.index.find(key) if self.wait_for_own(key) else None)
        if hit is None:
            return False
        *_, place, payload_bytes = hit
        return (place & PLACE_OFFSET_MASK) + SPAN_HEADER_BYTES + payload_bytes <= len(self._ring)

    def peek(self, key: bytes) -> Entry | None:
        """The entry's metadata. Counts no use. An entry with a damaged header is a miss."""
        entry = read_entry(self.index, self._ring, key)
        return read_entry(self.index, self._ring, key) if entry is None and self.wait_for_own(key) else entry

    def lease_within(self, root: Array, place: int, payload_bytes: int) -> Lease:
        """A lease on one span of a batch. `root` covers the whole ring and holds all pins of the batch."""
        start = (place & PLACE_OFFSET_MASK) + SPAN_HEADER_BYTES
        return lease_over(root, start, payload_bytes, self._recipes[self._ring[start : start + (place >> 48)]])

    def verified(self, key: bytes) -> Lease | None:
        """`get` that first checks the payload against its checksum. Raises Corrupt if it differs."""
        return self._pinned(key, check=True)

    def _get_slowly(self, key: bytes, *, check: bool = False, counted: bool = True) -> Lease | None:
        """The rare cases of `get`: a changed slot, a full lane, an entry that is not verified yet, an odd key. A
        corrupt entry is a miss."""
        try:
            return self._pinned(check_key(key), check=check, counted=counted)
        except Corrupt:
            if counted:
                self.lane.log_miss()
            return None

    def _pinned_many(self, keys: Array) -> tuple[Batch, Array, Array]:
        """Pins the entries found for (n, 32) uint8 keys. Returns the batch, all span ids, and the positions for which
        the lane had no free word."""
        found, at, seq, spans, places, lengths = self.index.find_many(keys)
        lane = self.lane
        lane_words = lane.words
        hits = np.flatnonzero(found)
        words = lane.take_many(len(hits))
        hits, rest = hits[: len(words)], hits[len(words) :]
        found[rest] = False
        root: Array = ndarray((len(self._ring),), uint8, self._ring)
        numbers = lane.tie_many(words, root)
        np.frombuffer(lane_words, "u8")[numbers] = spans[hits]
        # SYNC POINT: as in get, all pins are stored before any seq is checked again.
        unchanged = np.frombuffer(self.index.words, "u8")[at[hits]] == seq[hits]
        # Spans beyond the mapped part of the ring are misses, as in get.
        ends = (places[hits] & np.uint64(PLACE_OFFSET_MASK)) + np.uint64(SPAN_HEADER_BYTES) + lengths[hits]
        unchanged &= ends <= np.uint64(len(self._ring))
        found[hits] = unchanged
        for i in hits[unchanged & (places[hits] & np.uint64(PLACE_UNVERIFIED) != 0)]:
            found[i] = self._ring.is_sound(int(places[i]) & PLACE_OFFSET_MASK, int(lengths[i]))
        return Batch(self, root, found, places, lengths), spans, rest

    def _pinned(self, key: bytes, *, check: bool, counted: bool = True) -> Lease | None:
        """A lease on a pinned entry. If the lane has no free word: on a copy, of a slot that did not change meanwhile.

        Raises Corrupt if the payload differs from the one that was stored: looked at with `check`, before the first use
        of an entry that nobody has checked, and of a copy.
        """
        lane, ring = self.lane, self._ring
        for _ in range(LOOKS_MAX):
            hit = self.index.find(key)
            if hit is None:
                if self.wait_for_own(key):
                    continue
                break
            at, seq, span_id, place, payload_bytes = hit
            offset, span_size_bytes = place & PLACE_OFFSET_MASK, SPAN_HEADER_BYTES + payload_bytes
            word: int | None = None
            lease: Lease | None = None
            with suppress(IndexError):
                word = lane.pin(span_id)
            try:
                # If it differs, the place and the length may belong to two different spans.
                unchanged = self.index.words[at] == seq
                if unchanged and word is None:
                    span = ring.copied(offset, span_size_bytes)
                    span.flags.writeable = False
                    unchanged = self.index.words[at] == seq
                elif unchanged:
                    span = ndarray((span_size_bytes,), uint8, ring, offset)
                if unchanged:
                    payload = span[SPAN_HEADER_BYTES:]
                    if check or word is None or place & PLACE_UNVERIFIED:
                        check_span(span[:SPAN_HEADER_BYTES].tobytes(), payload)
                    lease = lease_over(payload, 0, payload_bytes, self._recipes[payload[: place >> 48].tobytes()])
            except TypeError:
                # As in get: the span is beyond the mapped part of the ring.
                break
            finally:
                if lease is None and word is not None:
                    lane.unpin(word)
            if lease is None:
                continue
            if word is not None:
                lane.tie(word, span)
            if counted:
                lane.log(span_id)
            return lease
        if counted:
            lane.log_miss()
        return None


def _no_put(_: bytes) -> bool:
    return False


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
