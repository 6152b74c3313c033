"""Counts how many lanes pin each span. Clients read these counts; the daemon decides nothing by them.

Owns: the counts as last reported. Does not own the lanes, nor the index that shows the counts.

Invariant: only ids that a slot of the index has are counted. A client could write any id into its lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise, starmap
from typing import Any, Final

import numpy as np

from ...shm.index.index import REUSE_HOLDERS_MAX
from .lane_scan import Stored, distinct, stored

Array = np.ndarray[Any, Any]
CHANGES_AT_ONCE: Final = 512
"""A list of changes covers at most about this number of spans of the last count, and as many of the new count."""


class Holders:
    """The holders of the spans of one ring. Not thread-safe."""

    def __init__(self, span_ids: Array, holders: Array) -> None:
        """`span_ids` and the number of `holders` of each, as the index shows them; (n,) uint64 each."""
        order = np.argsort(span_ids)
        self._span_ids = span_ids[order]
        self._holders = holders[order]

    def __len__(self) -> int:
        """The number of spans that are pinned."""
        return len(self._span_ids)

    def count(self, span_ids: Callable[[], Iterable[Array]]) -> Count:
        """Begins a new count. `span_ids()` gives the ids in the index piece by piece, each (n,) uint64 and sorted."""
        return Count(self, span_ids)

    def take(self, span_ids: Array, holders: Array) -> Iterator[list[tuple[int, int]]]:
        """Replaces the counts by new ones: pinned spans and the number of lanes that pin each; (n,) each, ids sorted
        and distinct.

        Returns:
            (span id, holders) of the spans whose count has changed, in short lists. 0: no lane pins the span any more.
        """
        holders = np.minimum(holders, REUSE_HOLDERS_MAX).astype(np.uint64)
        old_ids, old = self._span_ids, self._holders
        self._span_ids, self._holders = span_ids, holders
        edges = np.sort(
            np.concatenate([old_ids[CHANGES_AT_ONCE::CHANGES_AT_ONCE], span_ids[CHANGES_AT_ONCE::CHANGES_AT_ONCE]])
        )
        for before, now in zip(_stretches(old_ids, edges), _stretches(span_ids, edges), strict=True):
            known = distinct(np.sort(np.concatenate([old_ids[before], span_ids[now]])))
            counts = np.zeros((2, len(known)), np.uint64)
            counts[0, np.searchsorted(known, old_ids[before])] = old[before]
            counts[1, np.searchsorted(known, span_ids[now])] = holders[now]
            changed = counts[0] != counts[1]
            yield list(zip(known[changed].tolist(), counts[1, changed].tolist(), strict=True))


class Count:
    """One count, lane by lane. Its memory is bounded by the size of the index, whatever clients write into lanes."""

    def __init__(self, holders: Holders, span_ids: Callable[[], Iterable[Array]]) -> None:
        self._holders = holders
        self._span_ids = span_ids
        self._stored: Stored | None = None

    def add(self, pins: Array) -> Iterator[None]:
        """Adds the pins of one lane, (n,) uint64. Repeated ids count once. Each step is one slice."""
        if len(pins):
            if self._stored is None:
                self._stored = yield from stored(self._span_ids())
            self._stored.add(pins)

    def changes(self) -> Iterator[list[tuple[int, int]]]:
        """(span id, holders) of the spans whose count has changed, in short lists. 0: no lane pins the span now."""
        none = np.empty(0, np.uint64)
        return self._holders.take(*(self._stored.found() if self._stored is not None else (none, none)))


def _stretches(ordered: Array, edges: Array) -> Iterator[slice]:
    """Slices that divide a sorted array at the values of `edges`."""
    return starmap(slice, pairwise([0, *np.searchsorted(ordered, edges).tolist(), len(ordered)]))
