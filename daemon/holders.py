"""How many lanes pin each span: what clients are told of, and nothing is decided by.

Owns the counts as they were last told. Ids that no slot of the index has are not counted: a client may make up any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..shm.layout import REUSE_HOLDERS_MAX
from .lane_scan import Stored

Array = np.ndarray[Any, Any]


class Holders:
    """One ring's. For one thread at a time."""

    def __init__(self, span_ids: Array, holders: Array) -> None:
        """`span_ids` are held by so many as `holders` says, for all that the index tells; (n,) uint64 each."""
        order = np.argsort(span_ids)
        self._span_ids = span_ids[order]
        self._holders = holders[order]

    def __len__(self) -> int:
        """How many spans are held."""
        return len(self._span_ids)

    def count(self, span_ids: Callable[[], Array]) -> Count:
        """Begins to count anew. `span_ids()` gives the ids that slots of the index have, sorted, (n,) uint64."""
        return Count(self, span_ids)

    def take(self, span_ids: Array, holders: Array) -> list[tuple[int, int]]:
        """Takes in how many lanes pin each span that any pins: (n,) each, ids sorted and distinct.

        Returns:
            (span id, holders) where that is not what it was; 0 where nobody holds it any more.
        """
        holders = np.minimum(holders, REUSE_HOLDERS_MAX).astype(np.uint64)
        known = np.union1d(self._span_ids, span_ids)
        before, now = np.zeros((2, len(known)), np.uint64)
        before[np.searchsorted(known, self._span_ids)] = self._holders
        now[np.searchsorted(known, span_ids)] = holders
        self._span_ids, self._holders = span_ids, holders
        changed = before != now
        return list(zip(known[changed].tolist(), now[changed].tolist(), strict=True))


class Count:
    """One count, lane by lane. Its memory is bounded by the index, whatever the lanes hold."""

    def __init__(self, holders: Holders, span_ids: Callable[[], Array]) -> None:
        self._holders = holders
        self._span_ids = span_ids
        self._stored: Stored | None = None

    def add(self, pins: Array) -> None:
        """Takes in what one more lane pins, (n,) uint64 with repetitions, which count once."""
        if len(pins):
            if self._stored is None:
                self._stored = Stored(self._span_ids())
            self._stored.add(pins)

    def changes(self) -> list[tuple[int, int]]:
        """(span id, holders) where that is not what it was; 0 where nobody holds it any more."""
        none = np.empty(0, np.uint64)
        return self._holders.take(*(self._stored.found() if self._stored is not None else (none, none)))
