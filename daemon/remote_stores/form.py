"""The form of an entry in a remote store: 192 bytes of header, then the payload as it lies in the ring.

    object = magic, format version, key, lengths, checksum, metadata, zeros, CRC-32 of these; tree header and leaves

The header is as long as the header of a span in the ring (`shm.ring.layout.SpanHeader`). So an object that is read to
the start of a new span has its payload in its final place, and the span's header then replaces the object's. The header
is not the span's own: that one has times of one boot of one host, and the byte order of the machine. The time of expiry
is in Unix seconds, since hosts have no other clock in common.

Owns: the header's format, and what is checked after every read. Does not own: the payload's format
(shm/payloads/header.py), nor where objects are stored.

Invariants: `check` returns only for an object that has the key, this format version, the length that its header names,
and a payload that matches the checksum. Remote bytes are never trusted: a store that anyone else may write to needs its
own access control, since a checksum is no signature. The tree header is validated by its reader, as for any payload.
"""

from __future__ import annotations

import struct
import zlib
from math import inf
from typing import Final

import numpy as np

from ...errors import Corrupt, UsageError
from ...shm.payloads.copy import checksum_of
from ...shm.ring.layout import KEY_BYTES, RING_BYTES_MAX, SPAN_HEADER_BYTES, TREE_BYTES_MAX
from ..forms.events import RemoteEntry

OBJECT_FORMAT: Final = 1
"""The version of the format. It is also in the names under which stores keep objects."""
OBJECT_HEADER_BYTES: Final = SPAN_HEADER_BYTES

Buffer = bytes | bytearray | memoryview

_MAGIC: Final = b"TNSROBJ\0"
# The 8 bytes before the time of expiry are not used.
_FIELDS: Final = struct.Struct("<8sI32sQIQQId8xdB32s")
_CRC: Final = struct.Struct("<I")
_CRC_AT: Final = OBJECT_HEADER_BYTES - _CRC.size


def object_header(key: bytes, entry: RemoteEntry, now_unix_s: float) -> bytes:
    """The 192 bytes that precede the payload of `entry` in a store. Raises UsageError if a length is out of range."""
    payload_bytes, tree_bytes = entry.payload_bytes, entry.tree_bytes
    if not 0 < tree_bytes <= min(payload_bytes, TREE_BYTES_MAX) or payload_bytes > RING_BYTES_MAX:
        raise UsageError(
            f"a payload of {payload_bytes} bytes with a tree header of {tree_bytes}: the header has 1 to "
            f"{TREE_BYTES_MAX} bytes and is a part of the payload, which has at most {RING_BYTES_MAX}"
        )
    expires_unix_s = 0.0 if entry.lives_s is None else now_unix_s + entry.lives_s
    numbers = payload_bytes, tree_bytes, entry.checksum, entry.tokens, entry.prefix_bytes, entry.cost_ms, expires_unix_s
    parent = entry.parent is not None, entry.parent or bytes(KEY_BYTES)
    fields = _FIELDS.pack(_MAGIC, OBJECT_FORMAT, key, *numbers, *parent).ljust(_CRC_AT, b"\0")
    return fields + _CRC.pack(zlib.crc32(fields))


def check(key: bytes, stored: memoryview, now_unix_s: float, *, header: bool = False) -> RemoteEntry | None:
    """What `stored` holds: a whole object, or with `header` one of which at least the header is there. None if its time
    of expiry is over. Raises Corrupt if `stored` is no object of `key` in this format version, or was changed."""
    if len(stored) < OBJECT_HEADER_BYTES:
        raise Corrupt(f"an object has {len(stored)} bytes, its header alone has {OBJECT_HEADER_BYTES}")
    magic, version, own_key, payload, tree, checksum, tokens, prefix, cost, expires, has_parent, parent = (
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
    if not (0 <= cost < inf and 0 <= expires < inf) or prefix > payload:
        raise Corrupt(
            f"an object has impossible metadata: cost_ms {cost}, expires_unix_s {expires}, prefix_bytes {prefix}"
        )
    if expires and now_unix_s >= expires:
        return None
    if not header and payload != len(stored) - OBJECT_HEADER_BYTES:
        raise Corrupt(f"an object has {len(stored)} bytes; its header names {OBJECT_HEADER_BYTES} + {payload}")
    found = checksum if header else checksum_of(np.frombuffer(stored[OBJECT_HEADER_BYTES:], np.uint8))
    if found != checksum:
        raise Corrupt(f"the payload of key {key.hex()} has the checksum {found:#018x}, its header {checksum:#018x}")
    lives_s = expires - now_unix_s if expires else None
    return RemoteEntry(payload, tree, tokens, cost, prefix, lives_s, parent if has_parent else None, checksum)
