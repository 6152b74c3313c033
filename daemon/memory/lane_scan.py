"""Reads which spans the lanes pin, a few lanes at a time. The memory is bounded, whatever clients write into lanes.

Owns: the bounds on time and memory of a scan of all lanes, and of what is shown of pins. Does not own the lanes
(`segments`), nor the consequences of a pin.

Invariants:
- One slice reads at most LANES_AT_ONCE lanes. It ends with the lane that reaches WORDS_AT_ONCE pins.
- A span that is pinned, and has a slot from the start to the end of the scan, is in the result.
- The result has at most UNCHECKED_MAX ids that no slot has. A client could write such ids into its lane.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ...shm.lanes.reader import LaneReader
from ...shm.ring.layout import LANE_WORDS

if TYPE_CHECKING:
    from .segments import HeldLane

LANES_AT_ONCE: Final = 16
"""Lanes in one slice: 0.1 ms if there are few pins."""
WORDS_AT_ONCE: Final = 8192
"""Pins in one slice: 2 ms."""
UNCHECKED_MAX: Final = 16_384
"""Pins that a scan takes without checking that their spans are in the index."""
LANES_READ_MAX: Final = 1024
"""The most lanes that one query about pins reads: 6 to 8 ms."""
LANES_SEARCHED_MAX: Final = 256
"""The most lanes that one query about a single span reads: 2 to 4 ms."""

Array = np.ndarray[Any, Any]


def read_pins(lanes: Iterable[HeldLane], lent: Collection[int]) -> list[tuple[HeldLane, int]]:
    """All lanes, and how many entries each pins. `lent`: the span ids of grants, which are no entries. For display
    only: the pins are read without a fence, so no span may be reclaimed because of them.

    Only the first LANES_READ_MAX lanes are read. The others have the numbers of the last scan or count.
    """
    grants = np.sort(np.fromiter(lent, np.uint64, len(lent)))
    scratch = np.empty(LANE_WORDS, np.uint64)
    found: list[tuple[HeldLane, int]] = []
    for number, lane in enumerate(lanes):
        pinned = lane.reader.pinned
        if number < LANES_READ_MAX:
            ids = lane.reader.pins(scratch)
            pinned = len(ids)
            if pinned and len(grants):
                pinned -= int((np.searchsorted(grants, ids, "right") - np.searchsorted(grants, ids)).sum())
        found.append((lane, pinned))
    return found


def lanes_pinning(lanes: Sequence[HeldLane], span_id: int) -> list[HeldLane] | None:
    """The lanes that pin a span now, for display only, as `read_pins`. None if there are more than LANES_SEARCHED_MAX
    lanes: then none is read."""
    if len(lanes) > LANES_SEARCHED_MAX:
        return None
    scratch = np.empty(LANE_WORDS, np.uint64)
    return [lane for lane in lanes if span_id in lane.reader.pins(scratch)]


class LaneScan:
    """One scan. Iterate it to its end; each step is one slice. Then `pinned` has every span pinned at the start.

    `span_ids()` gives the ids in the index piece by piece, each (n,) uint64 and sorted. It is called once, and only if
    the lanes hold more than UNCHECKED_MAX pins.
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
    """Collects the pieces of `span_ids`. Each step is one slice."""
    pieces = []
    for piece in span_ids:
        pieces.append(piece)
        yield
    return Stored(pieces)


class Stored:
    """The spans of the index, each with the number of added arrays that contain it."""

    def __init__(self, span_ids: Sequence[Array]) -> None:
        """`span_ids`: sorted pieces without common ids."""
        # The stable algorithm is fast here: it merges the sorted pieces.
        self._span_ids = np.sort(np.concatenate(span_ids), kind="stable")
        self._found = np.zeros(len(self._span_ids), np.uint32)

    def add(self, words: Array) -> Array:
        """Adds an array of ids, (n,) uint64. Repeated ids count once.

        Returns:
            The positions of the ids that are in the index.
        """
        ids = distinct(np.sort(words))
        places: Array = self._span_ids.searchsorted(ids)
        inside = places < len(self._span_ids)
        ids, places = ids[inside], places[inside]
        places = places[self._span_ids[places] == ids]
        self._found[places] += 1
        return places

    def new(self, words: Array) -> Array:
        """Adds an array of ids. Returns the ids that are in the index, and were in no earlier array."""
        places = self.add(words)
        found: Array = self._span_ids[places[self._found[places] == 1]]
        return found

    def found(self) -> tuple[Array, Array]:
        """(span ids, number of arrays) of the spans that were in any array, (n,) each, sorted by id."""
        places = np.flatnonzero(self._found)
        return self._span_ids[places], self._found[places]


def distinct(ordered: Array) -> Array:
    """The distinct items of a sorted array, (n,). Like `np.unique`, in a tenth of its time."""
    first = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    found: Array = ordered[first]
    return found
