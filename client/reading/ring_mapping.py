"""The ring as this process has mapped it, and handles: names of payloads for other processes.

Owns: reads without a pin, the check of a payload, and the packed form of a handle. Does not own: any pin.
Invariants: a handle from another process is used only if the ring's own span header confirms it.
"""

from __future__ import annotations

import os
import struct
from mmap import mmap
from typing import Any, Final

import numpy as np
from msgspec import Struct

from ...errors import Corrupt
from ...shm.lanes.lane import Lane
from ...shm.payloads.copy import checksum_of
from ...shm.ring.layout import ALIGN_BYTES, KEY_BYTES, SPAN_HEADER_BYTES, SpanHeader, punches_of, span_bytes
from ...shm.ring.unshared import close_with

Array = np.ndarray[Any, Any]

IDENTITY_BYTES: Final = 16
_IDENTITY: Final = struct.Struct("<QQ")
_HANDLE: Final = struct.Struct(f"<{IDENTITY_BYTES}sQQQ{KEY_BYTES}s")
HANDLE_BYTES: Final = _HANDLE.size


class Handle(Struct, frozen=True):
    """The name of one payload in one ring. `offset` is its span's offset from the start of the ring, in bytes."""

    identity: bytes
    offset: int
    payload_bytes: int
    span_id: int
    key: bytes

    def pack(self) -> bytes:
        """72 bytes, the same for every process of the host. The first 16 are the ring's identity."""
        return _HANDLE.pack(self.identity, self.offset, self.payload_bytes, self.span_id, self.key)

    @classmethod
    def unpack(cls, packed: bytes) -> Handle | None:
        """The handle of these bytes; None if they have another length."""
        return cls(*_HANDLE.unpack(packed)) if len(packed) == _HANDLE.size else None


class RingMapping(mmap):
    """A read-only mapping of the ring. Every array over it keeps the lane that pins its bytes, and the kernel lock on
    that, alive.

    Bytes that are not pinned are read through `fd`: their pages may have been returned to the system, and a read
    through the mapping would allocate them again, or raise SIGBUS without memory for them.

    `identity` is unique to this ring, and the same in every process, under every daemon that serves it.
    """

    lane: Lane
    identity: bytes
    inode: int
    fd = -1
    index: mmap

    def begin(self, lane: Lane, ring_fd: int, instance_id: int, index: mmap) -> None:
        """Sets the lane and the ring's index, and duplicates `ring_fd`, which stays the caller's."""
        self.lane = lane
        self.index = index
        self.fd = os.dup(ring_fd)
        close_with(self, self.fd)
        self.inode = os.fstat(ring_fd).st_ino
        self.identity = _IDENTITY.pack(instance_id, self.inode)

    @property
    def punches(self) -> int:
        """Changes after the daemon returned pages of the ring, and before an entry lies in new ones. 0 if it does not
        count.

        A GPU's driver keeps reading the pages that it has registered, also when the ring has other pages there. A
        registration made after this count was read is good for an entry that was pinned before the same count is read
        again: the pages of pinned entries stay.
        """
        return punches_of(self.index)

    def is_resident(self, start: int, size_bytes: int) -> bool:
        """Whether all pages of these bytes are in memory and were written. Reads none of them."""
        return os.lseek(self.fd, start, os.SEEK_HOLE) >= start + size_bytes

    def copied(self, start: int, size_bytes: int) -> Array:
        """Copies bytes that may not be pinned, as uint8 of shape (size_bytes,). Pages that are gone read as zeros."""
        copied = bytearray(size_bytes)
        into, at = memoryview(copied), 0
        # One call reads at most 2 GiB.
        while at < size_bytes and (got := os.preadv(self.fd, [into[at:]], start + at)):
            at += got
        return np.frombuffer(copied, np.uint8)

    def span(self, offset: int) -> SpanHeader | None:
        """The header of the span at `offset`, pinned or not; None if there is no valid one."""
        try:
            return SpanHeader.unpack(self.copied(offset, SPAN_HEADER_BYTES).tobytes())
        except Corrupt:
            return None

    def is_sound(self, offset: int, payload_bytes: int) -> bool:
        """Whether the payload of the pinned span at `offset` matches its checksum."""
        start = offset + SPAN_HEADER_BYTES
        try:
            check_span(self[offset:start], np.ndarray((payload_bytes,), np.uint8, self, start))
        except Corrupt:
            return False
        return True

    def span_at(self, array: Array, offset: int) -> int:
        """The offset of the span in whose payload `array`, an array over this mapping, starts at `offset`."""
        begins: int = np.frombuffer(self, np.uint8).__array_interface__["data"][0]
        at: int = array.__array_interface__["data"][0] - begins - offset - SPAN_HEADER_BYTES
        return at

    def handle(self, array: Array, offset: int, payload_bytes: int) -> bytes | None:
        """The handle of the payload in which `array` over this mapping starts at `offset`; None if its header
        differs."""
        span_at = self.span_at(array, offset)
        header = self.span(span_at)
        if header is None or header.payload_bytes != payload_bytes:
            return None
        return Handle(self.identity, span_at, payload_bytes, header.span_id, header.key).pack()

    def named(self, packed: bytes) -> tuple[int, SpanHeader] | None:
        """The offset of a handle's payload, and its span's header; None if the span does not match the handle."""
        handle = Handle.unpack(packed)
        if handle is None or handle.identity != self.identity or handle.offset % ALIGN_BYTES:
            return None
        if handle.offset + span_bytes(handle.payload_bytes) > len(self):
            return None
        header = self.span(handle.offset)
        if header is None or not 0 < header.tree_bytes <= header.payload_bytes:
            return None
        if (header.key, header.span_id, header.payload_bytes) != (handle.key, handle.span_id, handle.payload_bytes):
            return None
        return handle.offset + SPAN_HEADER_BYTES, header


def check_span(span_header: bytes, payload: Array) -> None:
    """Raises Corrupt unless a payload, (n,) uint8, is the one that was stored under this header of its span."""
    header = SpanHeader.unpack(span_header)
    found = checksum_of(payload)
    if found != (header.checksum or found) or header.payload_bytes != len(payload):
        raise Corrupt(
            f"entry {header.key.hex()}: its {len(payload)} bytes have checksum {found:#x}, its header says "
            f"{header.checksum:#x}; evict it and put it again"
        )


def mapping_under(array: Array) -> RingMapping | None:
    """The mapping that an array lies in; None if it lies in private memory."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, RingMapping) else None
