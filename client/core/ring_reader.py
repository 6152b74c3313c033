"""A ring that is mapped here, for whoever is handed the name of bytes that another process pins.

Owns: turning a handle into a lease. Does not own the mapping (ring_mapping.py), nor the pin, which is the lender's.

    scheduler:  lease = client.get(key); send(lease.handle())          # and keep `lease` until the worker is done
    worker:     lease = client.ring().borrow(received)                 # no index, no message: it cannot be evicted
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ...errors import BadTree, Corrupt
from ...shm.copy import checksum_of
from ...shm.layout import SPAN_HEADER_BYTES, SpanHeader
from ...shm.recipe import Recipe, recipe
from .lease import Lease, lease_over
from .ring_mapping import Handle, RingMapping

Array = np.ndarray[Any, Any]
_RECIPES_MAX: Final = 4096


class RingReader:
    """One ring's memory. It goes on working when its client is attached elsewhere, closed, or without a daemon.

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

    def __init__(self, mapped: RingMapping, recipes: dict[bytes, Recipe]) -> None:
        """`recipes` by their tree headers; shared with whoever reads the same ring."""
        self._map = mapped
        self._recipes = recipes

    @property
    def identity(self) -> bytes:
        """16 bytes: which ring it is. Every process of the host sees the same, daemons' restarts change nothing."""
        return self._map.identity

    def borrow(self, handle: bytes) -> Lease | None:
        """A lease on what another process pins, without a pin of one's own: no lookup, and no use is counted.

        It is right for as long as the lender keeps the lease that gave the handle, or a view of it; after that its
        bytes may become another entry's, so the lender must know when the borrower is done.

        Returns:
            The lease; None if the handle is another ring's, or the span there is not (or no more) what it names, or
            the bytes are no handle.
        """
        named = self._map.named(handle)
        if named is None:
            return None
        start, span = named
        header = self._map.copied(start, span.tree_bytes).tobytes()
        try:
            known = self._recipes.get(header) or learned(self._recipes, header)
        except BadTree:
            return None
        if known.end_bytes > span.payload_bytes:
            return None
        return lease_over(self._map, start, span.payload_bytes, known)

    def copied(self, handle: bytes) -> Lease | None:
        """A lease on a copy of what a handle names, which is right whether or not the lender keeps its lease: what has
        become another entry's meanwhile is found out by its checksum.

        Returns:
            None as for `borrow`, or where the bytes are no more what the handle names.
        """
        named = self._map.named(handle)
        if named is None:
            return None
        start, span = named
        copied = self._map.copied(start - SPAN_HEADER_BYTES, SPAN_HEADER_BYTES + span.payload_bytes)
        return lease_of_copy(copied, handle, self._recipes)


def lease_of_copy(span: Array, handle: bytes, recipes: dict[bytes, Recipe]) -> Lease | None:
    """A lease on a copy of a span, its header first, (n,) uint8; its leaves are read-only.

    Returns:
        None if the bytes are not, to the last one, what the handle names.
    """
    named, payload = Handle.unpack(handle), span[SPAN_HEADER_BYTES:]
    if named is None or len(payload) != named.payload_bytes:
        return None
    try:
        found = SpanHeader.unpack(span[:SPAN_HEADER_BYTES].tobytes())
        if (found.key, found.span_id, found.payload_bytes) != (named.key, named.span_id, named.payload_bytes):
            return None
        if checksum_of(payload) != found.checksum:
            return None
        header = payload[: found.tree_bytes].tobytes()
        known = recipes.get(header) or learned(recipes, header)
    except (BadTree, Corrupt):
        return None
    if known.end_bytes > len(payload):
        return None
    payload.flags.writeable = False
    return lease_over(payload, 0, len(payload), known)


def learned(recipes: dict[bytes, Recipe], header: bytes) -> Recipe:
    """The recipe of a tree header, kept in `recipes` from now on.

    Raises:
        BadTree: the bytes are no tree header.
    """
    if len(recipes) >= _RECIPES_MAX:
        recipes.clear()
    known = recipes[header] = recipe(header)
    return known
