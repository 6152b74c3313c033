"""Where the words of the index's slots are: as arrays over all of them, and as a copy of one; and the bits in them.

    a bucket: nine cells of 64 bytes, which are a line of eight fingerprints and eight slots
    a slot:   seq │ key, four words │ span id │ place │ length                  (words of 8 bytes)

Owns: these places, and the bits of a place word and of a reuse word. Does not own: which slots a key may have, nor the
order in which words are stored and loaded (index.py).

Invariants: the arrays are views of the memory, so that what is stored in them is stored in the index. Nothing here
stores anything. A copy of a slot may be torn: the reader checks seq.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import ceil
from mmap import mmap
from typing import Any, Final

import numpy as np

from .layout import ALIGN_BYTES, BUCKET_SLOTS, SLOT_WORDS, IndexGeometry

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

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Slot:
    """A copy of one slot. `offset` (of the span in the ring), `tree_bytes` (of the tree header) and `payload_bytes` are
    in bytes."""

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
    """Index of a slot's first word. A bucket's slots follow its line of fingerprints. `buckets_at` is the first
    bucket's word."""
    return buckets_at + (number // BUCKET_SLOTS + number + 1) * SLOT_WORDS


def read_slot(memory: memoryview | mmap, at: int, number: int) -> Slot:
    """A copy of the slot whose first word has index `at`."""
    seq, key, span, place, payload_bytes = SLOT.unpack_from(memory, at * 8)
    unverified = bool(place & PLACE_UNVERIFIED)
    return Slot(number, seq, key, span, place & PLACE_OFFSET_MASK, place >> 48, payload_bytes, unverified)


def reuse_ticks(used_s: float) -> int:
    """`used_s` in ticks. Rounded up, so that a use is newer than every earlier put."""
    return min(ceil(used_s * REUSE_TICKS_PER_S), REUSE_TICKS_MAX)
