"""Reads which spans the lanes pin, a few lanes at a time.

Owns: the bounds on time and memory of a read of all lanes, and of what is shown of pins. Does not own the lanes
(`segments`), nor the consequences of a pin.

Invariants: one slice reads at most LANES_AT_ONCE lanes, and ends with the lane that reaches WORDS_AT_ONCE pins. A span
that is pinned, and has a slot from the start to the end of the scan, is found. At most UNCHECKED_MAX ids are found that
no slot has, whatever clients write into their lanes.
"""

from __future__ import annotations

from collections import Counter
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

    Only the first LANES_READ_MAX lanes are read. The others have the numbers of the last scan.
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


def scanned(
    readers: Sequence[LaneReader], span_ids: Callable[[], Iterable[Array]]
) -> Generator[None, None, Counter[int]]:
    """Every span pinned at the start, with the number of lanes that pin it. Each step is one slice.

    `span_ids` gives the ids in the index in sorted pieces, (n,) uint64, without common ids. It is called once, and only
    if the lanes hold more than UNCHECKED_MAX pins.
    """
    holders: Counter[int] = Counter()
    unchecked, stored = 0, None
    for lanes in _pins(readers):
        unchecked += sum(map(len, lanes))
        if unchecked > UNCHECKED_MAX and stored is None:
            pieces = []
            for piece in span_ids():
                pieces.append(piece)
                yield
            # The stable algorithm is fast here: it merges the sorted pieces.
            stored = np.sort(np.concatenate(pieces), kind="stable")
        for words in lanes:
            holders.update(set((words if stored is None else _among(words, stored)).tolist()))
        yield
    return holders


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


def _among(words: Array, stored: Array) -> Array:
    """Those words that are in `stored`, which is sorted."""
    places = np.minimum(stored.searchsorted(words), len(stored) - 1)
    found: Array = words[stored[places] == words] if len(stored) else stored
    return found
