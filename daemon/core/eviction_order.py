"""The order in which entries may go: what the policy is told, and its order with the parents of sequences put in.

An entry may go while it is published, no published entry follows it, and it is not set aside. An entry is set aside
while somebody holds it, so that it is in nobody's way until it is looked at again.

Owns `SpanEntry.may_go` and `SpanEntry.set_aside`, and tells the policy of each change. Does not own which entries are
published (`entries`), nor what follows what (`sequences`).
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
    """The entries that may go, by `policy`."""

    def __init__(self, policy: Replacement, entries: EntryTable) -> None:
        self.policy = policy
        self._entries = entries
        self._set_aside: OrderedDict[SpanEntry, None] = OrderedDict()

    def coldest(self, owners: Collection[int] | None = None) -> Iterator[SpanEntry]:
        """Entries that may go, of `owners` if given: the coldest first, and children before their parents.

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
        """The entry is stored from now on."""
        self.policy.inserted(_candidate(entry), now)
        entry.may_go = True
        self.update_policy(entry)

    def update_policy(self, entry: SpanEntry) -> None:
        """Tells the policy if the entry, or what it follows, may go now, or may not any more."""
        for each in (entry, entry.parent):
            if each is not None and each.may_go != _may_go(each):
                each.may_go = not each.may_go
                self.policy.may_go(each.number, each.may_go)

    @property
    def set_aside_count(self) -> int:
        """How many entries are set aside."""
        return len(self._set_aside)

    def set_aside(self, entry: SpanEntry) -> None:
        """Somebody holds the entry, which could go otherwise: it is in nobody's way until it is looked at again."""
        if entry.may_go:
            entry.set_aside = True
            self._set_aside[entry] = None
            self.update_policy(entry)

    def recheck(self, most: int, pinned: AbstractSet[int], may_go: Callable[[SpanEntry], bool]) -> int:
        """Looks at `most` of the entries that are set aside, and takes back those that may go by now.

        Returns:
            How many were looked at.
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
        """The entry leaves, set aside or not."""
        if entry.set_aside:
            entry.set_aside = False
            del self._set_aside[entry]

    def check_invariants(self, stored: Iterable[SpanEntry]) -> None:
        """Asserts that the policy knows which of the stored entries may go."""
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
    )
