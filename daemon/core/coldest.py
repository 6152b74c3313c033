"""Evictable entries, coldest first, as one shared walk for all searches within one event.

One event may search several times: for a stretch of the ring, for the budgets, for a batch. Each search gets the same
entries, and the policy yields each entry once.

Owns the walks, and the entries in use that the walks found. Does not own which entries are evictable (`unevictable`)
nor their order (`eviction_order`).

Invariant: a walk examines at most LOOKS_MAX entries after those that the caller skips.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from .entries import SpanEntry
from .pins import Pins
from .span_table import SpanTable

LOOKS_MAX: Final = 256
"""Entries that one walk examines after those that the caller skips."""


@dataclass(slots=True)
class _Walk:
    order: Iterator[SpanEntry]
    found: list[SpanEntry] = field(default_factory=list)
    looks: int = 0


class Coldest:
    """The walks, one for each set of owners."""

    def __init__(self, memory: SpanTable, pins: Pins, may_go: Callable[[SpanEntry], bool]) -> None:
        self._memory = memory
        self._pins = pins
        self._may_go = may_go
        self._walks: dict[frozenset[int] | None, _Walk] = {}
        self._in_the_way: list[SpanEntry] = []
        self._looked_for: tuple[AbstractSet[int], int, int] | None = None
        self._unlooked = 0
        self.has_more = False
        """Whether the last walk ended before it had examined all entries that may be evictable. The next walk examines
        more."""

    def begin(self) -> None:
        """Starts new walks, since entries, pins or worths may have changed.

        Sets aside the entries of the last walks that are still in use, so that the next walks do not meet them.
        Rechecks entries that were set aside before if pins have changed, at most LOOKS_MAX of them per call.
        """
        memory = self._memory
        self._walks.clear()
        for entry in self._in_the_way:
            if not self._may_go(entry):
                memory.order.set_aside(entry)
        self._in_the_way.clear()
        now_for = memory.last_pinned, self._pins.changes, memory.sequences.changes
        known_for = self._looked_for
        if known_for is None or known_for[0] is not now_for[0] or known_for[1:] != now_for[1:]:
            self._looked_for, self._unlooked = now_for, memory.order.set_aside_count
        self._unlooked -= memory.order.recheck(min(self._unlooked, LOOKS_MAX), memory.last_pinned, self._may_go)

    def walk(self, skip: int = 0, owners: frozenset[int] | None = None) -> Iterator[SpanEntry]:
        """Evictable entries, coldest first and children before parents, after the first `skip`; of `owners` if given.
        Lazy: valid until the next change, which `begin` must follow."""
        walk = self._walks.get(owners)
        if walk is None:
            walk = self._walks[owners] = _Walk(self._memory.order.coldest(owners))
        self.has_more = False
        at = skip
        while True:
            if at < len(walk.found):
                yield walk.found[at]
                at += 1
                continue
            entry = next(walk.order, None)
            if entry is None:
                self.has_more = self._unlooked > 0
                return
            if walk.looks >= LOOKS_MAX + skip:
                walk.order = chain((entry,), walk.order)
                self.has_more = True
                return
            walk.looks += 1
            if self._may_go(entry):
                walk.found.append(entry)
            else:
                self._in_the_way.append(entry)
