"""The store actor's jobs on lanes: scans, logs and holders, over real lanes."""

from __future__ import annotations

import os
import tracemalloc
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensord.daemon.actors.lanes import ACCESSED_AT_ONCE, DRAIN_EVERY_S, HOLDERS_EVERY_S, LaneJobs
from tensord.daemon.forms import events
from tensord.daemon.memory.lane_scan import UNCHECKED_MAX, scanned
from tensord.shm.lanes.lane import LOG_AT, PINS_AT
from tensord.shm.lanes.reader import LaneReader
from tensord.shm.ring.layout import LANE_WORDS

from ...memory_bench import lane_file


def lane_with(*pins: int, log: tuple[int, ...] = ()) -> LaneReader:
    """A lane that a client has written these words into."""
    fd = lane_file()
    os.pwrite(fd, np.array(pins, np.uint64).tobytes(), 8 * PINS_AT)
    reader = LaneReader(fd, 1)
    os.pwrite(fd, np.array(log, np.uint64).tobytes(), 8 * LOG_AT)
    os.pwrite(fd, np.array([len(log)], np.uint64).tobytes(), 8 * 8)
    return reader


@pytest.fixture
def readers() -> Iterator[list[LaneReader]]:
    made: list[LaneReader] = []
    yield made
    for reader in made:
        reader.close()


def ids(*numbers: int) -> Any:
    return np.array(numbers, np.uint64)


def test_the_records_of_a_busy_lane_are_reported_in_order_in_short_events(readers: list[LaneReader]) -> None:
    log = tuple(range(1, 1001))
    readers.append(lane_with(3, log=log))
    stand = Stand(readers, ids(3))
    stand.lanes.keep_time(stand.now)
    stand.work()
    accessed = [event for event in stand.heard if isinstance(event, events.Accessed)]
    assert [span for event in accessed for span in event.span_ids] == [*log]
    assert max(len(event.span_ids) for event in accessed) <= ACCESSED_AT_ONCE
    assert sum(event.misses + event.lost for event in accessed) == 0


def test_made_up_pins_cost_no_memory_and_hide_no_real_one(readers: list[LaneReader]) -> None:
    stored = (5, 7, 2**63)
    invented = range(10**6, 10**6 + LANE_WORDS - 1)
    readers += [lane_with(*(base * 10**7 + number for number in invented), 7) for base in range(1, 33)]
    readers += [lane_with(5, 2**63)]
    pinned: set[int] = set()

    def scan() -> Iterator[None]:
        pinned.update((yield from scanned(readers, lambda: [ids(*stored)])))

    tracemalloc.start()
    try:
        for _ in scan():
            pass
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert set(stored) <= pinned
    assert len(pinned) <= UNCHECKED_MAX + len(stored)
    # A set of all 131,000 words alone would take 12 MiB.
    assert peak_bytes < 8 << 20


class Stand:
    """Lane jobs over real lanes, with literal time; `heard` are the core's events."""

    def __init__(self, readers: list[LaneReader], span_ids: Any) -> None:
        self.now = 0.0
        self.heard: list[events.Event] = []
        self.jobs: deque[Iterator[None]] = deque()
        self.fences = 0
        self.forgotten = 0
        nothing = ids()
        memory: Any = SimpleNamespace(
            index=SimpleNamespace(held=lambda: (nothing, nothing), span_ids=lambda: [span_ids]),
            readers=readers,
            fence_is_quick=True,
            fence=self._fence,
            forget_abandoned=self._forget,
        )
        self.lanes = LaneJobs(
            memory,
            clock=lambda: self.now,
            handle=self.heard.append,
            begin=self.jobs.append,
            report=lambda fenced: None,
        )

    def _fence(self) -> None:
        self.fences += 1

    def _forget(self) -> None:
        self.forgotten += 1

    def work(self) -> None:
        """All jobs to their ends."""
        while self.jobs:
            for _ in self.jobs.popleft():
                pass


def test_a_drain_that_is_asked_for_while_another_goes_on_comes_after_it(readers: list[LaneReader]) -> None:
    readers += [lane_with(3, log=tuple(range(1, 1001)))]
    stand = Stand(readers, ids(3))
    stand.lanes.keep_time(stand.now)
    periodic = stand.jobs.popleft()
    next(periodic)
    readers.append(lane_with(4, log=(7,)))
    stand.lanes.drain()
    assert len(stand.jobs) == 1, "there is one round at a time; the other job counts holders"
    for _ in periodic:
        pass
    told = [span for event in stand.heard if isinstance(event, events.Accessed) for span in event.span_ids]
    assert told == [*range(1, 1001), 7]
    assert stand.heard.count(events.Drained()) == 1
    assert stand.heard[-1] == events.Drained()


def test_logs_are_drained_and_holders_counted_when_due_and_not_before(readers: list[LaneReader]) -> None:
    readers += [lane_with(3, log=(3, 3, 9)), lane_with(3)]
    stand = Stand(readers, ids(3, 9))
    stand.lanes.keep_time(stand.now)
    stand.work()
    accessed = [event for event in stand.heard if isinstance(event, events.Accessed)]
    counted = [event for event in stand.heard if isinstance(event, events.HoldersCounted)]
    assert [list(event.span_ids) for event in accessed] == [[3, 3, 9]]
    assert [(event.span_ids.tolist(), event.holders.tolist()) for event in counted] == [([3], [2])]
    assert stand.forgotten == 1
    stand.heard.clear()
    assert stand.lanes.timer == DRAIN_EVERY_S
    stand.lanes.keep_time(DRAIN_EVERY_S / 2)
    assert not stand.jobs
    readers.pop().close()
    readers.pop().close()
    for holders in ([[0]], []):
        stand.now += HOLDERS_EVERY_S
        stand.lanes.keep_time(stand.now)
        stand.work()
        assert [event.holders.tolist() for event in stand.heard if isinstance(event, events.HoldersCounted)] == holders
        stand.heard.clear()
