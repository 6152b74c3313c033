"""A survey of the rows that no eviction frees, as far as is known: which limit they leave no room under.

Unevictable are grants, spans that wait for a scan and are pinned, held entries and their ancestors.

Owns: the sums and gaps, found anew each time in one pass over the columns (about 1 ms for a million rows). Does not
own: pins, states, limits. The pins of the last scan are a hint only: a scan decides about each victim.
"""

from __future__ import annotations

import numpy as np

from ..forms.limits import RingBudget
from ..store.entries import Entries
from ..store.table import FREE, LENT, LIVE, WITHDRAWN


class Survey:
    """What cannot go now. `kept`: entries that cannot; `kept_bytes`: bytes that cannot be free."""

    def __init__(self, store: Entries, *, lent: bool = True) -> None:
        """`lent`: whether places that clients have are in the way."""
        table = store.table
        states = np.frombuffer(table.states, np.uint8)
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
