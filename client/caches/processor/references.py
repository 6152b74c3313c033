"""References: the messages of the processor cache that stand for a tree, and how a receiver reads them.

Owns: the reference, and the order of the reads. Does not own: the contents of an entry (payload.py).

    1. by key, in the index: the entry is pinned and read in place
    2. by handle, in the same ring: a checked copy. The entry was cleared or replaced since
    3. by loan, from the lender's pin: a copy over a socket. Sender and receiver map different rings

Invariants: a reference with a handle is read from exactly the span that the sender saw, or from a copy of it.
"""

from __future__ import annotations

from typing import NamedTuple

from ....shm.payloads.recipe import Recipe
from ...core.client import Client
from ...reading.lease import Lease
from ...reading.ring_reader import lease_of_copy
from .loans import fetch


class Reference(NamedTuple):
    """A sender sends it in place of a tree. As msgpack: `msgpack.packb(reference)`, then `Reference(*unpacked)`.

    With `handle` and `loan` a receiver finds exactly the entry that the sender keeps for it.

    Example:
        >>> reference = tensord.Reference(key)
        >>> tensord.Reference(*tuple(reference)) == reference       # as msgpack and other codecs send it
        True
    """

    key: bytes
    handle: bytes = b""
    loan: bytes = b""


def lease_of(reference: Reference, client: Client, recipes: dict[bytes, Recipe]) -> Lease | None:
    """A lease on a reference's entry, or None if no way of reading finds it. `recipes`: parsed tree headers, kept from
    call to call."""
    lease = client.get(reference.key)
    if not reference.handle or (lease is not None and lease.handle() == reference.handle):
        return lease
    view = client.link.view
    found = view.ring.copied(reference.handle) if view is not None else None
    if found is None and reference.loan:
        span = fetch(reference.loan)
        found = lease_of_copy(span, reference.handle, recipes) if span is not None else None
    return found
