"""How many lanes pin each span: what clients are told of, and nothing is decided by.

Owns the counts as they were last told. Ids that no slot of the index has are not counted: a client may make up any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise, starmap
from typing import Any, Final

import numpy as np

from ..shm.layout import REUSE_HOLDERS_MAX
from .lane_scan import Stored, distinct, stored

Array = np.ndarray[Any, Any]
TOLD_AT_ONCE: Final = 512
"""Spans held before, and spans held now, that one list tells of."""


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

    def count(self, span_ids: Callable[[], Iterable[Array]]) -> Count:
        """Begins to count anew. `span_ids()` gives the ids that slots of the index have, piece by piece, each (n,)
        uint64 and sorted."""
        return Count(self, span_ids)

    def take(self, span_ids: Array, holders: Array) -> Iterator[list[tuple[int, int]]]:
        """Takes in how many lanes pin each span that any pins: (n,) each, ids sorted and distinct.

        Returns:
            (span id, holders) where that is not what it was, in short lists; 0 where nobody holds it any more.
        """
        holders = np.minimum(holders, REUSE_HOLDERS_MAX).astype(np.uint64)
        old_ids, old = self._span_ids, self._holders
        self._span_ids, self._holders = span_ids, holders
        edges = np.sort(np.concatenate([old_ids[TOLD_AT_ONCE::TOLD_AT_ONCE], span_ids[TOLD_AT_ONCE::TOLD_AT_ONCE]]))
        for before, now in zip(_stretches(old_ids, edges), _stretches(span_ids, edges), strict=True):
            known = distinct(np.sort(np.concatenate([old_ids[before], span_ids[now]])))
            counts = np.zeros((2, len(known)), np.uint64)
            counts[0, np.searchsorted(known, old_ids[before])] = old[before]
            counts[1, np.searchsorted(known, span_ids[now])] = holders[now]
            changed = counts[0] != counts[1]
            yield list(zip(known[changed].tolist(), counts[1, changed].tolist(), strict=True))


class Count:
    """One count, lane by lane. Its memory is bounded by the index, whatever the lanes hold."""

    def __init__(self, holders: Holders, span_ids: Callable[[], Iterable[Array]]) -> None:
        self._holders = holders
        self._span_ids = span_ids
        self._stored: Stored | None = None

    def add(self, pins: Array) -> Iterator[None]:
        """Takes in what one more lane pins, (n,) uint64 with repetitions, which count once; in slices."""
        if len(pins):
            if self._stored is None:
                self._stored = yield from stored(self._span_ids())
            self._stored.add(pins)

    def changes(self) -> Iterator[list[tuple[int, int]]]:
        """(span id, holders) where that is not what it was, in short lists; 0 where nobody holds it any more."""
        none = np.empty(0, np.uint64)
        return self._holders.take(*(self._stored.found() if self._stored is not None else (none, none)))


def _stretches(ordered: Array, edges: Array) -> Iterator[slice]:
    """The places of a sorted array before, between and behind the edges."""
    return starmap(slice, pairwise([0, *np.searchsorted(ordered, edges).tolist(), len(ordered)]))
