"""The answer to a question about an entry: its metadata, and how much it is shared.

Owns: the record, and how it is read. Does not own: the mappings that they are read from (view.py).
Invariants: a record is a copy; it never changes, and pins nothing.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from ...shm.index.index import PLACE_OFFSET_MASK, IndexReader
from ...shm.ring.layout import unix_at_boot_s
from .ring_mapping import RingMapping

_ATTEMPTS: Final = 4
"""How often an entry is looked up that changes while it is read."""


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
    for _ in range(_ATTEMPTS):
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
