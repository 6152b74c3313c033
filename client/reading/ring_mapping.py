"""The ring as this process has mapped it, the metadata of an entry, and handles: names of payloads for other processes.

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
from ...shm.index.index import PLACE_OFFSET_MASK, IndexReader
from ...shm.lanes.lane import Lane
from ...shm.payloads.copy import checksum_of
from ...shm.ring.layout import (
    ALIGN_BYTES,
    KEY_BYTES,
    SPAN_HEADER_BYTES,
    SpanHeader,
    punches_of,
    span_bytes,
    unix_at_boot_s,
)
from ...shm.ring.unshared import close_with

Array = np.ndarray[Any, Any]

IDENTITY_BYTES: Final = 16
_IDENTITY: Final = struct.Struct("<QQ")
_HANDLE: Final = struct.Struct(f"<{IDENTITY_BYTES}sQQQ{KEY_BYTES}s")
HANDLE_BYTES: Final = _HANDLE.size
LOOKS_MAX: Final = 4
"""How often an entry is looked up that changes while it is read."""


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


class Entry(Struct, frozen=True):
    """An entry's metadata, and how much it is shared, as the daemon last wrote it into the index.

    Times are Unix seconds by the current wall clock; `expires_unix_s` is 0 if the entry does not expire.

    `holders`: lanes that pin the entry now, counted about once a second. A lane belongs to a client with a lease or a
    view, or to a client that has ended but left live views. A client in a forked child that inherited views counts for
    two lanes: its parent's and its own. Borrowed leases, and copies made because a lane was full, are not counted.
    `uses`: how often any client got, touched or put the entry again since it was stored. The daemon updates the number
    within about a second. A restart keeps it, except for reads while no daemon ran and in the 0.1 s before. If clients
    together read faster than the daemon reads their logs (about 40,000 gets a second), the count is a sample.

    Example:
        >>> cache.put(key, np.arange(3), tokens=576, wait=True).state
        'stored'
        >>> entry = cache.peek(key)
        >>> entry.tokens, entry.expires_unix_s, entry.holders       # clients with a lease or a view of the entry
        (576, 0.0, 0)
    """

    key: bytes
    payload_bytes: int
    tokens: int
    created_unix_s: float
    expires_unix_s: float
    owner_uid: int
    checksum: int
    holders: int
    uses: int


def read_entry(index: IndexReader, ring: RingMapping, key: bytes) -> Entry | None:
    """The metadata of the key's entry. None if there is none, or its span's header is damaged."""
    for _ in range(LOOKS_MAX):
        hit = index.find(key)
        if hit is None:
            return None
        at, seq, _, place, _ = hit
        uses, holders = index.reuse(at)
        h = ring.span(place & PLACE_OFFSET_MASK)
        if index.words[at] == seq:
            if h is None:
                return None
            zero_s = unix_at_boot_s()
            expires_unix_s = zero_s + h.expires_s if h.expires_s else 0.0
            return Entry(
                h.key,
                h.payload_bytes,
                h.tokens,
                zero_s + h.created_s,
                expires_unix_s,
                h.owner_uid,
                h.checksum,
                holders,
                uses,
            )
    return None
