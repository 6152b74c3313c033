"""The ring as a process has it mapped, and the names that bytes in it have in other processes.

Owns: the read-only mapping, reading without a pin, the packed form of a handle. Does not own what a handle is turned
into (ring.py), nor any pin.

Invariant: nothing that another process says of the ring is believed before the ring itself has said the same.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from mmap import mmap
from typing import Any, Final

import numpy as np

from ...errors import Corrupt
from ...shm.lanes import Lane
from ...shm.layout import ALIGN_BYTES, KEY_BYTES, SPAN_HEADER_BYTES, SpanHeader, span_bytes

Array = np.ndarray[Any, Any]

IDENTITY_BYTES: Final = 16
_IDENTITY: Final = struct.Struct("<QQ")
_HANDLE: Final = struct.Struct(f"<{IDENTITY_BYTES}sQQQ{KEY_BYTES}s")
HANDLE_BYTES: Final = _HANDLE.size


@dataclass(frozen=True, slots=True)
class Handle:
    """The name of one payload in one ring: `offset` is its span's, in bytes from the ring's beginning."""

    identity: bytes
    offset: int
    payload_bytes: int
    span_id: int
    key: bytes

    def pack(self) -> bytes:
        """72 bytes, the same for every process of the host; the first 16 are the ring's identity."""
        return _HANDLE.pack(self.identity, self.offset, self.payload_bytes, self.span_id, self.key)

    @classmethod
    def unpack(cls, packed: bytes) -> Handle | None:
        """Reads it back; None if these bytes are of another length."""
        return cls(*_HANDLE.unpack(packed)) if len(packed) == _HANDLE.size else None


class RingMapping(mmap):
    """A read-only mapping of the ring. It holds the lane under which its bytes are pinned, so that every array over
    it keeps that lane, and the kernel lock on it, alive.

    What is not pinned is read through `fd`: its pages may have been given back to the system, and touching one in the
    mapping would make it anew, or be a SIGBUS where there is no memory for it.

    `identity` is the same in every process that maps this ring, whichever daemon serves it, and no other ring's.
    """

    lane: Lane
    identity: bytes
    fd = -1

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # `close` is taken while there is one: at the interpreter's end `os` may be gone before the last lease.
        if self.fd >= 0:
            close(self.fd)

    def begin(self, lane: Lane, ring_fd: int, instance_id: int) -> None:
        """Takes up the lane, and a descriptor of its own; `ring_fd` stays the caller's."""
        self.lane = lane
        self.fd = os.dup(ring_fd)
        self.identity = _IDENTITY.pack(instance_id, os.fstat(ring_fd).st_ino)

    def copied(self, start: int, size_bytes: int) -> Array:
        """Bytes that nobody pins, (size_bytes,) uint8; zeros where their pages, or the ring, are gone."""
        copied = bytearray(size_bytes)
        into, at = memoryview(copied), 0
        # One call reads 2 GiB at most.
        while at < size_bytes and (got := os.preadv(self.fd, [into[at:]], start + at)):
            at += got
        return np.frombuffer(copied, np.uint8)

    def span(self, offset: int) -> SpanHeader | None:
        """What the ring says of the span at `offset`, pinned or not; None where there is none."""
        try:
            return SpanHeader.unpack(self.copied(offset, SPAN_HEADER_BYTES).tobytes())
        except Corrupt:
            return None

    def span_at(self, array: Array, offset: int) -> int:
        """Where the span begins in whose payload `array`, an array over this mapping, begins at `offset`."""
        begins: int = np.frombuffer(self, np.uint8).__array_interface__["data"][0]
        at: int = array.__array_interface__["data"][0] - begins - offset - SPAN_HEADER_BYTES
        return at

    def handle(self, array: Array, offset: int, payload_bytes: int) -> bytes | None:
        """The handle of the payload in which `array`, an array over this mapping, begins at `offset`."""
        span_at = self.span_at(array, offset)
        header = self.span(span_at)
        if header is None or header.payload_bytes != payload_bytes:
            return None
        return Handle(self.identity, span_at, payload_bytes, header.span_id, header.key).pack()

    def named(self, packed: bytes) -> tuple[int, SpanHeader] | None:
        """Where the payload of a handle begins, and its span's header.

        None if the bytes are no handle, or one of another ring, or what stands there is not what it names.
        """
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


def mapping_under(array: Array) -> RingMapping | None:
    """The mapping in which an array lies; None where it lies in memory of this process's own."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, RingMapping) else None
