"""Reads which spans the lanes pin, a few lanes at a time. The memory is bounded, whatever clients write into lanes.

Owns: the bounds on time and memory of a read of all lanes, and of what is shown of pins. Does not own the lanes
(`segments`), nor the consequences of a pin.

Invariants:
- One slice reads at most LANES_AT_ONCE lanes. It ends with the lane that reaches WORDS_AT_ONCE pins.
- A span that is pinned, and has a slot from the start to the end of the scan, is in the result.
- A scan's result has at most UNCHECKED_MAX ids that no slot has, a count's result none. A client could write such ids
  into its lane.
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
SpanIds = Callable[[], Iterable[Array]]
"""Gives the ids in the index piece by piece, each (n,) uint64 and sorted, without common ids."""


def read_pins(lanes: Iterable[HeldLane], lent: Collection[int]) -> list[tuple[HeldLane, int]]:
    """All lanes, and how many entries each pins. `lent`: the span ids of grants, which are no entries. For display
    only: the pins are read without a fence, so no span may be reclaimed because of them.

    Only the first LANES_READ_MAX lanes are read. The others have the numbers of the last scan or count.
    """
    grants = np.fromiter(lent, np.uint64, len(lent))
    scratch = np.empty(LANE_WORDS, np.uint64)
    found: list[tuple[HeldLane, int]] = []
    for number, lane in enumerate(lanes):
        pinned = lane.reader.pinned
        if number < LANES_READ_MAX:
            ids = lane.reader.pins(scratch)
            pinned = len(ids) - int(np.isin(ids, grants).sum()) if len(ids) else 0
        found.append((lane, pinned))
    return found


def lanes_pinning(lanes: Sequence[HeldLane], span_id: int) -> list[HeldLane] | None:
    """The lanes that pin a span now, for display only, as `read_pins`. None if there are more than LANES_SEARCHED_MAX
    lanes: then none is read."""
    if len(lanes) > LANES_SEARCHED_MAX:
        return None
    scratch = np.empty(LANE_WORDS, np.uint64)
    return [lane for lane in lanes if span_id in lane.reader.pins(scratch)]


def scanned(readers: Sequence[LaneReader], span_ids: SpanIds) -> Generator[None, None, set[int]]:
    """Every span pinned at the start. Each step is one slice. `span_ids` is called once, and only if the lanes hold
    more than UNCHECKED_MAX pins."""
    pinned: set[int] = set()
    unchecked, stored = 0, None
    for lanes in _pins(readers):
        words = np.concatenate(lanes)
        unchecked += len(words)
        if unchecked > UNCHECKED_MAX:
            if stored is None:
                stored = yield from _joined(span_ids())
            words = stored[_places(stored, words)]
        pinned.update(words.tolist())
        yield
    return pinned


def counted(readers: Sequence[LaneReader], span_ids: SpanIds) -> Generator[None, None, tuple[Array, Array]]:
    """(span ids, number of lanes that pin each), (n,) uint64 and uint32, sorted by id. Each step is one slice."""
    stored: Array = np.empty(0, np.uint64)
    holders = np.zeros(0, np.uint32)
    for lanes in _pins(readers):
        words = np.concatenate([_distinct(np.sort(lane)) for lane in lanes])
        if len(words):
            if not len(stored):
                stored = yield from _joined(span_ids())
                holders = np.zeros(len(stored), np.uint32)
            np.add.at(holders, _places(stored, words), 1)
        yield
    pinned = np.flatnonzero(holders)
    return stored[pinned], holders[pinned]


def _pins(readers: Sequence[LaneReader]) -> Iterator[list[Array]]:
    """The pins of the lanes of each slice, (n,) uint64 each."""
    scratch = np.empty(LANE_WORDS, np.uint64)
    lanes: list[Array] = []
    words = 0
    for reader in readers:
        lanes.append(reader.pins(scratch))
        words += len(lanes[-1])
        if len(lanes) >= LANES_AT_ONCE or words >= WORDS_AT_ONCE:
            yield lanes
            lanes, words = [], 0
    if lanes:
        yield lanes


def _joined(span_ids: Iterable[Array]) -> Generator[None, None, Array]:
    """All ids of the index, sorted. Each step is one slice."""
    pieces = []
    for piece in span_ids:
        pieces.append(piece)
        yield
    # The stable algorithm is fast here: it merges the sorted pieces.
    return np.sort(np.concatenate(pieces), kind="stable")


def _places(stored: Array, words: Array) -> Array:
    """Where those words that are in `stored` are there."""
    places = stored.searchsorted(words)
    inside = places < len(stored)
    words, places = words[inside], places[inside]
    found: Array = places[stored[places] == words]
    return found


def _distinct(ordered: Array) -> Array:
    """The distinct items of a sorted array, (n,). Like `np.unique`, in a tenth of its time."""
    first = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    found: Array = ordered[first]
    return found
