"""Where the words of the index's slots are: as arrays over all of them, and as a copy of one.

    a bucket: nine cells of 64 bytes, which are a line of eight fingerprints and eight slots
    a slot:   seq │ key, four words │ span id │ place │ length                  (words of 8 bytes)

Owns: these places. Does not own: which slots a key may have, nor the order in which words are stored and loaded
(index.py), nor the bits of a place word (layout.py).

Invariants: the arrays are views of the memory, so that what is stored in them is stored in the index. Nothing here
stores anything. A copy of a slot may be torn: the reader checks seq.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from mmap import mmap
from typing import Any, Final

import numpy as np

from .layout import BUCKET_SLOTS, PLACE_OFFSET_MASK, PLACE_UNVERIFIED, SLOT_WORDS, IndexGeometry

SLOT: Final = struct.Struct("@Q32sQQQ")
"""A whole slot: seq, key, span id, place word, payload bytes."""
SPAN, PLACE, LENGTH = 5, 6, 7
"""Indices of words within a slot."""
BUCKET_CELLS: Final = 1 + BUCKET_SLOTS

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
