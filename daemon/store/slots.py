"""What the store writes of an entry beside its columns: its slot and reuse word in the index, its header in the ring.

Owns: which slots of a bucket are free, the order of the stores to a slot, the uses in reuse words, and the expiry in
headers after the put. Does not own: the layouts (shm/ring/layout, shm/index), which row a slot belongs to, who uses
entries (`lifetimes`), nor the rest of headers, which `commit` writes. `commit` has `take` and `publish` of this module
inline, since both are part of every put.

Invariants: those of shm/index/index.py. A slot is stored with its span id last, and published by one store of an even
seq. Rows of `Details` are those of entries, stored or about to be told as ended.
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
    REUSE_HOLDERS_MAX,
    REUSE_HOLDERS_SHIFT,
    REUSE_TICKS_MAX,
    REUSE_TICKS_PER_S,
    REUSE_USED_SHIFT,
    REUSE_USES_MAX,
    SPAN,
    cells_of,
    reuse_ticks,
    slots_of,
)
from ...shm.ring.layout import BUCKET_SLOTS, SPAN_EXPIRES_AT, IndexGeometry, expiry_word
from .table import Array, RowTable

BODY: Final = Struct("@32s8xQQ")
"""A slot's key, place and length, from its second word on. The span id between them stays 0."""
LOWEST: Final = bytes([8, *((mask & -mask).bit_length() - 1 for mask in range(1, 256))])
"""The lowest bit that is set in a byte; 8 if none is."""
COUNT: Final = bytes(mask.bit_count() for mask in range(256))
_COUNTS: Final = np.frombuffer(COUNT, np.uint8)
CELL_WORDS: Final = 8
BUCKET_WORDS: Final = BUCKET_CELLS * CELL_WORDS
_KEY_WORDS: Final = np.arange(1, 5)
_TTL_AT: Final = 64
_CREATED_AT: Final = 72
_COST_AT: Final = 88
_EXPIRY_CHECK: Final = (1 << 16) - 1
_HOLDERS: Final = REUSE_HOLDERS_MAX << REUSE_HOLDERS_SHIFT


class Slots:
    """The slots of one index. `free[bucket]`: a bit for each free slot."""

    def __init__(self, memory: memoryview, geometry: IndexGeometry) -> None:
        self.memory = memory.cast("B")
        self.words = self.memory.cast("Q")
        self.mask = geometry.bucket_count - 1
        self.first_word = geometry.buckets_at >> 3
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

    def take_all(self, keys: Array, span_ids: Array, places: Array, payload_bytes: Array) -> Array:
        """`take` of many keys, (n, 4) uint64: of all, or up to the first one that finds no free slot of the bucket that
        had more before this call. Returns their numbers."""
        free, mask = np.frombuffer(self.free, np.uint8), np.uint64(self.mask)
        first, second = keys[:, 1] & mask, keys[:, 1] >> np.uint64(32) & mask
        second ^= np.where(first == second, np.uint64(1) & mask, np.uint64(0))
        found: list[int] = []
        for bucket in np.where(_COUNTS[free[first]] >= _COUNTS[free[second]], first, second).tolist():
            bits = self.free[bucket]
            if not bits:
                break
            self.free[bucket] = bits & (bits - 1)
            found.append(bucket * BUCKET_SLOTS + LOWEST[bits])
        slots, words, count = np.array(found, np.int64), self._array, len(found)
        at = self.first_word + (slots // BUCKET_SLOTS + slots + 1) * CELL_WORDS
        words[at[:, None] + _KEY_WORDS] = keys[:count]
        words[at + PLACE], words[at + PLACE + 1] = places[:count], payload_bytes[:count]
        # SYNC POINT: as in `take`. Each word is stored at once.
        words[at + SPAN] = span_ids[:count]
        return slots

    def seqs(self, slots: Array) -> Array:
        """The sequence numbers of slots, (n,) uint64."""
        found: Array = self._array[self.first_word + (slots // BUCKET_SLOTS + slots + 1) * CELL_WORDS]
        return found

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
        self.reuse[to] = self.reuse[slot] & ~np.uint64(_HOLDERS)
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
        self.reuse[slot] = 0
        words[at + SPAN] = 0
        self.free[slot // BUCKET_SLOTS] |= 1 << slot % BUCKET_SLOTS

    def release_all(self, slots: Array) -> None:
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
        at = (self.at(slot) + 1) * 8
        return self.memory[at : at + 32].tobytes()


class Details:
    """The headers and reuse words of one store's entries. `ring`: the ring's bytes, writable."""

    def __init__(self, table: RowTable, slots: Slots, ring: memoryview) -> None:
        whole = ring.cast("B")[: len(ring) & -8]
        self._times, self._words = whole.cast("d"), whole.cast("Q")
        self._all_times: Array = np.frombuffer(whole, np.float64)
        self._table = table
        self._slots = slots
        self._offsets, self._slot_of = table.column("offsets"), table.column("slots")

    # ---- headers

    def created(self, rows: Array, now: float) -> Array:
        """When the entries were put, (n,) float64; from 0 to `now`, whatever a damaged header has."""
        created = self._all_times[(self._offsets[rows] + _CREATED_AT) >> 3]
        found: Array = np.fmin(np.fmax(created, 0.0), now)
        return found

    def ttl(self, row: int) -> float:
        """The time to live after each touch, in seconds; 0 for none."""
        ttl: float = self._times[self._table.offsets[row] + _TTL_AT >> 3]
        return ttl

    def cost(self, row: int) -> float:
        """The milliseconds that computing the payload took, as its client said; 0 if not known."""
        cost: float = self._times[self._table.offsets[row] + _COST_AT >> 3]
        return cost

    def expires(self, row: int) -> float:
        """When the entry expires; 0.0 for never. It is up to one part in 2 ** 36 later than it was set."""
        word = self._words[self._table.offsets[row] + SPAN_EXPIRES_AT >> 3]
        expires: float = np.uint64(word & ~_EXPIRY_CHECK).view(np.float64).item()
        return expires

    def set_expires(self, row: int, when: float) -> None:
        """Writes when the entry expires, for clients and for the next daemon: one word, so that a reader sees the old
        time or the new one. The header's check leaves it out."""
        self._words[self._table.offsets[row] + SPAN_EXPIRES_AT >> 3] = expiry_word(when)

    # ---- the index

    def keys(self, rows: Array) -> Array:
        """The keys, as (n, 4) uint64."""
        return self._slots.key_words(self._slot_of[rows].astype(np.int64))

    def tree_bytes(self, row: int) -> int:
        place: int = self._slots.words[self._slots.at(self._table.slots[row]) + PLACE]
        return place >> 48

    def uses(self, rows: Array) -> tuple[Array, Array]:
        """How often the entries were used after their puts, at most REUSE_USES_MAX, and when last, rounded up to a
        tick, 0.0 for never; (n,) uint64 and float64."""
        return unpack_uses(self._slots.reuse[self._slot_of[rows]])

    def count_uses(self, rows: Array, now: float) -> None:
        """The entries were used until `now`, each once for each time that it is among the rows."""
        at, reuse = self._slot_of[rows], self._slots.reuse
        many = np.ones(len(at), np.uint64)
        if len(at) > 1:
            at = np.sort(at)
            first = np.flatnonzero(np.concatenate([[True], at[1:] != at[:-1]]))
            many = np.diff(np.append(first, len(at))).astype(np.uint64)
            at = at[first]
        words = reuse[at]
        uses = np.minimum((words & REUSE_USES_MAX) + many, REUSE_USES_MAX)
        reuse[at] = words & _HOLDERS | reuse_ticks(now) << REUSE_USED_SHIFT | uses

    def show_holders(self, rows: Array, holders: Array) -> None:
        """Stores how many clients hold each entry now, for readers; (n,) uint64."""
        at, reuse = self._slot_of[rows], self._slots.reuse
        reuse[at] = reuse[at] & ~np.uint64(_HOLDERS) | np.minimum(holders, REUSE_HOLDERS_MAX) << REUSE_HOLDERS_SHIFT


def unpack_uses(words: Array) -> tuple[Array, Array]:
    """The numbers of uses in reuse words, and the times of the last ones, 0.0 for never."""
    return words & REUSE_USES_MAX, (words >> REUSE_USED_SHIFT & REUSE_TICKS_MAX) / REUSE_TICKS_PER_S
