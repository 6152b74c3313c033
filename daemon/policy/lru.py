"""Least recently used: whoever was used longest ago is coldest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class LRU:
    """Order of last use. Every operation is O(1)."""

    name = "lru"

    def __init__(self) -> None:
        self._last_use: OrderedDict[int, int] = OrderedDict()
        self._uses = 0

    def __len__(self) -> int:
        return len(self._last_use)

    def inserted(self, span_id: int, key: bytes, size_bytes: int, tokens: int, now: float) -> None:
        assert span_id not in self._last_use, span_id
        self._uses += 1
        self._last_use[span_id] = self._uses

    def accessed(self, span_id: int, now: float) -> None:
        self._uses += 1
        self._last_use[span_id] = self._uses
        self._last_use.move_to_end(span_id)

    def removed(self, span_id: int) -> None:
        del self._last_use[span_id]

    def coldest(self) -> Iterator[int]:
        return iter(self._last_use)

    def rank(self, span_id: int) -> tuple[int, int]:
        return (0, self._last_use[span_id])

    def check_invariants(self) -> None:
        uses = list(self._last_use.values())
        assert uses == sorted(uses) and len(set(uses)) == len(uses)
