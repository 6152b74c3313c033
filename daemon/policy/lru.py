"""Least recently used: whoever was used longest ago is coldest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from heapq import merge
from operator import itemgetter

from .explained import Explained
from .kin import Kin
from .newcomer import Newcomer


class LRU:
    """Order of last use, of each owner's spans. Every operation is O(1)."""

    name = "lru"

    def __init__(self) -> None:
        self._owner: dict[int, int] = {}
        self._last_use: dict[int, OrderedDict[int, int]] = {}
        self._uses = 0
        self._kin = Kin()

    def __len__(self) -> int:
        return len(self._owner)

    def inserted(self, new: Newcomer, now: float) -> None:
        assert new.span_id not in self._owner, new.span_id
        self._uses += 1
        self._owner[new.span_id] = new.owner
        self._last_use.setdefault(new.owner, OrderedDict())[new.span_id] = self._uses
        self._kin.inserted(new.span_id, new.parent)

    def accessed(self, span_id: int, now: float, agent: str = "") -> None:
        self._uses += 1
        order = self._last_use[self._owner[span_id]]
        order[span_id] = self._uses
        order.move_to_end(span_id)

    def hidden(self, span_id: int) -> None:
        self._kin.hidden(span_id)

    def shown(self, span_id: int) -> None:
        self._kin.shown(span_id)

    def removed(self, span_id: int, *, evicted: bool) -> None:
        owner = self._owner.pop(span_id)
        del self._last_use[owner][span_id]
        if not self._last_use[owner]:
            del self._last_use[owner]
        self._kin.removed(span_id)

    def turn(self, agent: str, state: str, now: float) -> None:
        """Nothing follows from it."""

    def admits(self, new: Newcomer, victim: int) -> bool:
        return True

    def coldest(self, owners: Collection[int] | None = None) -> Iterator[int]:
        orders = [order.items() for owner, order in self._last_use.items() if owners is None or owner in owners]
        uses = iter(orders[0]) if len(orders) == 1 else merge(*orders, key=itemgetter(1))
        return self._kin.leaves_first(span_id for span_id, _ in uses)

    def rank(self, span_id: int) -> tuple[int, int]:
        return (0, self._last_use[self._owner[span_id]][span_id])

    @property
    def window_bytes(self) -> None:
        return None

    def worth(self, span_id: int) -> float:
        """The number of its last use, among all uses."""
        return float(self.rank(span_id)[1])

    def explain(self, span_id: int) -> Explained:
        return Explained(self.worth(span_id))

    def recall(self, key: bytes) -> None:
        """Nothing is remembered."""

    def check_invariants(self) -> None:
        self._kin.check_invariants(set(self._owner))
        assert self._owner == {span: owner for owner, order in self._last_use.items() for span in order}
        for order in self._last_use.values():
            uses = list(order.values())
            assert uses and uses == sorted(uses) and len(set(uses)) == len(uses)
