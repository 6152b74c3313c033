"""Least frequently used, with dynamic aging: whoever was used least, lately, is coldest.

An entry's priority is its number of uses plus the store's age at its last use; the age is the priority of what was
last evicted. So a new entry starts level with the coldest ones, and one that was popular long ago is overtaken
(LFU-DA: Arlitt, Cherkasova, Dilley, Friedrich, Jin, "Evaluating content management techniques for Web proxy caches",
2000).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from .kin import Kin
from .newcomer import Newcomer


class LFU:
    """Buckets of equal priority, each in order of last use.

    An operation is O(1) but for a priority that is new or gone, which costs a bisection and a move of the list of
    distinct priorities.
    """

    name = "lfu"

    def __init__(self) -> None:
        self._uses: dict[int, int] = {}
        self._priority: dict[int, int] = {}
        self._levels: dict[int, OrderedDict[int, int]] = {}
        self._sorted_levels: list[int] = []
        self._age = 0
        self._clock = 0
        self._kin = Kin()

    def __len__(self) -> int:
        return len(self._uses)

    def inserted(self, new: Newcomer, now: float) -> None:
        assert new.span_id not in self._uses, new.span_id
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
        if priority == self._sorted_levels[0]:
            self._age = max(self._age, priority)
        self._leave_level(span_id)
        del self._uses[span_id]
        del self._priority[span_id]

    def turn(self, agent: str, state: str, now: float) -> None:
        """Nothing follows from it."""

    def admits(self, new: Newcomer, victim: int) -> bool:
        return True

    def coldest(self) -> Iterator[int]:
        return self._kin.leaves_first(span for level in self._sorted_levels for span in self._levels[level])

    def rank(self, span_id: int) -> tuple[int, int]:
        priority = self._priority[span_id]
        return (priority, self._levels[priority][span_id])

    def check_invariants(self) -> None:
        assert self._sorted_levels == sorted(self._levels), "the levels are out of order"
        assert all(self._levels.values()), "an empty level was kept"
        members = {span: level for level, spans in self._levels.items() for span in spans}
        self._kin.check_invariants(set(self._uses))
        assert members == self._priority and members.keys() == self._uses.keys()

    def _raise_to(self, span_id: int, priority: int) -> None:
        self._clock += 1
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = OrderedDict()
            insort(self._sorted_levels, priority)
        level[span_id] = self._clock
        self._priority[span_id] = priority

    def _leave_level(self, span_id: int) -> None:
        priority = self._priority[span_id]
        level = self._levels[priority]
        del level[span_id]
        if not level:
            del self._levels[priority]
            del self._sorted_levels[bisect_left(self._sorted_levels, priority)]
