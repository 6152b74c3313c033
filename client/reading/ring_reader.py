"""Reads entries that another process pins, by their handles. A borrow reads no index and sends no message.

scheduler:  lease = client.get(key); send(lease.handle())          # and keep `lease` until the worker is done
worker:     lease = client.ring().borrow(received)                 # the pinned entry cannot be evicted
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

import numpy as np

from ...errors import BadTree, Corrupt, UsageError, shown
from ...shm.payloads.copy import checksum_of
from ...shm.payloads.recipe import Recipe, recipe
from ...shm.ring.layout import SPAN_HEADER_BYTES, SpanHeader
from .lease import Lease, lease_over
from .ring_mapping import Handle, RingMapping

Array = np.ndarray[Any, Any]
_RECIPES_MAX: Final = 4096


class Recipes(dict[bytes, Recipe]):
    """Recipes by their tree headers, parsed at their first use. Looking up bytes that are no header raises BadTree."""

    def __missing__(self, header: bytes) -> Recipe:
        if len(self) >= _RECIPES_MAX:
            self.clear()
        known = self[header] = recipe(header)
        return known


class RingReader:
    """One ring's memory. Stays usable after its client is closed, attached to another ring, or without a daemon.

    Example:
        >>> cache.put(key, np.arange(3), wait=True).state
        'stored'
        >>> with cache.get(key) as lender:                          # one process keeps the lease, and sends its handle
        ...     handle = lender.handle()
        ...     with cache.ring().borrow(handle) as borrowed:       # another process on the host reads the entry
        ...         borrowed.tree
        array([0, 1, 2])
    """

    __slots__ = ("_map", "_recipes")

    def __init__(self, mapped: RingMapping, recipes: Recipes) -> None:
        """`recipes`: all readers of a ring share them."""
        self._map = mapped
        self._recipes = recipes

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ring reader maps the ring in this process, so it cannot be pickled or copied: call Client.ring() in the "
            "other process"
        )

    @property
    def identity(self) -> bytes:
        """16 bytes that identify the ring: the same in every process of the host, also after the daemon restarts."""
        return self._map.identity

    @property
    def inode(self) -> int:
        """The number of the ring's file, by which the same memory is known again."""
        return self._map.inode

    @property
    def mapping(self) -> RingMapping:
        """The ring's memory, mapped read-only."""
        return self._map

    def __len__(self) -> int:
        """The bytes of the ring that are mapped."""
        return len(self._map)

    def borrow(self, handle: bytes) -> Lease | None:
        """Returns a lease on an entry that another process pins, without a pin, a lookup or a counted use.

        The lease is valid while the lender keeps the lease that gave the handle, or a view of it. Afterwards the bytes
        may become another entry's. So the lender must know when the borrower is done.

        Returns:
            The lease; None if the bytes are no handle, the handle is of another ring, or the span there does not match
            it.

        Raises:
            UsageError: `handle` is not bytes.
        """
        named = self._map.named(_bytes(handle))
        if named is None:
            return None
        start, span = named
        try:
            known = self._recipes[self._map.copied(start, span.tree_bytes).tobytes()]
        except BadTree:
            return None
        if known.end_bytes > span.payload_bytes:
            return None
        return lease_over(self._map, start, span.payload_bytes, known)

    def copied(self, handle: bytes) -> Lease | None:
        """Returns a lease on a copy of a handle's entry. The copy is valid whether or not the lender keeps its lease:
        the checksum shows if another entry has replaced the bytes.

        Returns:
            None as for `borrow`, or if the bytes do not match the checksum.

        Raises:
            UsageError: as for `borrow`.
        """
        named = self._map.named(_bytes(handle))
        if named is None:
            return None
        start, span = named
        copied = self._map.copied(start - SPAN_HEADER_BYTES, SPAN_HEADER_BYTES + span.payload_bytes)
        return lease_of_copy(copied, handle, self._recipes)


def _bytes(handle: object) -> bytes:
    if not isinstance(handle, bytes | bytearray | memoryview):
        raise UsageError(f"handle is {shown(handle)}; it must be bytes, as Lease.handle() returns them")
    return bytes(handle)


def lease_of_copy(span: Array, handle: bytes, recipes: Recipes) -> Lease | None:
    """A lease on a copy of a span, its header first, as uint8 of shape (n,); None if any byte differs from the handle's
    payload. Of a large entry without a checksum only key, size and tree are compared."""
    named, payload = Handle.unpack(handle), span[SPAN_HEADER_BYTES:]
    if named is None or len(payload) != named.payload_bytes:
        return None
    try:
        found = SpanHeader.unpack(span[:SPAN_HEADER_BYTES].tobytes())
        if (found.key, found.span_id, found.payload_bytes) != (named.key, named.span_id, named.payload_bytes):
            return None
        if found.checksum and checksum_of(payload) != found.checksum:
            return None
        known = recipes[payload[: found.tree_bytes].tobytes()]
    except (BadTree, Corrupt):
        return None
    if known.end_bytes > len(payload):
        return None
    payload.flags.writeable = False
    return lease_over(payload, 0, len(payload), known)
