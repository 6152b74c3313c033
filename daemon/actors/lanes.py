"""The store actor's jobs on lanes: scanning pins for the core, draining access logs, counting the holders of spans.

Owns: these jobs, their bounds on time and memory, and the times at which logs are drained and holders counted. Does not
own the lanes (`memory`), nor the consequences of a job: each result is an event for `handle`.

Invariants: one slice of a scan reads at most LANES_AT_ONCE lanes, and ends with the lane that reaches WORDS_AT_ONCE
pins. A span that is pinned, and has a slot from the start to the end of the scan, is found. At most UNCHECKED_MAX ids
are found that no slot has, whatever clients write into their lanes. A round of draining takes about DRAIN_RECORDS
records from all lanes together, and at least DRAIN_RECORDS_MIN from each lane it reaches; the next one begins where the
last one ended. If clients read faster than that, only the latest records of each lane count.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

import numpy as np

from ...shm.lanes.reader import LaneReader, LaneRecords
from ...shm.ring.layout import LANE_WORDS
from ..forms import events
from ..memory.segments import HeldLane, Segments
from .messages import Fenced

DRAIN_EVERY_S: Final = 0.1
DRAIN_RECORDS: Final = 4096
DRAIN_RECORDS_MIN: Final = 64
HOLDERS_EVERY_S: Final = 1.0
HOLDERS_SHARE: Final = 20
"""A count begins only once HOLDERS_SHARE times the duration of the last one has passed."""
ACCESSED_AT_ONCE: Final = 512
"""The most records in one event for the core: some 0.5 ms, or 2 ms in a small ring, where all keys are sampled."""
HELD_AT_ONCE: Final = 4096
"""The most spans in one event about holders."""
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


@dataclass(eq=False, repr=False)
class LaneJobs:
    """The jobs on the lanes of `memory`. `clock` gives monotonic seconds. `handle` takes an event for the core; `begin`
    a job, of which each step is one slice; `report` the result of a slow fence."""

    _memory: Segments
    _: KW_ONLY
    clock: Callable[[], float]
    handle: Callable[[events.Event], None]
    begin: Callable[[Iterator[None]], None]
    report: Callable[[Fenced], object]

    def __post_init__(self) -> None:
        self._held: set[int] = set(self._memory.index.held().tolist())
        self._drain_at = self._holders_at = 0.0
        self._drain_from = 0
        self._drain_asked = False
        self.fencing = False
        """True while a thread makes a fence."""

    @property
    def timer(self) -> float:
        """The time at which `keep_time` next has a job to begin."""
        return min(self._drain_at, self._holders_at)

    def keep_time(self, now: float) -> None:
        if now >= self._drain_at:
            self._drain_at = math.inf
            self.begin(self._drain())
        if now >= self._holders_at:
            self._holders_at = math.inf
            self.begin(self._count_holders())

    def drain(self) -> None:
        """Begins a round of draining, which ends with a Drained event. A round under way is finished first."""
        self._drain_asked = True
        if self._drain_at < math.inf:
            self._drain_at = math.inf
            self.begin(self._drain())

    def scan(self) -> None:
        """Begins a fence and then a scan, which ends with a Scanned event. A slow fence (8 to 16 ms) is made in a
        thread."""
        if self._memory.fence_is_quick:
            self._memory.fence()
            self.begin(self._scan())
        else:
            self.fencing = True
            fence = asyncio.get_running_loop().run_in_executor(None, self._memory.fence)
            fence.add_done_callback(lambda done: self.report(Fenced(done.exception())))

    def fenced(self, fenced: Fenced) -> None:
        """Begins the scan after a thread's fence. Raises OSError if that failed: without a fence the scan may miss
        pins, so no span may be reused."""
        self.fencing = False
        if fenced.error is not None:
            raise fenced.error
        self.begin(self._scan())

    def _scan(self) -> Iterator[None]:
        pinned: set[int] = set()
        yield from scanned(self._memory.readers, self._memory.index.span_ids, pinned)
        self.handle(events.Scanned(pinned))

    def _drain(self) -> Iterator[None]:
        while True:
            asked, self._drain_asked = self._drain_asked, False
            yield from self._round()
            if asked:
                self.handle(events.Drained())
            if not self._drain_asked:
                break
        self._memory.forget_abandoned()
        self._drain_at = self.clock() + DRAIN_EVERY_S

    def _round(self) -> Iterator[None]:
        readers = self._memory.readers
        most = max(DRAIN_RECORDS // max(1, len(readers)), DRAIN_RECORDS_MIN)
        left = DRAIN_RECORDS
        for number in range(len(readers)):
            reader = readers[(self._drain_from + number) % len(readers)]
            drained = reader.drain(most)
            if drained is not None:
                yield from self._report_uses(drained)
                left -= len(drained.span_ids)
            if left <= 0:
                self._drain_from = (self._drain_from + number + 1) % len(readers)
                break
            if drained is not None or number % LANES_AT_ONCE == 0:
                yield

    def _report_uses(self, drained: LaneRecords) -> Iterator[None]:
        ids = drained.span_ids
        self.handle(events.Accessed(ids[:ACCESSED_AT_ONCE], drained.misses, drained.lost))
        for start in range(ACCESSED_AT_ONCE, len(ids), ACCESSED_AT_ONCE):
            yield
            self.handle(events.Accessed(ids[start : start + ACCESSED_AT_ONCE]))

    def _count_holders(self) -> Iterator[None]:
        """Reports the holders of all spans that a lane pins now, or did at the last count."""
        began = self.clock()
        holders: Counter[int] = Counter()
        yield from scanned(self._memory.readers, self._memory.index.span_ids, holders)
        spans = [*holders, *(self._held - holders.keys())]
        self._held = set(holders)
        for first in range(0, len(spans), HELD_AT_ONCE):
            part = spans[first : first + HELD_AT_ONCE]
            counts = [holders[span] for span in part]
            self.handle(events.HoldersCounted(np.array(part, np.uint64), np.array(counts, np.uint32)))
            yield
        now = self.clock()
        self._holders_at = now + max(HOLDERS_EVERY_S, HOLDERS_SHARE * (now - began))


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
    readers: Sequence[LaneReader], span_ids: Callable[[], Iterable[Array]], found: set[int] | Counter[int]
) -> Iterator[None]:
    """Finds every span pinned at the start; a Counter gets the number of lanes that pin it. Each step is one slice.

    `span_ids` gives the ids in the index in sorted pieces, (n,) uint64, without common ids. It is called once, and only
    if the lanes hold more than UNCHECKED_MAX pins.
    """
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
            found.update(set((words if stored is None else _among(words, stored)).tolist()))
        yield


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
