"""The index's slots as the store writes them: where a key's slot is free, and the order of the stores.

Owns: which slots of a bucket are free. Does not own: the index's layout (shm/ring/layout, shm/index), nor which row a
slot belongs to. `commit` has `taken` and `publish` of this module inline, since both are part of every put.

Invariants: those of shm/index/index.py. A slot is stored with its span id last, and published by one store of an even
seq.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

import numpy as np

from ...shm.index.index import (
    BUCKET_CELLS,
    KEY_HASHES,
    PLACE,
    PLACE_UNVERIFIED,
    REUSE_HOLDERS_SHIFT,
    SPAN,
    cells_of,
    slots_of,
)
from ...shm.ring.layout import BUCKET_SLOTS, IndexGeometry
from .table import Array

BODY: Final = Struct("@32s8xQQ")
"""A slot's key, place and length, from its second word on. The span id between them stays 0."""
LOWEST: Final = bytes([8, *((mask & -mask).bit_length() - 1 for mask in range(1, 256))])
"""The lowest bit that is set in a byte; 8 if none is."""
COUNT: Final = bytes(mask.bit_count() for mask in range(256))
CELL_WORDS: Final = 8
BUCKET_WORDS: Final = BUCKET_CELLS * CELL_WORDS
_KEY_WORDS: Final = np.arange(1, 5)
_USES: Final = np.uint64((1 << REUSE_HOLDERS_SHIFT) - 1)


class Slots:
    """The slots of one index. `free[bucket]`: a bit for each free slot."""

    def __init__(self, memory: memoryview, geometry: IndexGeometry) -> None:
        self.memory = memory.cast("B")
        self.words = self.memory.cast("Q")
        self.mask = geometry.bucket_count - 1
        self.first_word = geometry.buckets_at >> 3
        self.first_reuse = geometry.uses_at >> 3
        """Index of the reuse word of slot 0 (shm/index)."""
        self._array = np.frombuffer(self.words, "u8")
        self.reuse: Array = np.frombuffer(self.memory, "u8", geometry.slot_count, geometry.uses_at)
        taken = slots_of(cells_of(self.memory, geometry))[:, :, SPAN] != 0
        self.free = bytearray(np.packbits(~taken, axis=1, bitorder="little").tobytes())

    def take(self, key: bytes, span_id: int, place: int, payload_bytes: int) -> int:
        """Writes a free slot of the key, and leaves it unpublished. Returns its number; -1 if both buckets are full."""
        first, second, _ = KEY_HASHES.unpack(key)
        first &= self.mask
        second &= self.mask
        if first == second:
            second ^= 1 & self.mask
        bucket = first if COUNT[self.free[first]] >= COUNT[self.free[second]] else second
        bits = self.free[bucket]
        if not bits:
            return -1
        cell = LOWEST[bits]
        self.free[bucket] = bits & (bits - 1)
        at = self.first_word + bucket * BUCKET_WORDS + (cell + 1) * CELL_WORDS
        BODY.pack_into(self.memory, (at + 1) * 8, key, place, payload_bytes)
        # SYNC POINT: the span id is stored last, so that after a kill at any instruction the next daemon finds the slot
        # either free or complete.
        self.words[at + SPAN] = span_id
        number: int = bucket * BUCKET_SLOTS + cell
        return number

    def at(self, slot: int) -> int:
        """Index of the slot's first word."""
        return self.first_word + (slot // BUCKET_SLOTS + slot + 1) * CELL_WORDS

    def fingerprint_at(self, slot: int) -> int:
        """Index of the word with the slot's fingerprint."""
        return self.first_word + slot // BUCKET_SLOTS * BUCKET_WORDS + slot % BUCKET_SLOTS

    def publish(self, slot: int) -> None:
        """Makes a slot visible to readers."""
        at, words = self.at(slot), self.words
        assert words[at] & 1 and words[at + SPAN], f"slot {slot} with seq {words[at]} has nothing to publish"
        # SYNC POINT: the span's bytes and the slot's body were stored before seq. x86-64 keeps stores in order, so a
        # reader that sees the even seq sees them too. ARM needs a release store here.
        words[at] = words[at] + 1
        words[self.fingerprint_at(slot)] = words[at + 3]

    def unpublish(self, slot: int) -> None:
        """Hides a slot from readers. The fence and the scan of the lanes come after this (runway)."""
        at, words = self.at(slot), self.words
        assert not words[at] & 1, f"slot {slot} with seq {words[at]} is not published"
        words[at] = words[at] + 1
        words[self.fingerprint_at(slot)] = 0

    def unpublish_all(self, slots: Array) -> list[bytes]:
        """`unpublish` of many. Returns their keys."""
        words, at = self._array, self.first_word + (slots // BUCKET_SLOTS + slots + 1) * CELL_WORDS
        seqs = words[at]
        assert not (seqs & np.uint64(1)).any(), "a slot is not published"
        # SYNC POINT: as in `unpublish`. Each word is stored at once.
        words[at] = seqs + np.uint64(1)
        words[self.first_word + slots // BUCKET_SLOTS * BUCKET_WORDS + slots % BUCKET_SLOTS] = 0
        return self.keys(slots)

    def move(self, slot: int, to: int) -> None:
        """Publishes the unpublished slot `to` and unpublishes `slot`, which has the same key and payload."""
        at, there, words = self.at(slot), self.at(to), self.words
        self.reuse[to] = self.reuse[slot] & _USES
        words[there + PLACE] = words[there + PLACE] | words[at + PLACE] & PLACE_UNVERIFIED
        # SYNC POINT: publish before unpublish, so that after a kill at any instruction the next daemon finds at least
        # one of the two published.
        self.publish(to)
        self.unpublish(slot)

    def revoke(self, slot: int) -> None:
        """Changes the seq of an unpublished slot: a client that was told the former one writes no more, unless it has
        pinned the span."""
        at = self.at(slot)
        self.words[at] = self.words[at] + 2

    def release(self, slot: int) -> None:
        """Frees an unpublished slot whose span no reader can reach any more."""
        at, words = self.first_word + (slot // BUCKET_SLOTS + slot + 1) * CELL_WORDS, self.words
        assert words[at] & 1 and words[at + SPAN], f"slot {slot} cannot be released"
        # Before the span id, so that a free slot never has the uses of an earlier entry.
        words[self.first_reuse + slot] = 0
        words[at + SPAN] = 0
        self.free[slot // BUCKET_SLOTS] |= 1 << slot % BUCKET_SLOTS

    def release_all(self, slots: Array) -> None:
        """`release` of many."""
        free = self.free
        self.reuse[slots] = 0
        self._array[self.first_word + (slots // BUCKET_SLOTS + slots + 1) * CELL_WORDS + SPAN] = 0
        for slot in slots.tolist():
            free[slot // BUCKET_SLOTS] |= 1 << slot % BUCKET_SLOTS

    def keys(self, slots: Array) -> list[bytes]:
        """The keys in slots."""
        keys: list[bytes] = self.key_words(slots).view("V32").ravel().tolist()
        return keys

    def key_words(self, slots: Array) -> Array:
        """The keys in slots, (n, 4) uint64."""
        at = self.first_word + (slots // BUCKET_SLOTS + slots + 1) * CELL_WORDS
        words: Array = self._array[at[:, None] + _KEY_WORDS]
        return words

    def key(self, slot: int) -> bytes:
        """The key in a slot."""
        at = (self.at(slot) + 1) * 8
        return self.memory[at : at + 32].tobytes()
