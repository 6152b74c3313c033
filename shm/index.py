"""The key → span table in shared memory: one writer, any number of readers, no locks.

Owns: finding a key's two buckets, the fingerprint line that says which of a bucket's eight slots to read, and the
seqlock of each slot. Does not own what a span holds, nor who may reuse it.

A slot's life, with `seq` only ever rising, across restarts too:

    free (odd, span id 0) → reserved (odd) → published (even) → unpublished (odd) → free
                                                 ↑________________________│ republished, if a scan finds it pinned

Invariants: even means that key, span id, place and length are whole and belong together; a slot with a span id is
allocated, whatever its seq; a key is published in one slot at most.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from mmap import mmap
from typing import Any, Final

import numpy as np

from ..errors import BadKey
from .generations import GenerationReader, GenerationWriter
from .layout import (
    ALIGN_BYTES,
    BUCKET_BYTES,
    BUCKET_SLOTS,
    KEY_BYTES,
    PLACE_OFFSET_MASK,
    PLACE_UNVERIFIED,
    REUSE_HOLDERS_SHIFT,
    REUSE_USED_SHIFT,
    REUSE_USES_MAX,
    SLOT_BYTES,
    SLOT_WORDS,
    SPAN_COUNTER_BITS,
    IndexGeometry,
    pack_place,
    pack_reuse,
    reuse_ticks,
    reuse_used_s,
    unpack_reuse,
)

# A key's bytes are a digest's, so its own bits choose its buckets. The first eight are the namespace's.
KEY_HASHES: Final = struct.Struct("@8xII8s8x")
SLOT: Final = struct.Struct("@Q32sQQQ")
_USE: Final = np.uint64((1 << REUSE_HOLDERS_SHIFT) - 1)
"""What a reuse word tells of uses."""
_SEQ_MAX: Final = (1 << 64) - 1
"""Behind it comes 0. No daemon counts so far, but a damaged slot may stand there."""
_SLOT_KEY: Final = struct.Struct("@32s")
_SPAN, _PLACE, _LENGTH = 5, 6, 7
_BUCKET_CELLS: Final = 1 + BUCKET_SLOTS
_ALL_FOUR: Final = np.uint32(0x01010101)  # four bools, all of them true

SPAN_IDS_AT_ONCE: Final = 32_768
"""Slots that one step over all of them looks at: 1 to 2 ms."""

Array = np.ndarray[Any, Any]

Hit = tuple[int, int, int, int, int]
"""(seq word's index, seq, span id, place, payload bytes) of a published slot."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot as read: `offset` and `payload_bytes` in bytes, `tree_bytes` of the payload's tree header."""

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


class IndexReader:
    """Lookups over a (read-only) mapping of the index segment. Its parts are open to the one function that every hit
    runs through, which repeats the common case of `find` without the call."""

    __slots__ = ("_cells", "_reuse_at", "buckets_at", "generations", "mask", "memory", "words")

    def __init__(self, memory: mmap, geometry: IndexGeometry) -> None:
        self.memory = memory
        self.mask = geometry.bucket_count - 1
        self.buckets_at = geometry.buckets_at
        self.words = memoryview(memory).cast("Q")
        self.generations = GenerationReader(memory, geometry)
        self._reuse_at = geometry.uses_at >> 3
        self._cells = _cells(memory, geometry)

    def find(self, key: bytes) -> Hit | None:
        """The published slot of `key`. Whoever acts on it must see `words[at] == seq` afterwards.

        Raises:
            BadKey: `key` is not 32 bytes.
        """
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
        """(uses, holders) of the slot whose seq word is at `at`, as `find` gives it; believed if seq still stands."""
        bucket, cell = divmod((at - (self.buckets_at >> 3)) // SLOT_WORDS, _BUCKET_CELLS)
        return unpack_reuse(self.words[self._reuse_at + bucket * BUCKET_SLOTS + cell - 1])

    def find_many(self, keys: Array) -> tuple[Array, Array, Array, Array, Array, Array]:
        """`find` for (n, 32) uint8 keys at once.

        Returns:
            (found, at, seq, span_id, place, payload_bytes): `found` (n,) bool, the others (n,) integers, defined where
            `found`. As with `find`, `words[at] == seq` must hold afterwards.
        """
        wide = keys.view("<u8")
        hashes = keys.view("<u4")[:, 2:4] & np.uint32(self.mask)
        fingerprints = wide[:, 2]
        first = hashes[:, 0].astype(np.intp)
        # Cells of 64 bytes: nine to a bucket, of which the first is the line of fingerprints.
        line = first * _BUCKET_CELLS
        same = self._cells.take(line, axis=0) == fingerprints[:, None]
        cell = line + 1 + same.argmax(axis=1)
        # Eight bools are one word: zero where the first bucket has no such fingerprint.
        rest = np.flatnonzero(same.view(np.uint64)[:, 0] == 0)
        if len(rest):
            second = hashes[rest, 1].astype(np.intp)
            second ^= (second == first[rest]) & bool(self.mask)
            line = second * _BUCKET_CELLS
            same = self._cells.take(line, axis=0) == fingerprints[rest, None]
            cell[rest] = line + 1 + same.argmax(axis=1)
        # SYNC POINT: every seq is loaded before any body; a row copied whole may be read in any order.
        # Of the words in one row: `take` of a column would copy all of it first.
        seq = self._cells.reshape(-1).take(cell * SLOT_WORDS)
        slots = self._cells.take(cell, axis=0)
        mine = (slots[:, 1:5] == wide).view(np.uint32)[:, 0] == _ALL_FOUR
        found = mine & ((seq & np.uint64(1)) == 0)
        at = (self.buckets_at >> 3) + cell * SLOT_WORDS
        return found, at, seq, slots[:, _SPAN], slots[:, _PLACE], slots[:, _LENGTH]

    def later_than(self, epoch: int) -> Iterator[Slot]:
        """Allocated slots, published or not, whose span ids have a higher epoch than `epoch`; the highest id first."""
        spans = _slots(self._cells)[:, :, _SPAN].reshape(-1)
        later = np.flatnonzero(spans >> np.uint64(SPAN_COUNTER_BITS) > epoch)
        for number in later[np.argsort(spans[later])[::-1]].tolist():
            yield _slot(self.memory, _slot_at(self.buckets_at >> 3, number), number)


class IndexWriter:
    """The daemon's side: the only one that changes a slot."""

    def __init__(self, memory: memoryview | mmap | bytearray, geometry: IndexGeometry) -> None:
        self.geometry = geometry
        self.generations = GenerationWriter(memory, geometry)
        self._memory = memoryview(memory).cast("B")
        self._words = self._memory.cast("Q")
        self._mask = geometry.bucket_count - 1
        self._buckets_at = geometry.buckets_at >> 3
        self._reuse = np.frombuffer(self._memory, "u8", geometry.slot_count, geometry.uses_at)
        self._mend_free_slots()
        self._mend_lines()
        self._filled = self._count_filled()

    @classmethod
    def create(cls, geometry: IndexGeometry, memory: memoryview | mmap | bytearray | None = None) -> IndexWriter:
        """An empty index over zeroed `memory` (its own where none is given): every slot's seq becomes 1."""
        memory = bytearray(geometry.index_bytes) if memory is None else memory
        _slots(_cells(memory, geometry))[:, :, 0] = 1
        GenerationWriter.create(memory, geometry)
        return cls(memory, geometry)

    def reserve(self, key: bytes, span_id: int, offset: int, tree_bytes: int, payload_bytes: int) -> int | None:
        """Takes a free slot for a span that is being filled; readers do not see it yet.

        Returns:
            The slot's number, or None where both of the key's buckets are full.
        """
        first, second = self._buckets(key)
        bucket = first if self._filled[first] <= self._filled[second] else second
        if self._filled[bucket] == BUCKET_SLOTS:
            return None
        for slot in range(bucket * BUCKET_SLOTS, (bucket + 1) * BUCKET_SLOTS):
            at = self._slot_at(slot)
            if not self._words[at + _SPAN]:
                assert self._words[at] & 1, f"slot {slot} is free, and its seq {self._words[at]} even"
                _SLOT_KEY.pack_into(self._memory, (at + 1) * 8, key)
                self._words[at + _PLACE] = pack_place(offset, tree_bytes)
                self._words[at + _LENGTH] = payload_bytes
                # SYNC POINT: last, so that the next daemon finds a slot either free or whole, wherever we are killed.
                self._words[at + _SPAN] = span_id
                self._filled[bucket] += 1
                return slot
        raise AssertionError(f"bucket {bucket} counts {self._filled[bucket]} slots, but all eight are taken")

    def publish(self, slot: int) -> None:
        """Shows the reserved (or unpublished) slot to readers."""
        at = self._slot_at(slot)
        seq = self._words[at]
        assert seq & 1 and self._words[at + _SPAN], f"slot {slot} with seq {seq} has nothing to publish"
        # SYNC POINT: the span's bytes and the slot's body were stored before; x86-64 keeps stores in order, so who
        # sees the even seq sees them. ARM needs a release store here.
        self._words[at] = (seq + 1) & _SEQ_MAX
        self._words[self._fingerprint_at(slot)] = self._words[at + 3]

    republish = publish

    def move(self, slot: int, to: int) -> None:
        """Shows the reserved slot `to` in place of the published `slot`, whose key and payload it has."""
        self._reuse[to] = self._reuse[slot] & _USE
        self.mark(to, unverified=self.read(slot).unverified)
        # SYNC POINT: in this order, so that the next daemon finds one of them, or both, wherever we are killed.
        self.publish(to)
        self.unpublish(slot)

    def unpublish(self, slot: int) -> None:
        """Hides a published slot. Its span stays allocated until `release`."""
        at = self._slot_at(slot)
        seq = self._words[at]
        assert not seq & 1, f"slot {slot} with seq {seq} is not published"
        # SYNC POINT: this store must be seen by every reader before its lane is scanned; the fence between them
        # (fence.py) orders the reader's "publish pin, load seq" against our "store seq, scan lanes".
        self._words[at] = (seq + 1) & _SEQ_MAX
        self._words[self._fingerprint_at(slot)] = 0

    def release(self, slot: int) -> None:
        """Frees a slot whose span nobody can reach any more."""
        at = self._slot_at(slot)
        assert self._words[at] & 1 and self._words[at + _SPAN], f"slot {slot} cannot be released"
        # Before the span: a slot that is found free has nothing of another's.
        self._reuse[slot] = 0
        self._words[at + _SPAN] = 0
        self._filled[slot // BUCKET_SLOTS] -= 1

    def mark(self, slot: int, *, unverified: bool) -> None:
        """Sets or clears the flag that makes readers check the span's checksum first. One word, so seq may stay."""
        at = self._slot_at(slot) + _PLACE
        self._words[at] = self._words[at] & ~PLACE_UNVERIFIED | unverified

    def show_uses(self, uses: dict[int, int], used_s: float) -> None:
        """Tells readers how often the entries of slots were used in all, `uses` by slot, and the next daemon that they
        were used at `used_s`."""
        slots = np.fromiter(uses.keys(), np.intp, len(uses))
        counts = np.minimum(np.fromiter(uses.values(), np.uint64, len(uses)), np.uint64(REUSE_USES_MAX))
        ticks = np.uint64(reuse_ticks(used_s) << REUSE_USED_SHIFT)
        self._reuse[slots] = self._reuse[slots] & ~_USE | ticks | counts

    def show_holders(self, slot: int, holders: int) -> None:
        """Tells readers how many clients hold the slot's entry now."""
        self._reuse[slot] = pack_reuse(self.uses(slot), holders, self.used_s(slot))

    def uses(self, slot: int) -> int:
        """What `show_uses` told last, be it a former daemon's."""
        return unpack_reuse(int(self._reuse[slot]))[0]

    def used_s(self, slot: int) -> float:
        """When the slot's entry was used last, by `show_uses`, be it a former daemon's; 0.0: never."""
        return reuse_used_s(int(self._reuse[slot]))

    def held(self) -> tuple[Array, Array]:
        """(span ids, holders) of all slots for which `show_holders` told more than none last, (n,) uint64 each."""
        holders = self._reuse >> np.uint64(REUSE_HOLDERS_SHIFT)
        slots = np.flatnonzero(holders)
        spans = _slots(_cells(self._memory, self.geometry))[:, :, _SPAN].reshape(-1)
        return spans[slots], holders[slots]

    def span_ids(self) -> Iterator[Array]:
        """The ids of all allocated slots, published or not, in pieces of up to SPAN_IDS_AT_ONCE: (n,) uint64, each
        sorted. What is allocated throughout is in one of them."""
        slots, step = _slots(_cells(self._memory, self.geometry)), SPAN_IDS_AT_ONCE // BUCKET_SLOTS
        for first in range(0, len(slots), step):
            spans = slots[first : first + step, :, _SPAN].reshape(-1)
            yield np.sort(spans[spans != 0])

    def slots_for(self, key: bytes) -> list[int]:
        """The slots in which `key` may stand."""
        buckets = dict.fromkeys(self._buckets(key))
        return [bucket * BUCKET_SLOTS + i for bucket in buckets for i in range(BUCKET_SLOTS)]

    def read(self, slot: int) -> Slot:
        """What the slot holds, published or not."""
        return _slot(self._memory, self._slot_at(slot), slot)

    def slots(self) -> Iterator[Slot]:
        """Every allocated slot, in order of their numbers."""
        for number in np.flatnonzero(_slots(_cells(self._memory, self.geometry))[:, :, _SPAN]):
            yield self.read(int(number))

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        self.generations.check_invariants()
        keys: set[bytes] = set()
        filled = [0] * self.geometry.bucket_count
        for slot in self.slots():
            filled[slot.number // BUCKET_SLOTS] += 1
            fingerprint = self._words[self._fingerprint_at(slot.number)]
            assert not slot.offset % ALIGN_BYTES
            if slot.published:
                assert slot.number in self.slots_for(slot.key), f"slot {slot.number} is in no bucket of its key"
                assert slot.key not in keys, f"{slot.key.hex()} is published twice"
                keys.add(slot.key)
                assert fingerprint == int.from_bytes(slot.key[16:24], "little")
            else:
                assert fingerprint == 0
        assert filled == list(self._filled), "the buckets' counts are wrong"

    def _buckets(self, key: bytes) -> tuple[int, int]:
        first, second, _ = KEY_HASHES.unpack(key)
        return first & self._mask, _second_bucket(first, second, self._mask)

    def _slot_at(self, slot: int) -> int:
        return _slot_at(self._buckets_at, slot)

    def _fingerprint_at(self, slot: int) -> int:
        """The word that is a slot's fingerprint."""
        return self._buckets_at + slot // BUCKET_SLOTS * _BUCKET_CELLS * SLOT_WORDS + slot % BUCKET_SLOTS

    def _count_filled(self) -> bytearray:
        taken = (_slots(_cells(self._memory, self.geometry))[:, :, _SPAN] != 0).sum(axis=1)
        return bytearray(taken.astype(np.uint8).tobytes())

    def _mend_free_slots(self) -> None:
        """A free slot with an even seq is damage: a reader could take it for an entry."""
        slots = _slots(_cells(self._memory, self.geometry))
        seqs = slots[:, :, 0]
        wrong = np.nonzero((seqs & np.uint64(1) == 0) & (slots[:, :, _SPAN] == 0))
        seqs[wrong] |= np.uint64(1)

    def _mend_lines(self) -> None:
        """A daemon that was killed between a seq and its fingerprint left a line that does not agree with its slot."""
        cells = _cells(self._memory, self.geometry)
        slots = _slots(cells)
        published = (slots[:, :, 0] & np.uint64(1) == 0) & (slots[:, :, _SPAN] != 0)
        right = np.where(published, slots[:, :, 3], np.uint64(0))
        lines = cells[::_BUCKET_CELLS]
        wrong = np.nonzero(lines != right)
        lines[wrong] = right[wrong]


def _cells(memory: memoryview | mmap | bytearray, geometry: IndexGeometry) -> Array:
    """All buckets as (9 × bucket_count, 8) words."""
    words = geometry.bucket_count * _BUCKET_CELLS * SLOT_WORDS
    return np.frombuffer(memory, "u8", words, geometry.buckets_at).reshape(-1, SLOT_WORDS)


def _slots(cells: Array) -> Array:
    """All slots as (bucket_count, 8, 8) words."""
    return cells.reshape(-1, _BUCKET_CELLS, SLOT_WORDS)[:, 1:]


def _slot_at(buckets_at: int, slot: int) -> int:
    """The word at which a slot begins: behind its bucket's line of fingerprints. `buckets_at`: the first bucket's."""
    return buckets_at + (slot // BUCKET_SLOTS + slot + 1) * SLOT_WORDS


def _slot(memory: memoryview | mmap, at: int, number: int) -> Slot:
    """The slot that begins at word `at`."""
    seq, key, span, place, payload_bytes = SLOT.unpack_from(memory, at * 8)
    unverified = bool(place & PLACE_UNVERIFIED)
    return Slot(number, seq, key, span, place & PLACE_OFFSET_MASK, place >> 48, payload_bytes, unverified)


def bad_key(key: object) -> BadKey:
    """The error for what is no key."""
    size = f"{len(key)} bytes" if isinstance(key, (bytes, bytearray, memoryview)) else type(key).__name__
    return BadKey(f"a key is {KEY_BYTES} bytes, as Namespace.key() makes them; this one is {size}")


def _second_bucket(first: int, second: int, mask: int) -> int:
    bucket = second & mask
    return bucket if bucket != first & mask else bucket ^ (1 & mask)
