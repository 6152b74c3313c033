"""What may go for a request: entries of which uids, and which rows no eviction frees, as far as is known.

A uid without competitors may use the whole ring. Once uids compete, each uid with a client is entitled to an equal
share: with n such uids, a uid is over its share once it has more than 1/n of the bytes, of the entries, or of the
tokens (its dominant share: Ghodsi et al., "Dominant Resource Fairness", NSDI 2011). Room for a grant is then made from
uids over their share, counting the grant to its own uid, and from uids without a client. There is always such a uid: if
all uids were within their shares with the grant counted, the ring would not be full.

Unevictable are grants, spans that wait for a scan and are pinned, held entries and their ancestors. The pins of the
last scan are a hint only: a scan decides about each victim.

Owns: which owners have clients. Does not own: the sums (`Tenants`), pins, states, limits; and chooses no victims.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from ..forms.limits import RingBudget
from ..store.entries import Entries
from ..store.table import FREE, LENT, LIVE, WITHDRAWN
from ..store.tenants import Tenants


class OwnerShares:
    """The shares in one ring. `budget`: what is shared."""

    def __init__(self, tenants: Tenants, budget: RingBudget) -> None:
        self._tenants = tenants
        self._budget = budget
        self._clients: Counter[int] = Counter()

    def joined(self, owner: int) -> None:
        self._clients[owner] += 1

    def left(self, owner: int) -> None:
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


class Survey:
    """What cannot go now, in one pass over the columns (about 1 ms for a million rows). `kept`: entries that cannot;
    `kept_bytes`: bytes that cannot be free."""

    def __init__(self, store: Entries, *, lent: bool = True) -> None:
        """`lent`: whether places that clients have are in the way."""
        table = store.table
        states = np.frombuffer(table.states, np.uint8)[: table.top]
        # Withdrawn pages are taken back for a request (daemon/host_memory).
        others = (states != LIVE) & (states != FREE) & (states != WITHDRAWN)
        others = np.flatnonzero(others if lent else others & (states != LENT))
        entries = {row for row in store.spans.in_use() if states[row] == LIVE}
        self.kept = {*entries, *store.families.ancestors(entries)}
        self._grants = store.grants.lent if lent else 0
        rows = np.concatenate([others, np.array([*self.kept], np.int64)])
        sizes = table.column("sizes")[rows].astype(np.int64)
        self.kept_bytes = int(sizes.sum())
        self._tokens = int(table.column("tokens")[[*self.kept]].sum()) if self.kept else 0
        offsets = table.column("offsets")[rows].astype(np.int64)
        order = np.argsort(offsets)
        self._lows = np.concatenate([[0], (offsets + sizes)[order]])
        self._highs = np.concatenate([offsets[order], [store.holes.capacity_bytes]])

    def gaps(self, size: int) -> list[tuple[int, int]]:
        """The stretches of at least `size` bytes between unevictable rows: (low, high), by offset."""
        wide = self._highs - self._lows >= size
        return list(zip(self._lows[wide].tolist(), self._highs[wide].tolist(), strict=True))

    def obstacle(self, size: int, budget: RingBudget) -> str | None:
        """The limit or resource that leaves no room for `size` bytes even if all that can go is evicted; None if there
        is none. Each place that is lent is for an entry."""
        if len(self.kept) + self._grants + 1 > budget.max_entries:
            return "max_entries"
        if self.kept_bytes + size > budget.max_bytes:
            return "max_bytes"
        if self.kept_bytes + size > budget.put_bytes_max:
            return "resident_bytes_max"
        if budget.max_tokens is not None and self._tokens > budget.max_tokens:
            return "max_tokens"
        return None if self.gaps(size) else "ring"
