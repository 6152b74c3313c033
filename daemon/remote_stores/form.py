"""The form of an entry in a remote store: 192 bytes of header, then the payload as it lies in the ring.

    object = magic, format version, key, lengths, checksum, metadata, zeros, CRC-32 of these; tree header and leaves

The header is as long as the header of a span in the ring (`shm.ring.layout.SpanHeader`). So an object that is read to
the start of a new span has its payload in its final place, and the span's header then replaces the object's. The header
is not the span's own: that one has times of one boot of one host, and the byte order of the machine.

Owns: the header's format, and what is checked after every read. Does not own: the payload's format
(shm/payloads/header.py), nor where objects are stored.

Invariants: `check` returns only for an object that has the key, this format version, the length that its header names,
and a payload that matches the checksum. Remote bytes are never trusted: a store that anyone else may write to needs its
own access control, since a checksum is no signature. The tree header is validated by its reader, as for any payload.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np

from ...errors import Corrupt, UsageError
from ...shm.payloads.copy import checksum_of
from ...shm.ring.layout import KEY_BYTES, RING_BYTES_MAX, SPAN_HEADER_BYTES, TREE_BYTES_MAX, SpanHeader

OBJECT_FORMAT: Final = 1
"""The version of the format. It is also in the names under which stores keep objects."""
OBJECT_HEADER_BYTES: Final = SPAN_HEADER_BYTES

Buffer = bytes | bytearray | memoryview

_MAGIC: Final = b"TNSROBJ\0"
_FIELDS: Final = struct.Struct("<8sI32sQIQQIdddB32s")
_CRC: Final = struct.Struct("<I")
_CRC_AT: Final = OBJECT_HEADER_BYTES - _CRC.size
_NO_KEY: Final = bytes(KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Meta:
    """The metadata of a stored entry. The fields are those of `SpanHeader`, except for the times.

    Args:
        tree_bytes: the length of the tree header, with which the payload begins.
        checksum: xxh3-64 of the payload.
        tokens: the entry's encoder tokens; 0 if unknown.
        cost_ms: the time that computing the payload took; 0 if unknown.
        prefix_bytes: the length of the record of a block of a sequence; 0 if the payload is not a block.
        ttl_s: the time to live after each touch; 0 for none.
        expires_unix_s: the time of expiry, in Unix seconds, since hosts have no other clock in common; 0 for none.
        parent: the key of the entry's parent; None if it has none.
    """

    tree_bytes: int
    checksum: int
    tokens: int = 0
    cost_ms: float = 0.0
    prefix_bytes: int = 0
    ttl_s: float = 0.0
    expires_unix_s: float = 0.0
    parent: bytes | None = None

    @classmethod
    def of_span(cls, header: SpanHeader, boot_unix_s: float) -> Meta:
        """The metadata of an entry in the ring. `boot_unix_s`: the Unix time of the boot (`shm.clock`)."""
        return cls(
            tree_bytes=header.tree_bytes,
            checksum=header.checksum,
            tokens=header.tokens,
            cost_ms=header.cost_ms,
            prefix_bytes=header.prefix_bytes,
            ttl_s=header.ttl_s,
            expires_unix_s=boot_unix_s + header.expires_s if header.expires_s else 0.0,
            parent=header.parent,
        )


@dataclass(frozen=True, slots=True)
class RemoteEntry:
    """An object that was read and checked. Its payload is at [OBJECT_HEADER_BYTES, OBJECT_HEADER_BYTES +
    payload_bytes) of the caller's buffer."""

    meta: Meta
    payload_bytes: int


def object_header(key: bytes, payload_bytes: int, meta: Meta) -> bytes:
    """The 192 bytes that precede a payload of `payload_bytes` in a store.

    Raises:
        UsageError: a length is out of its range.
    """
    if not 0 < meta.tree_bytes <= min(payload_bytes, TREE_BYTES_MAX) or payload_bytes > RING_BYTES_MAX:
        raise UsageError(
            f"a payload of {payload_bytes} bytes with a tree header of {meta.tree_bytes}: the header has 1 to "
            f"{TREE_BYTES_MAX} bytes and is a part of the payload, which has at most {RING_BYTES_MAX}"
        )
    fields = _FIELDS.pack(
        _MAGIC,
        OBJECT_FORMAT,
        key,
        payload_bytes,
        meta.tree_bytes,
        meta.checksum,
        meta.tokens,
        meta.prefix_bytes,
        meta.cost_ms,
        meta.ttl_s,
        meta.expires_unix_s,
        meta.parent is not None,
        meta.parent or _NO_KEY,
    )
    fields = fields.ljust(_CRC_AT, b"\0")
    return fields + _CRC.pack(zlib.crc32(fields))


def check(key: bytes, stored: memoryview, now_unix_s: float) -> RemoteEntry | None:
    """What is stored in `stored`, a whole object. None if its time of expiry is over.

    Raises:
        Corrupt: `stored` is not an object of `key` in this format version, or its bytes were changed. The message
            names the difference.
    """
    entry = check_header(key, stored, now_unix_s)
    if entry is None:
        return None
    if entry.payload_bytes != len(stored) - OBJECT_HEADER_BYTES:
        raise Corrupt(
            f"an object has {len(stored)} bytes; its header names {OBJECT_HEADER_BYTES} + {entry.payload_bytes}"
        )
    found, checksum = checksum_of(np.frombuffer(stored[OBJECT_HEADER_BYTES:], np.uint8)), entry.meta.checksum
    if found != checksum:
        raise Corrupt(f"the payload of key {key.hex()} has the checksum {found:#018x}, its header {checksum:#018x}")
    return entry


def check_header(key: bytes, stored: memoryview, now_unix_s: float) -> RemoteEntry | None:
    """As `check`, for an object's header alone. `stored`: at least the header."""
    if len(stored) < OBJECT_HEADER_BYTES:
        raise Corrupt(f"an object has {len(stored)} bytes, its header alone has {OBJECT_HEADER_BYTES}")
    magic, version, own_key, payload, tree, checksum, tokens, prefix, cost, ttl, expires, has_parent, parent = (
        _FIELDS.unpack_from(stored)
    )
    if magic != _MAGIC:
        raise Corrupt(f"an object begins with {magic!r}, not with {_MAGIC!r}")
    if version != OBJECT_FORMAT:
        raise Corrupt(f"an object has format version {version}, this tensord reads {OBJECT_FORMAT}")
    [crc] = _CRC.unpack_from(stored, _CRC_AT)
    if crc != zlib.crc32(stored[:_CRC_AT]):
        raise Corrupt(f"the header of an object is damaged: its fields do not have the check {crc:#x}")
    if own_key != key:
        raise Corrupt(f"the object of key {key.hex()} has the key {own_key.hex()}")
    if not 0 < tree <= min(payload, TREE_BYTES_MAX) or payload > RING_BYTES_MAX:
        raise Corrupt(f"an object's header names a payload of {payload} bytes, of which {tree} are the tree's")
    if not all(0 <= number < inf for number in (cost, ttl, expires)) or prefix > payload:
        raise Corrupt(
            f"an object has impossible metadata: cost_ms {cost}, ttl_s {ttl}, expires_unix_s {expires}, prefix_bytes "
            f"{prefix}"
        )
    if expires and now_unix_s >= expires:
        return None
    return RemoteEntry(
        Meta(tree, checksum, tokens, cost, prefix, ttl, expires, parent if has_parent else None), payload
    )
