"""The store actor's jobs on lanes: scanning pins for the core, draining access logs, counting the holders of spans.

Owns: these jobs, and the times at which logs are drained and holders counted. Does not own the lanes (`memory`), nor
the consequences of a job: each result is an event for `handle`.

Invariants: each job runs in short slices. A round of draining takes about DRAIN_RECORDS records from all lanes
together, and at least DRAIN_RECORDS_MIN from each lane it reaches; the next round begins where the last one ended. If
clients read faster than that, the log is a sample: only the latest records of each lane count.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Final

import numpy as np

from ...shm.lanes.reader import LaneRecords
from ..forms import events
from ..memory import lane_scan
from ..memory.lane_scan import LANES_AT_ONCE
from ..memory.segments import Segments
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
        """Begins the jobs that are due."""
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
        holders = yield from lane_scan.scanned(self._memory.readers, self._memory.index.span_ids)
        self.handle(events.Scanned(holders.keys()))

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
        holders = yield from lane_scan.scanned(self._memory.readers, self._memory.index.span_ids)
        spans = [*holders, *(self._held - holders.keys())]
        self._held = set(holders)
        for first in range(0, len(spans), HELD_AT_ONCE):
            part = spans[first : first + HELD_AT_ONCE]
            counts = [holders[span] for span in part]
            self.handle(events.HoldersCounted(np.array(part, np.uint64), np.array(counts, np.uint32)))
            yield
        now = self.clock()
        self._holders_at = now + max(HOLDERS_EVERY_S, HOLDERS_SHARE * (now - began))
