"""What each uid has in the ring, and who gives way when it is full.

The ring is divided by use: a uid may have all that no other uid wants. Once uids compete, each that has a client here
is entitled to an equal share: of n uids, a uid is over its share once it has more than 1/n of the bytes, of the
entries, or of the tokens (its dominant share: Ghodsi et al., "Dominant Resource Fairness", NSDI 2011). Room for a put
is then made from uids that are over their share, the putter's with the put counted in, and from uids without a client.

Were all uids within their shares the ring would not be full: some uid is always over its share, or the putter's is.

Owns the sums, and which uids have clients. Chooses no victims.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True)
class Holding:
    """`size_bytes` of spans, retired ones included; `entries` and `tokens` of entries, on their way or published."""

    size_bytes: int = 0
    entries: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """All that is to be had; None: without a limit."""

    size_bytes: int
    entries: int
    tokens: int | None


class Holdings:
    """Sums by uid."""

    def __init__(self) -> None:
        self._of: dict[int, Holding] = {}
        self._clients: Counter[int] = Counter()

    def add(self, uid: int, size_bytes: int = 0, entries: int = 0, tokens: int = 0) -> None:
        """The uid has so much more, or less."""
        holding = self._of.get(uid)
        if holding is None:
            holding = self._of[uid] = Holding()
        holding.size_bytes += size_bytes
        holding.entries += entries
        holding.tokens += tokens
        if holding == Holding():
            del self._of[uid]

    def joined(self, uid: int) -> None:
        """A client of the uid is here."""
        self._clients[uid] += 1

    def left(self, uid: int) -> None:
        """A client of the uid has left."""
        self._clients[uid] -= 1
        if not self._clients[uid]:
            del self._clients[uid]

    def of(self, uid: int) -> Holding:
        """What the uid has."""
        return self._of.get(uid) or Holding()

    def uids(self) -> Collection[int]:
        """The uids that have anything."""
        return self._of.keys()

    def rivals(self, uid: int) -> int:
        """How many uids the ring is shared by, `uid` included."""
        return len(self._clients) + (uid not in self._clients)

    def evictable_uids(self, uid: int, more: Holding, capacity: Capacity) -> frozenset[int] | None:
        """The uids whose entries make room for `more` of `uid`; None: whosoever's, since no other uid has clients."""
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
        """Asserts that the sums are these."""
        assert self._of == expected
        assert all(self._clients.values())


def _share(holding: Holding, capacity: Capacity) -> float:
    """The largest of its shares."""
    tokens = holding.tokens / capacity.tokens if capacity.tokens else 0.0
    return max(holding.size_bytes / capacity.size_bytes, holding.entries / capacity.entries, tokens)
