"""Least recently used: whoever was used longest ago is coldest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from .kin import Kin
from .newcomer import Newcomer


class LRU:
    """Order of last use. Every operation is O(1)."""

    name = "lru"

    def __init__(self) -> None:
        self._last_use: OrderedDict[int, int] = OrderedDict()
        self._uses = 0
        self._kin = Kin()

    def __len__(self) -> int:
        return len(self._last_use)

    def inserted(self, new: Newcomer, now: float) -> None:
        assert new.span_id not in self._last_use, new.span_id
        self._uses += 1
        self._last_use[new.span_id] = self._uses
        self._kin.inserted(new.span_id, new.parent)

    def accessed(self, span_id: int, now: float, agent: str = "") -> None:
        self._uses += 1
        self._last_use[span_id] = self._uses
        self._last_use.move_to_end(span_id)

    def hidden(self, span_id: int) -> None:
        self._kin.hidden(span_id)

    def shown(self, span_id: int) -> None:
        self._kin.shown(span_id)

    def removed(self, span_id: int, *, evicted: bool) -> None:
        del self._last_use[span_id]
        self._kin.removed(span_id)

    def turn(self, agent: str, state: str, now: float) -> None:
        """Nothing follows from it."""

    def admits(self, new: Newcomer, victim: int) -> bool:
        return True

    def coldest(self) -> Iterator[int]:
        return self._kin.leaves_first(iter(self._last_use))

    def rank(self, span_id: int) -> tuple[int, int]:
        return (0, self._last_use[span_id])

    def check_invariants(self) -> None:
        uses = list(self._last_use.values())
        self._kin.check_invariants(set(self._last_use))
        assert uses == sorted(uses) and len(set(uses)) == len(uses)
