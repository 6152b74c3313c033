"""Headers of spans as arrays: read from the ring, and compared with their slots.

Owns: the reading of many headers at once. Does not own their layout (shm/ring/layout), nor their CRC-32, which costs as
much as all else together: the scrub looks at it. Invariant: of a header without damage, the fields are those of
`SpanHeader.unpack`.
"""

from __future__ import annotations

from binascii import crc_hqx
from typing import Any, Final

import numpy as np

from ...shm.index.index import LENGTH, SPAN
from ...shm.ring.layout import SPAN_HEADER_BYTES, expiry_word

Array = np.ndarray[Any, Any]

_MAGIC: Final = 0x4E415053
_FIELDS: Final = [
    ("magic", "<u4"),
    ("tree", "<u4"),
    ("span", "<u8"),
    ("key", "V32"),
    ("payload", "<u8"),
    ("tokens", "<u8"),
    ("ttl", "<f8"),
    ("created", "<f8"),
    ("uid", "<u4"),
    ("prefix", "<u4"),
    ("cost", "<f8"),
    ("number", "<u8"),
    ("parent", "V32"),
    ("has_parent", "<u4"),
    ("check", "<u4"),
    ("checksum", "<u8"),
    ("expires", "<u8"),
]
HEADER: Final = np.dtype([*_FIELDS, ("rest", "u1", SPAN_HEADER_BYTES - np.dtype(_FIELDS).itemsize)])
_KEY_AT: Final = 16
_PARENT_AT: Final = 104
_NEVER: Final = expiry_word(0.0)
_CRC16: Final = np.array([crc_hqx(bytes([each]), 0) for each in range(256)], np.uint16)


def headers_at(ring: memoryview, offsets: Array) -> Array:
    """The headers at these offsets, (n,) of HEADER."""
    lines = np.frombuffer(ring, "V64", len(ring) // 64)
    at = offsets // 64
    packed = np.empty((len(at), 3), "V64")
    for part in range(3):
        packed[:, part] = lines[at + part]
    found: Array = packed.view(HEADER).reshape(-1)
    return found


def in_agreement(head: Array, slots: Array, tree: Array) -> Array:
    """Which headers have the key, the span id and the lengths of their slots, (n, 8) words."""
    agrees: Array = (
        (head["magic"] == _MAGIC)
        & (head["span"] == slots[:, SPAN])
        & (head["payload"] == slots[:, LENGTH])
        & (head["tree"] == tree)
        & (head["key"] == slots[:, 1:5].copy().view("V32")[:, 0])
    )
    return agrees


def are_sound(head: Array) -> Array:
    """Which headers have a sound time of expiry, and a record and a parent that a put can have."""
    sound = np.ones(len(head), np.bool_)
    timed = np.flatnonzero(head["expires"] != _NEVER)
    sound[timed] = _expiry_check(head["expires"][timed]) == head["expires"][timed] & np.uint64(0xFFFF)
    has = np.flatnonzero(head["has_parent"])
    octets = head.view(np.uint8).reshape(len(head), SPAN_HEADER_BYTES)
    sound[has] &= (octets[has, _PARENT_AT : _PARENT_AT + 8] == octets[has, _KEY_AT : _KEY_AT + 8]).all(axis=1)
    record_ends = ((head["tree"].astype(np.int64) + 63) & -64) + head["prefix"]
    sound &= (head["prefix"] == 0) | (record_ends <= head["payload"].astype(np.int64))
    return sound


def expires_s(head: Array) -> Array:
    """When each entry expires; 0: never."""
    found: Array = (head["expires"] >> np.uint64(16) << np.uint64(16)).view(np.float64)
    return found


def _expiry_check(words: Array) -> Array:
    """The CRC-16 of the upper six bytes."""
    octets = words.copy().view(np.uint8).reshape(-1, 8)
    check = np.full(len(words), 0xFFFF, np.uint16)
    for at in range(2, 8):
        check = check << np.uint16(8) ^ _CRC16[(check >> np.uint16(8)) ^ octets[:, at]]
    return check
