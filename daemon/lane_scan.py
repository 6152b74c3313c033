"""Reads which spans the lanes pin, a few lanes at a time, with memory bounded whatever clients write into their lanes.

Owns: the bounds on time and memory of a scan of all lanes. Does not own the lanes (`memory`), nor what follows from a
pin.

Invariants: one slice reads LANES_AT_ONCE lanes. A pinned span that has a slot from the scan's beginning to its end is
in the result. Of ids that no slot has, which a client can make up, at most UNCHECKED_MAX are in the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from ..shm.lanes import LaneReader
from ..shm.layout import LANE_WORDS

LANES_AT_ONCE: Final = 16
"""Lanes of one slice: 0.1 ms where few words pin, 2 ms where each of their 65,536 words does."""
UNCHECKED_MAX: Final = 16_384

Array = np.ndarray[Any, Any]


class LaneScan:
    """One scan. Iterate it to its end, one slice a step; then `pinned` has every span that was pinned at the start.

    `span_ids()` gives the ids that slots of the index have, sorted, (n,) uint64. It is called once, and only if the
    lanes hold more than UNCHECKED_MAX pins.
    """

    def __init__(self, readers: Sequence[LaneReader], span_ids: Callable[[], Array]) -> None:
        self.pinned: set[int] = set()
        self._readers = readers
        self._span_ids = span_ids
        self._unchecked = 0
        self._stored: Stored | None = None

    def __iter__(self) -> Iterator[None]:
        scratch = np.empty(LANE_WORDS, np.uint64)
        for first in range(0, len(self._readers), LANES_AT_ONCE):
            lanes = self._readers[first : first + LANES_AT_ONCE]
            words = np.concatenate([reader.pins(scratch) for reader in lanes])
            if len(words):
                self._add(words)
            yield

    def _add(self, words: Array) -> None:
        self._unchecked += len(words)
        if self._unchecked > UNCHECKED_MAX:
            if self._stored is None:
                self._stored = Stored(self._span_ids())
            words = self._stored.new(words)
        self.pinned.update(words.tolist())


class Stored:
    """The spans of the index, and in how many of the arrays that were given each of them was found."""

    def __init__(self, span_ids: Array) -> None:
        self._span_ids = span_ids
        self._found = np.zeros(len(span_ids), np.uint32)

    def add(self, words: Array) -> Array:
        """Takes in an array of ids, (n,) uint64 with repetitions, which count once.

        Returns:
            The places of those that are stored.
        """
        ids = np.unique(words)
        places: Array = self._span_ids.searchsorted(ids)
        inside = places < len(self._span_ids)
        ids, places = ids[inside], places[inside]
        places = places[self._span_ids[places] == ids]
        self._found[places] += 1
        return places

    def new(self, words: Array) -> Array:
        """Takes in an array of ids. Returns those that are stored, and were in no array before."""
        places = self.add(words)
        found: Array = self._span_ids[places[self._found[places] == 1]]
        return found

    def found(self) -> tuple[Array, Array]:
        """(span ids, number of arrays) of those that were in any, (n,) each, sorted by id."""
        places = np.flatnonzero(self._found)
        return self._span_ids[places], self._found[places]
