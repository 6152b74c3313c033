"""The amounts that each uid has in the ring, and the uids whose entries are evicted when the ring is full.

A uid without competitors may use the whole ring. Once uids compete, each uid with a client is entitled to an equal
share: with n such uids, a uid is over its share once it has more than 1/n of the bytes, of the entries, or of the
tokens (its dominant share: Ghodsi et al., "Dominant Resource Fairness", NSDI 2011). Room for a put is then made from
uids over their share, counting the put to its own uid, and from uids without a client.

There is always such a uid: if all uids were within their shares with the put counted, the ring would not be full.

Owns the sums, and which uids have clients. Chooses no victims.

Invariant: each sum is that of the uid's spans and entries; a uid without any has no sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True)
class Holding:
    """The amounts of one uid. `size_bytes` of spans, retired ones included; `entries` and `tokens` of entries and of
    puts in flight."""

    size_bytes: int = 0
    entries: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """The totals that uids share. None: no limit."""

    size_bytes: int
    entries: int
    tokens: int | None


class Holdings:
    """The sums and the clients by uid."""

    def __init__(self) -> None:
        self._of: dict[int, Holding] = {}
        self._clients: Counter[int] = Counter()

    def add(self, uid: int, size_bytes: int = 0, entries: int = 0, tokens: int = 0) -> None:
        """Adds these amounts, which may be negative, to the uid's sums."""
        holding = self._of.get(uid)
        if holding is None:
            holding = self._of[uid] = Holding()
        holding.size_bytes += size_bytes
        holding.entries += entries
        holding.tokens += tokens
        if not (holding.size_bytes or holding.entries or holding.tokens):
            del self._of[uid]

    def joined(self, uid: int) -> None:
        """A client of the uid has connected."""
        self._clients[uid] += 1

    def left(self, uid: int) -> None:
        """A client of the uid has disconnected."""
        self._clients[uid] -= 1
        if not self._clients[uid]:
            del self._clients[uid]

    def of(self, uid: int) -> Holding:
        """The amounts of the uid."""
        return self._of.get(uid) or Holding()

    def uids(self) -> Collection[int]:
        """The uids that have any amount."""
        return self._of.keys()

    def rivals(self, uid: int) -> int:
        """The number of uids that share the ring, `uid` included."""
        return len(self._clients) + (uid not in self._clients)

    def evictable_uids(self, uid: int, more: Holding, capacity: Capacity) -> frozenset[int] | None:
        """The uids whose entries may be evicted to make room for `more` of `uid`. None: those of any uid, since no
        other uid has a client."""
        rivals = self.rivals(uid)
        if rivals < 2:
            return None
        own = self._of.get(uid, Holding())
        after = Holding(own.size_bytes + more.size_bytes, own.entries + more.entries, own.tokens + more.tokens)
        return frozenset(
            each
            for each, holding in (self._of | {uid: after}).items()
            if (each not in self._clients and each != uid) or _share(holding, capacity) * rivals > 1
        )

    def check_invariants(self, expected: dict[int, Holding]) -> None:
        """Asserts that the sums are the expected ones."""
        assert self._of == expected
        assert all(self._clients.values())


def _share(holding: Holding, capacity: Capacity) -> float:
    """The largest of the uid's shares."""
    tokens = holding.tokens / capacity.tokens if capacity.tokens else 0.0
    return max(holding.size_bytes / capacity.size_bytes, holding.entries / capacity.entries, tokens)
