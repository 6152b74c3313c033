"""Namespaces and owners by small numbers, and what each has in the ring.

Owns: the numbers of namespaces (by the tag that a key begins with) and of uids, and the sums of their entries. Does not
own: generations, nor the limits that the sums are compared with.

Invariants: a number is never given to another namespace or uid. The sums are those of the rows in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...errors import LimitReached

TENANTS_MAX: Final = 1 << 16
"""Namespaces, and uids. A column has 16 bits for each."""


class Tenants:
    """All namespaces and owners of one store."""

    def __init__(self) -> None:
        self.number_of: dict[bytes, int] = {}
        self.tags: list[bytes] = []
        self.entries: list[int] = []
        """Entries, by the number of their namespace."""
        self.bytes: list[int] = []
        self.invalidated: set[bytes] = set()
        """Tags of namespaces that were invalidated once: only their keys may be past."""
        self.owner_of: dict[int, int] = {}
        self.uids: list[int] = []
        self.owned_bytes: list[int] = []
        """Bytes of the ring by owner: of entries, of grants, and of what waits for a scan."""
        self.owned_entries: list[int] = []
        self.owned_tokens: list[int] = []
        self.total_entries = 0
        self.total_tokens = 0

    def add(self, tag: bytes) -> int:
        """The number of a namespace, which is new or known.

        Raises:
            LimitReached: there are TENANTS_MAX.
        """
        number = self.number_of.get(tag)
        if number is None:
            if len(self.tags) == TENANTS_MAX:
                raise LimitReached(f"{TENANTS_MAX} namespaces have been used since the daemon started: restart it")
            number = self.number_of[tag] = len(self.tags)
            self.tags.append(tag)
            self.entries.append(0)
            self.bytes.append(0)
        return number

    def owner(self, uid: int) -> int:
        """The number of a uid, which is new or known."""
        number = self.owner_of.get(uid)
        if number is None:
            if len(self.uids) == TENANTS_MAX:
                raise LimitReached(f"{TENANTS_MAX} uids have used this daemon since it started: restart it")
            number = self.owner_of[uid] = len(self.uids)
            self.uids.append(uid)
            self.owned_bytes.append(0)
            self.owned_entries.append(0)
            self.owned_tokens.append(0)
        return number

    def lent(self, owner: int, size_bytes: int) -> None:
        """Bytes are an owner's from now on."""
        self.owned_bytes[owner] += size_bytes

    def returned(self, owner: int, size_bytes: int) -> None:
        """Bytes are free."""
        self.owned_bytes[owner] -= size_bytes

    def stored(self, owner: int, entries: int, tokens: int) -> None:
        """Entries were stored in bytes that the owner has."""
        self.owned_entries[owner] += entries
        self.owned_tokens[owner] += tokens
        self.total_entries += entries
        self.total_tokens += tokens

    def ended(self, names: Sequence[int], owners: Sequence[int], sizes: Sequence[int], tokens: Sequence[int]) -> None:
        """Entries have ended; their bytes are their owners' until they are free."""
        entries, size_of, owned, owned_tokens = self.entries, self.bytes, self.owned_entries, self.owned_tokens
        total_tokens = 0
        for name, owner, size, count in zip(names, owners, sizes, tokens, strict=True):
            entries[name] -= 1
            size_of[name] -= size
            owned[owner] -= 1
            owned_tokens[owner] -= count
            total_tokens += count
        self.total_entries -= len(names)
        self.total_tokens -= total_tokens
