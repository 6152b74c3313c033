"""Least frequently used, with dynamic aging: whoever was used least, lately, is coldest.

An entry's priority is its number of uses plus the store's age at its last use; the age is the priority of what was
last evicted. So a new entry starts level with the coldest ones, and one that was popular long ago is overtaken
(LFU-DA: Arlitt, Cherkasova, Dilley, Friedrich, Jin, "Evaluating content management techniques for Web proxy caches",
2000).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Iterator
from heapq import merge

from .explained import Explained
from .kin import Kin
from .newcomer import Newcomer


class _Levels:
    """One owner's spans in buckets of equal priority, each in order of last use."""

    def __init__(self) -> None:
        self.spans: dict[int, OrderedDict[int, int]] = {}
        self.sorted: list[int] = []

    def add(self, span_id: int, priority: int, clock: int) -> None:
        level = self.spans.get(priority)
        if level is None:
            level = self.spans[priority] = OrderedDict()
            insort(self.sorted, priority)
        level[span_id] = clock

    def leave(self, span_id: int, priority: int) -> None:
        level = self.spans[priority]
        del level[span_id]
        if not level:
            del self.spans[priority]
            del self.sorted[bisect_left(self.sorted, priority)]

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """(priority, clock, span), lowest first."""
        for priority in self.sorted:
            for span_id, clock in self.spans[priority].items():
                yield priority, clock, span_id


class LFU:
    """Buckets of equal priority, of each owner's spans.

    An operation is O(1) but for a priority that is new or gone, which costs a bisection and a move of the list of
    distinct priorities.
    """

    name = "lfu"

    def __init__(self) -> None:
        self._owner: dict[int, int] = {}
        self._uses: dict[int, int] = {}
        self._priority: dict[int, int] = {}
        self._levels: dict[int, _Levels] = {}
        self._age = 0
        self._clock = 0
        self._kin = Kin()

    def __len__(self) -> int:
        return len(self._uses)

    def inserted(self, new: Newcomer, now: float) -> None:
        assert new.span_id not in self._uses, new.span_id
        self._owner[new.span_id] = new.owner
        self._uses[new.span_id] = 1
        self._raise_to(new.span_id, 1 + self._age)
        self._kin.inserted(new.span_id, new.parent)

    def accessed(self, span_id: int, now: float, agent: str = "") -> None:
        self._uses[span_id] += 1
        self._leave_level(span_id)
        self._raise_to(span_id, self._uses[span_id] + self._age)

    def hidden(self, span_id: int) -> None:
        self._kin.hidden(span_id)

    def shown(self, span_id: int) -> None:
        self._kin.shown(span_id)

    def removed(self, span_id: int, *, evicted: bool) -> None:
        self._kin.removed(span_id)
        priority = self._priority[span_id]
        if priority == min(levels.sorted[0] for levels in self._levels.values()):
            self._age = max(self._age, priority)
        self._leave_level(span_id)
        del self._owner[span_id]
        del self._uses[span_id]
        del self._priority[span_id]

    def turn(self, agent: str, state: str, now: float) -> None:
        """Nothing follows from it."""

    def admits(self, new: Newcomer, victim: int) -> bool:
        return True

    def coldest(self, owners: Collection[int] | None = None) -> Iterator[int]:
        orders = [levels for owner, levels in self._levels.items() if owners is None or owner in owners]
        places = iter(orders[0]) if len(orders) == 1 else merge(*orders)
        return self._kin.leaves_first(span_id for _, _, span_id in places)

    def rank(self, span_id: int) -> tuple[int, int]:
        priority = self._priority[span_id]
        return (priority, self._levels[self._owner[span_id]].spans[priority][span_id])

    @property
    def window_bytes(self) -> None:
        return None

    def worth(self, span_id: int) -> float:
        """The entry's priority."""
        return float(self._priority[span_id])

    def explain(self, span_id: int) -> Explained:
        return Explained(self.worth(span_id), self._uses[span_id])

    def recall(self, key: bytes) -> None:
        """Nothing is remembered."""

    def check_invariants(self) -> None:
        members: dict[int, int] = {}
        for owner, levels in self._levels.items():
            assert levels.sorted == sorted(levels.spans), "the levels are out of order"
            assert levels.spans and all(levels.spans.values()), "an empty level was kept"
            for priority, _, span_id in levels:
                members[span_id] = priority
                assert self._owner[span_id] == owner
        self._kin.check_invariants(set(self._uses))
        assert members == self._priority and members.keys() == self._uses.keys() == self._owner.keys()

    def _raise_to(self, span_id: int, priority: int) -> None:
        self._clock += 1
        self._levels.setdefault(self._owner[span_id], _Levels()).add(span_id, priority, self._clock)
        self._priority[span_id] = priority

    def _leave_level(self, span_id: int) -> None:
        owner = self._owner[span_id]
        levels = self._levels[owner]
        levels.leave(span_id, self._priority[span_id])
        if not levels.sorted:
            del self._levels[owner]
