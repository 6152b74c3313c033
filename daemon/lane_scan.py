"""Reads which spans the lanes pin, a few lanes at a time, with memory bounded whatever clients write into their lanes.

Owns: the bounds on time and memory of a scan of all lanes. Does not own the lanes (`memory`), nor what follows from a
pin.

Invariants: one slice reads LANES_AT_ONCE lanes, or WORDS_AT_ONCE pins and at most one lane more. A pinned span that has
a slot from the scan's beginning to its end is in the result. Of ids that no slot has, which a client can make up, at
most UNCHECKED_MAX are in the result.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from ..shm.lanes import LaneReader
from ..shm.layout import LANE_WORDS

LANES_AT_ONCE: Final = 16
"""Lanes of one slice: 0.1 ms where few words pin."""
WORDS_AT_ONCE: Final = 8192
"""Pins of one slice: 2 ms."""
UNCHECKED_MAX: Final = 16_384

Array = np.ndarray[Any, Any]


class LaneScan:
    """One scan. Iterate it to its end, one slice a step; then `pinned` has every span that was pinned at the start.

    `span_ids()` gives the ids that slots of the index have, piece by piece, each (n,) uint64 and sorted. It is called
    once, and only if the lanes hold more than UNCHECKED_MAX pins.
    """

    def __init__(self, readers: Sequence[LaneReader], span_ids: Callable[[], Iterable[Array]]) -> None:
        self.pinned: set[int] = set()
        self._readers = readers
        self._span_ids = span_ids
        self._unchecked = 0
        self._stored: Stored | None = None

    def __iter__(self) -> Iterator[None]:
        scratch = np.empty(LANE_WORDS, np.uint64)
        lanes = words = 0
        for reader in self._readers:
            pins = reader.pins(scratch)
            lanes, words = lanes + 1, words + len(pins)
            if len(pins):
                yield from self._add(pins)
            if lanes >= LANES_AT_ONCE or words >= WORDS_AT_ONCE:
                lanes = words = 0
                yield

    def _add(self, words: Array) -> Iterator[None]:
        self._unchecked += len(words)
        if self._unchecked > UNCHECKED_MAX:
            if self._stored is None:
                self._stored = yield from stored(self._span_ids())
            words = self._stored.new(words)
        self.pinned.update(words.tolist())


def stored(span_ids: Iterable[Array]) -> Generator[None, None, Stored]:
    """Takes in the pieces of `span_ids`, a slice a step."""
    pieces = []
    for piece in span_ids:
        pieces.append(piece)
        yield
    return Stored(pieces)


class Stored:
    """The spans of the index, and in how many of the arrays that were given each of them was found."""

    def __init__(self, span_ids: Sequence[Array]) -> None:
        """`span_ids` are pieces, each sorted; no id is in two."""
        # Stable, since that one merges what is sorted.
        self._span_ids = np.sort(np.concatenate(span_ids), kind="stable")
        self._found = np.zeros(len(self._span_ids), np.uint32)

    def add(self, words: Array) -> Array:
        """Takes in an array of ids, (n,) uint64 with repetitions, which count once.

        Returns:
            The places of those that are stored.
        """
        ids = distinct(np.sort(words))
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


def distinct(ordered: Array) -> Array:
    """A sorted array, (n,), with each item once. What `np.unique` does, in a tenth of the time."""
    first = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    found: Array = ordered[first]
    return found
