"""The table of keys and spans in shared memory: one writer, any number of readers, no locks.

    a bucket: nine cells of 64 bytes, which are a line of eight fingerprints and eight slots
    a slot:   seq │ key, four words │ span id │ place │ length                  (words of 8 bytes)

The stores that take, publish and free slots are the daemon's (daemon/store).

States of a slot. `seq` only rises, across restarts too:

    free (odd, span id 0) → reserved (odd) → published (even) → unpublished (odd) → free
                                                 ↑________________________│ republished, if a scan finds it pinned

Invariants: an even seq means that key, span id, place and length are complete and belong together. A slot with a span
id is allocated, whatever its seq. A key is published in at most one slot.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from math import ceil
from mmap import mmap
from typing import Any, Final

import numpy as np
from msgspec import Struct

from ...errors import BadKey
from ..ring.layout import (
    ALIGN_BYTES,
    BUCKET_BYTES,
    BUCKET_SLOTS,
    KEY_BYTES,
    SLOT_BYTES,
    SLOT_WORDS,
    SPAN_COUNTER_BITS,
    IndexGeometry,
)
from .generations import GenerationReader, GenerationWriter

SLOT: Final = struct.Struct("@Q32sQQQ")
"""A whole slot: seq, key, span id, place word, payload bytes."""
SPAN, PLACE, LENGTH = 5, 6, 7
"""Indices of words within a slot."""
BUCKET_CELLS: Final = 1 + BUCKET_SLOTS

# A slot's place word has all that a hit needs to make its views: the span's ring offset (bits 6 to 47, since spans are
# 64-byte aligned), the length of its tree header (bits 48 to 63), and in bit 0 whether a restarted daemon still has to
# verify the span's checksum.
PLACE_OFFSET_MASK: Final = (1 << 48) - ALIGN_BYTES
PLACE_UNVERIFIED: Final = 1

# A slot's reuse word: the entry's total number of uses (bits 0 to 15), the time of its last use (bits 16 to 47, in
# ticks of the daemon's clock, 0 for never), and the number of lanes that pin it (bits 48 to 63). All three are hints
# written by the daemon. A number that does not fit is stored as the field's maximum.
REUSE_USED_SHIFT: Final = 16
REUSE_HOLDERS_SHIFT: Final = 48
REUSE_USES_MAX: Final = (1 << REUSE_USED_SHIFT) - 1
REUSE_TICKS_PER_S: Final = 64
REUSE_TICKS_MAX: Final = (1 << REUSE_HOLDERS_SHIFT - REUSE_USED_SHIFT) - 1
REUSE_HOLDERS_MAX: Final = (1 << 64 - REUSE_HOLDERS_SHIFT) - 1

# A key's bytes 8 to 24 come from a digest, so they serve as its hashes. The first eight bytes are the namespace's tag.
KEY_HASHES: Final = struct.Struct("@8xII8s8x")
_ALL_FOUR: Final = np.uint32(0x01010101)  # four bools, all of them True

SPAN_IDS_AT_ONCE: Final = 32_768
"""Slots that one step of a scan over all slots reads: 1 to 2 ms."""

Array = np.ndarray[Any, Any]
Hit = tuple[int, int, int, int, int]
"""(index of the seq word, seq, span id, place word, payload bytes) of a published slot."""


class Slot(Struct, frozen=True):
    """A copy of one slot. `offset`: of the span in the ring. `tree_bytes`: of the tree header."""

    number: int
    seq: int
    key: bytes
    span_id: int
    offset: int
    tree_bytes: int
    payload_bytes: int
    unverified: bool

    @property
    def published(self) -> bool:
        return not self.seq & 1


def cells_of(memory: memoryview | mmap | bytearray, geometry: IndexGeometry) -> Array:
    """All buckets as (9 × bucket_count, 8) words."""
    words = geometry.bucket_count * BUCKET_CELLS * SLOT_WORDS
    return np.frombuffer(memory, "u8", words, geometry.buckets_at).reshape(-1, SLOT_WORDS)


def slots_of(cells: Array) -> Array:
    """All slots as (bucket_count, 8, 8) words."""
    return cells.reshape(-1, BUCKET_CELLS, SLOT_WORDS)[:, 1:]


def slot_at(buckets_at: int, number: int) -> int:
    """Index of a slot's first word. `buckets_at`: that of the first bucket's."""
    return buckets_at + (number // BUCKET_SLOTS + number + 1) * SLOT_WORDS


def read_slot(memory: memoryview | mmap, at: int, number: int) -> Slot:
    """A copy of the slot whose first word has index `at`."""
    seq, key, span, place, payload_bytes = SLOT.unpack_from(memory, at * 8)
    unverified = bool(place & PLACE_UNVERIFIED)
    return Slot(number, seq, key, span, place & PLACE_OFFSET_MASK, place >> 48, payload_bytes, unverified)


def reuse_ticks(used_s: float) -> int:
    """`used_s` in ticks. Rounded up, so that a use is newer than every earlier put."""
    return min(ceil(used_s * REUSE_TICKS_PER_S), REUSE_TICKS_MAX)


class IndexReader:
    """Lookups over a read-only mapping of the index segment. Its attributes are public for the client's view of the
    ring, which repeats the common case of `find` without a call."""

    __slots__ = ("_cells", "_reuse_at", "buckets_at", "generations", "mask", "memory", "words")

    def __init__(self, memory: mmap, geometry: IndexGeometry) -> None:
        self.memory = memory
        self.mask = geometry.bucket_count - 1
        self.buckets_at = geometry.buckets_at
        self.words = memoryview(memory).cast("Q")
        self.generations = GenerationReader(memory, geometry)
        self._reuse_at = geometry.uses_at >> 3
        self._cells = cells_of(memory, geometry)

    def find(self, key: bytes) -> Hit | None:
        """The published slot of `key`, or None. The caller checks `words[at] == seq` after it has used the result, for
        instance after it has pinned the span. Raises BadKey if `key` is not 32 bytes. A miss is looked up twice: the
        daemon may have moved the entry, while it was looked up, to a place where the lookup had been before. The new
        slot is published before the old one is hidden, so the second lookup finds it."""
        return self.probe(key) or self.probe(key)

    def probe(self, key: bytes) -> Hit | None:
        """As `find`, but looks once: misses an entry that is moved meanwhile."""
        try:
            first, second, fingerprint = KEY_HASHES.unpack(key)
        except (struct.error, TypeError, ValueError):
            raise bad_key(key) from None
        memory = self.memory
        for bucket in (first & self.mask, _second_bucket(first, second, self.mask)):
            line = self.buckets_at + bucket * BUCKET_BYTES
            at = memory.find(fingerprint, line, line + SLOT_BYTES)
            while at >= 0:
                if not at & 7:
                    slot_at = line + SLOT_BYTES + (at - line) * SLOT_WORDS
                    # SYNC POINT: seq is loaded first, then the body; x86-64 keeps loads in order. ARM needs an
                    # acquire load of seq.
                    seq, found, span_id, place, payload_bytes = SLOT.unpack_from(memory, slot_at)
                    if found == key and not seq & 1:
                        return slot_at >> 3, seq, span_id, place, payload_bytes
                at = memory.find(fingerprint, at + 1, line + SLOT_BYTES)
        return None

    def reuse(self, at: int) -> tuple[int, int]:
        """(uses, holders) of the slot whose seq word is at index `at`. Valid if seq is still unchanged afterwards."""
        bucket, cell = divmod((at - (self.buckets_at >> 3)) // SLOT_WORDS, BUCKET_CELLS)
        word = self.words[self._reuse_at + bucket * BUCKET_SLOTS + cell - 1]
        return word & REUSE_USES_MAX, word >> REUSE_HOLDERS_SHIFT

    def find_many(self, keys: Array) -> tuple[Array, Array, Array, Array, Array, Array]:
        """`find` for many keys, (n, 32) uint8.

        Returns:
            (found, at, seq, span_id, place, payload_bytes): `found` (n,) bool; the others (n,) integers, defined where
            `found` is True. As with `find`, the caller checks `words[at] == seq` afterwards.
        """
        columns = self._probe_many(keys)
        missed = np.flatnonzero(~columns[0])
        if len(missed):
            for column, again in zip(columns, self._probe_many(keys[missed]), strict=True):
                column[missed] = again
        return columns

    def _probe_many(self, keys: Array) -> tuple[Array, Array, Array, Array, Array, Array]:
        """`probe` for many keys."""
        wide = keys.view("<u8")
        hashes = keys.view("<u4")[:, 2:4] & np.uint32(self.mask)
        fingerprints = wide[:, 2]
        first = hashes[:, 0].astype(np.intp)
        # Cells of 64 bytes. A bucket has nine: its line of fingerprints, then eight slots.
        line = first * BUCKET_CELLS
        same = self._cells.take(line, axis=0) == fingerprints[:, None]
        cell = line + 1 + same.argmax(axis=1)
        # Eight bools are read as one word. It is zero if the first bucket lacks the fingerprint.
        rest = np.flatnonzero(same.view(np.uint64)[:, 0] == 0)
        if len(rest):
            second = hashes[rest, 1].astype(np.intp)
            second ^= (second == first[rest]) & bool(self.mask)
            line = second * BUCKET_CELLS
            same = self._cells.take(line, axis=0) == fingerprints[rest, None]
            cell[rest] = line + 1 + same.argmax(axis=1)
        # SYNC POINT: every seq is loaded before any body, since the copy of a whole slot may read its words in any
        # order. The words are taken from a flat view: `take` of a column would copy the whole column first.
        seq = self._cells.reshape(-1).take(cell * SLOT_WORDS)
        slots = self._cells.take(cell, axis=0)
        mine = (slots[:, 1:5] == wide).view(np.uint32)[:, 0] == _ALL_FOUR
        found = mine & ((seq & np.uint64(1)) == 0)
        at = (self.buckets_at >> 3) + cell * SLOT_WORDS
        return found, at, seq, slots[:, SPAN], slots[:, PLACE], slots[:, LENGTH]

    def later_than(self, epoch: int) -> Iterator[Slot]:
        """Allocated slots, published or not, whose span ids have an epoch above `epoch`, in descending order of span
        id."""
        spans = slots_of(self._cells)[:, :, SPAN].reshape(-1)
        later = np.flatnonzero(spans >> np.uint64(SPAN_COUNTER_BITS) > epoch)
        return self._read(later[np.argsort(spans[later])[::-1]])

    def unpublished(self) -> Iterator[Slot]:
        """Allocated slots that are not published, in ascending order of numbers."""
        slots = slots_of(self._cells).reshape(-1, SLOT_WORDS)
        return self._read(np.flatnonzero((slots[:, SPAN] != 0) & (slots[:, 0] & np.uint64(1) != 0)))

    def _read(self, numbers: Array) -> Iterator[Slot]:
        for number in numbers.tolist():
            yield read_slot(self.memory, slot_at(self.buckets_at >> 3, number), number)


class IndexWriter:
    """The daemon's side. `daemon/store` has the stores that publish and hide slots."""

    def __init__(self, memory: memoryview | mmap | bytearray, geometry: IndexGeometry) -> None:
        self.geometry = geometry
        self.generations = GenerationWriter(memory, geometry)
        self._memory = memoryview(memory).cast("B")
        self._words = self._memory.cast("Q")
        self._cells = cells_of(self._memory, geometry)
        self._slots = slots_of(self._cells)
        self._buckets_at = geometry.buckets_at >> 3
        self._reuse = np.frombuffer(self._memory, "u8", geometry.slot_count, geometry.uses_at)
        self._repair_free_slots()
        self._repair_fingerprints()

    @classmethod
    def create(cls, geometry: IndexGeometry, memory: memoryview | mmap | bytearray) -> IndexWriter:
        """An empty index over zeroed `memory`. Every slot's seq becomes 1."""
        slots_of(cells_of(memory, geometry))[:, :, 0] = 1
        GenerationWriter.create(memory, geometry)
        return cls(memory, geometry)

    def mark(self, slot: int, *, unverified: bool) -> None:
        """Sets or clears the flag that makes readers verify the span's checksum first. One word: seq stays."""
        at = slot_at(self._buckets_at, slot) + PLACE
        self._words[at] = self._words[at] & ~PLACE_UNVERIFIED | unverified

    def held(self) -> Array:
        """The span ids of all slots that a client holds, as the daemon last stored it, (n,) uint64."""
        held: Array = self._slots[:, :, SPAN].reshape(-1)[self._reuse >> np.uint64(REUSE_HOLDERS_SHIFT) != 0]
        return held

    def span_ids(self) -> Iterator[Array]:
        """The span ids of all allocated slots, published or not, in sorted arrays of up to SPAN_IDS_AT_ONCE, (n,)
        uint64. A slot that is allocated during the whole iteration is in one of the arrays."""
        slots, step = self._slots, SPAN_IDS_AT_ONCE // BUCKET_SLOTS
        for first in range(0, len(slots), step):
            spans = slots[first : first + step, :, SPAN].reshape(-1)
            yield np.sort(spans[spans != 0])

    def read(self, slot: int) -> Slot:
        """A copy of the slot, whatever its state."""
        return read_slot(self._memory, slot_at(self._buckets_at, slot), slot)

    def slots(self) -> Iterator[Slot]:
        """Every allocated slot, in ascending order of numbers."""
        for number in np.flatnonzero(self._slots[:, :, SPAN]):
            yield self.read(int(number))

    def check_invariants(self) -> None:
        """Asserts the invariants of the module's docstring."""
        self.generations.check_invariants()
        keys: set[bytes] = set()
        mask = self.geometry.bucket_count - 1
        lines = self._cells[::BUCKET_CELLS]
        for slot in self.slots():
            bucket, cell = divmod(slot.number, BUCKET_SLOTS)
            assert not slot.offset % ALIGN_BYTES
            if slot.published:
                first, second, _ = KEY_HASHES.unpack(slot.key)
                buckets = first & mask, _second_bucket(first, second, mask)
                assert bucket in buckets, f"slot {slot.number} is in no bucket of its key"
                assert slot.key not in keys, f"{slot.key.hex()} is published twice"
                keys.add(slot.key)
            assert lines[bucket, cell] == (int.from_bytes(slot.key[16:24], "little") if slot.published else 0)

    def _repair_free_slots(self) -> None:
        """Makes the seq of free slots odd. A reader could take a free slot with an even seq for an entry."""
        seqs = self._slots[:, :, 0]
        wrong = np.nonzero((seqs & np.uint64(1) == 0) & (self._slots[:, :, SPAN] == 0))
        seqs[wrong] |= np.uint64(1)

    def _repair_fingerprints(self) -> None:
        """Corrects the fingerprints that a daemon left if it was killed between the stores of seq and fingerprint."""
        slots = self._slots
        published = (slots[:, :, 0] & np.uint64(1) == 0) & (slots[:, :, SPAN] != 0)
        right = np.where(published, slots[:, :, 3], np.uint64(0))
        lines = self._cells[::BUCKET_CELLS]
        wrong = np.nonzero(lines != right)
        lines[wrong] = right[wrong]


def bad_key(key: object) -> BadKey:
    """The error for a value that is not a key."""
    found = type(key).__name__
    try:
        if isinstance(key, memoryview) and (key.ndim != 1 or key.format != "B"):
            found = f"a memoryview of shape {key.shape} and format {key.format!r}; bytes(key) makes bytes of it"
        elif isinstance(key, (bytes, bytearray, memoryview)):
            found = f"{len(key)} bytes"
    except ValueError:
        found = "a memoryview that was released"
    return BadKey(f"a key is {KEY_BYTES} bytes, as Namespace.key() makes them; this one is {found}")


def _second_bucket(first: int, second: int, mask: int) -> int:
    bucket = second & mask
    return bucket if bucket != first & mask else bucket ^ (1 & mask)
