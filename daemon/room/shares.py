"""The shares of uids: whose entries are evicted when the ring is full.

A uid without competitors may use the whole ring. Once uids compete, each uid with a client is entitled to an equal
share: with n such uids, a uid is over its share once it has more than 1/n of the bytes, of the entries, or of the
tokens (its dominant share: Ghodsi et al., "Dominant Resource Fairness", NSDI 2011). Room for a grant is then made from
uids over their share, counting the grant to its own uid, and from uids without a client.

There is always such a uid: if all uids were within their shares with the grant counted, the ring would not be full.

Owns: which owners have clients. Does not own: the sums (`Tenants`), and chooses no victims.
"""

from __future__ import annotations

from collections import Counter

from ..forms.limits import RingBudget
from ..store.tenants import Tenants


class OwnerShares:
    """The shares in one ring. `budget`: what is shared."""

    def __init__(self, tenants: Tenants, budget: RingBudget) -> None:
        self._tenants = tenants
        self._budget = budget
        self._clients: Counter[int] = Counter()

    def joined(self, owner: int) -> None:
        """A client of the owner has connected."""
        self._clients[owner] += 1

    def left(self, owner: int) -> None:
        """A client of the owner has disconnected."""
        self._clients[owner] -= 1
        if not self._clients[owner]:
            del self._clients[owner]

    def rivals(self, owner: int) -> int:
        """The number of owners that share the ring, `owner` included."""
        return len(self._clients) + (owner not in self._clients)

    def evictable(self, owner: int, size_bytes: int) -> frozenset[int] | None:
        """The owners whose entries may be evicted for `size_bytes` of `owner`. None: those of any owner, since no other
        one has a client."""
        rivals = self.rivals(owner)
        if rivals < 2:
            return None
        tenants, budget, found = self._tenants, self._budget, []
        for each, owned_bytes in enumerate(tenants.owned_bytes):
            mine = each == owner
            shares = (
                (owned_bytes + mine * size_bytes) / max(budget.put_bytes_max, 1),
                (tenants.owned_entries[each] + mine) / budget.max_entries,
                tenants.owned_tokens[each] / budget.max_tokens if budget.max_tokens else 0.0,
            )
            if (owned_bytes and not mine and each not in self._clients) or max(shares) * rivals > 1:
                found.append(each)
        return frozenset(found)
