"""The order of eviction: which entries the policy may choose, and its order extended by the parents of blocks.

An entry is evictable for the policy while it is published, has no published child, and is not set aside. An entry in
use is set aside, so that walks do not meet it again, until a recheck finds it unused.

Owns `SpanEntry.may_go` and `SpanEntry.set_aside`, and reports each change to the policy. Does not own which entries are
published (`entries`), nor parents and children (`sequences`).

Invariant: the policy's evictable spans are exactly the entries whose `may_go` is set.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet
from itertools import islice

from ..policy.candidate import Candidate
from ..policy.leaf_first import leaf_first
from ..policy.replacement import Replacement
from .entries import EntryState, EntryTable, SpanEntry


class EvictionOrder:
    """The evictable entries, ordered by `policy`."""

    def __init__(self, policy: Replacement, entries: EntryTable) -> None:
        self.policy = policy
        self._entries = entries
        self._set_aside: OrderedDict[SpanEntry, None] = OrderedDict()

    def coldest(self, owners: Collection[int] | None = None) -> Iterator[SpanEntry]:
        """Entries in the order of eviction, of `owners` if given: the coldest first, children before their parents.

        Lazy: valid until the next change.
        """
        policy = self.policy

        def parent(entry: SpanEntry) -> SpanEntry | None:
            above = entry.parent
            if above is None or above.state is not EntryState.LIVE:
                return None
            return above if owners is None or above.owner_uid in owners else None

        leaves = (entry for entry in map(self._entries.numbered, policy.coldest(owners)) if entry is not None)
        return leaf_first(leaves, lambda e: policy.rank(e.number), parent, lambda e: e.child_count)

    def add(self, entry: SpanEntry, now: float) -> None:
        """Adds a newly published entry."""
        self.policy.inserted(_candidate(entry), now)
        entry.may_go = True
        self.update_policy(entry)

    def update_policy(self, entry: SpanEntry) -> None:
        """Tells the policy if the entry, or its parent, has become evictable or is no longer evictable."""
        for each in (entry, entry.parent):
            if each is not None and each.may_go != _may_go(each):
                each.may_go = not each.may_go
                self.policy.may_go(each.number, each.may_go)

    @property
    def set_aside_count(self) -> int:
        """The number of entries set aside."""
        return len(self._set_aside)

    def set_aside(self, entry: SpanEntry) -> None:
        """Keeps an entry in use, which would be evictable otherwise, out of the order until a recheck."""
        if entry.may_go:
            entry.set_aside = True
            self._set_aside[entry] = None
            self.update_policy(entry)

    def recheck(self, most: int, pinned: AbstractSet[int], may_go: Callable[[SpanEntry], bool]) -> int:
        """Checks up to `most` of the entries that are set aside, and puts the unused ones back into the order.

        Returns:
            The number of checked entries.
        """
        looked = list(islice(self._set_aside, most))
        for entry in looked:
            if entry.span_id in pinned or not may_go(entry):
                self._set_aside.move_to_end(entry)
            else:
                del self._set_aside[entry]
                entry.set_aside = False
                self.update_policy(entry)
        return len(looked)

    def remove(self, entry: SpanEntry) -> None:
        """Forgets that an ended entry was set aside."""
        if entry.set_aside:
            entry.set_aside = False
            del self._set_aside[entry]

    def check_invariants(self, stored: Iterable[SpanEntry]) -> None:
        """Asserts that the policy knows exactly the evictable ones of the stored entries."""
        stored = list(stored)
        self.policy.check_invariants()
        assert len(self.policy) == len(stored)
        may_go = {entry.number for entry in stored if _may_go(entry)}
        assert may_go == {entry.number for entry in stored if entry.may_go} == set(self.policy.coldest())
        assert self._set_aside.keys() == {entry for entry in stored if entry.set_aside}


def _may_go(entry: SpanEntry) -> bool:
    return entry.state is EntryState.LIVE and not entry.child_count and not entry.set_aside


def _candidate(entry: SpanEntry) -> Candidate:
    return Candidate(
        entry.number,
        entry.key,
        entry.span_bytes,
        entry.tokens,
        entry.cost_ms,
        entry.depth,
        entry.before_bytes,
        entry.agent,
        entry.owner_uid,
        entry.uses,
    )
