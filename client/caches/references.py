"""What a sender of the processor cache sends in place of a tree, and the ways in which a receiver reads it.

Owns: the reference, and the order of the ways. Does not own what the entry is (processor_cache.py).

    1. the index, by key: the entry is pinned here, and read where it lies
    2. the same ring, by handle: a copy, checked. The entry was cleared since, or stored anew
    3. the lender's own pin, by loan: a copy over a socket. The sender looks at another ring than the receiver

Invariant: where a reference has a handle, what is read is the very span that the sender looked at, or a copy of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ...shm.recipe import Recipe
from ..core.cache import Client
from ..core.lease import Lease
from ..core.ring_reader import lease_of_copy
from .loans import Borrower


class Reference(NamedTuple):
    """What a sender sends instead of a tree. As msgpack, `msgpack.packb(reference)`, then `Reference(*unpacked)`.

    `handle` and `loan` are of a sender that lends (see `ProcessorCache`), and empty otherwise.

    Example:
        >>> reference = tensord.Reference(key)
        >>> tensord.Reference(*tuple(reference)) == reference       # as msgpack and other codecs send it
        True
    """

    key: bytes
    handle: bytes = b""
    loan: bytes = b""


class Reader:
    """A receiver's reading. Safe to use from several threads."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._borrower = Borrower()
        self._recipes: dict[bytes, Recipe] = {}

    def lease(self, reference: Reference) -> Lease | None:
        """What is referred to; None where none of the ways leads to it."""
        lease = self._client.get(reference.key)
        if not reference.handle or (lease is not None and lease.handle() == reference.handle):
            return lease
        view = self._client.link.view
        found = view.ring.copied(reference.handle) if view is not None else None
        if found is None and reference.loan:
            span = self._borrower.fetch(reference.loan)
            found = lease_of_copy(span, reference.handle, self._recipes) if span is not None else None
        return found

    def done(self, references: Iterable[Reference]) -> None:
        """These are read, or given up: their lenders let them go."""
        loans = [reference.loan for reference in references if reference.loan]
        if loans:
            self._borrower.done(loans)

    def close(self) -> None:
        """Ends what connects it with lenders. Idempotent."""
        self._borrower.close()
