"""Drains and scans of real lanes, damaged queues and when a client rings for its own,
and how long an actor works at a stretch."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.actors import lanes as lane_jobs
from tensord.daemon.actors.lanes import ACCESSED_AT_ONCE, LANES_AT_ONCE, UNCHECKED_MAX, LaneJobs, scanned
from tensord.daemon.actors.mailbox import TURN_S, Mailbox, Pump
from tensord.daemon.actors.queues import Queues
from tensord.daemon.forms import events
from tensord.errors import BadMessage
from tensord.shm.lanes.lane import LOG_AT, PINS_AT
from tensord.shm.lanes.reader import LaneReader
from tensord.shm.lanes.records import (
    AWAKE,
    NAP_RECORDS,
    NAPS,
    NO_KEY,
    SLEEPS,
    SUBMITTED_AT,
    SubmissionReader,
    Submissions,
)
from tensord.shm.ring.layout import QUEUE_AT, QUEUE_BYTES, RECORD_BYTES

from ...memory_bench import lane_file


def lane_with(*pins: int, log: Sequence[int] = ()) -> LaneReader:
    fd = lane_file()
    os.pwrite(fd, np.array(pins, np.uint64).tobytes(), 8 * PINS_AT)
    reader = LaneReader(fd, 1)
    os.pwrite(fd, np.array(log, np.uint64).tobytes(), 8 * LOG_AT)
    os.pwrite(fd, np.array([len(log)], np.uint64).tobytes(), 8 * 8)
    return reader


def test_a_drain_that_is_asked_for_while_another_goes_on_comes_after_it() -> None:
    """And the records of a busy lane are reported in order, in short events."""
    readers = [lane_with(3, log=range(1, 1001))]
    heard: list[Any] = []
    jobs: list[Iterator[None]] = []
    index = SimpleNamespace(held=lambda: np.zeros(0, np.uint64))
    memory: Any = SimpleNamespace(index=index, readers=readers, forget_abandoned=lambda: None)
    lanes = LaneJobs(memory, clock=lambda: 0.0, handle=heard.append, begin=jobs.append, report=lambda fenced: None)
    lanes.keep_time(0.0)
    periodic = jobs[0]
    next(periodic)
    readers.append(lane_with(4, log=[7]))
    lanes.drain()
    assert run(periodic)
    *accessed, last = heard
    assert [span for event in accessed for span in event.span_ids] == [*range(1, 1001), 7]
    assert max(len(event.span_ids) for event in accessed) <= ACCESSED_AT_ONCE
    assert last == events.Drained()
    for reader in readers:
        reader.close()


STORED = np.arange(5, 5 + 3 * 40_000, 3, dtype=np.uint64)


def run(job: Iterator[None]) -> int:
    """How many slices a job has."""
    return sum(1 for _ in job)


SPANS = st.integers(1, 200) | st.integers(2**64 - 3, 2**64 - 1)


@given(
    lanes=st.lists(st.lists(SPANS, max_size=9), max_size=2 * LANES_AT_ONCE + 1),
    unchecked_max=st.sampled_from([0, 5, UNCHECKED_MAX]),
)
def test_all_that_is_pinned_and_stored_is_found_and_a_lane_counts_once(
    lanes: list[list[int]], unchecked_max: int
) -> None:
    readers = [lane_with(*pins) for pins in lanes]
    holders: Counter[int] = Counter()
    before, lane_jobs.UNCHECKED_MAX = lane_jobs.UNCHECKED_MAX, unchecked_max  # type: ignore[misc]
    try:
        slices = run(scanned(readers, lambda: [STORED[1::2], STORED[::2]], holders))
    finally:
        lane_jobs.UNCHECKED_MAX = before  # type: ignore[misc]
        for reader in readers:
            reader.close()
    sets = [set(pins) for pins in lanes]
    stored = set().union(*sets) & set(STORED.tolist())
    pinned = holders.keys()
    assert stored <= pinned <= set().union(*sets)
    assert len(pinned - stored) <= unchecked_max
    asked_the_index = sum(map(len, lanes)) > unchecked_max
    assert slices == -(-len(lanes) // LANES_AT_ONCE) + 2 * asked_the_index
    assert all(holders[span] == sum(span in pins for pins in sets) for span in stored)


def test_a_lane_that_is_forgotten_during_a_scan_pins_nothing() -> None:
    readers = [lane_with(5) for _ in range(LANES_AT_ONCE + 1)]
    pinned: set[int] = set()
    scan = scanned(readers, lambda: [STORED], pinned)
    next(scan)
    for reader in readers:
        reader.close()
    assert run(scan) == 1 and pinned == {5}


def queue_with_head(fd: int, head: int, taken: list[int], hung_up: list[int]) -> Queues:
    """One client's queue, which says that it has so many records. The core refuses each as none of the client's."""

    def submitted(client: int, records: memoryview, errors: object) -> int:
        taken.append(client)
        assert len(taken) < 9, "a damaged queue is carried out further"
        raise BadMessage("the queue is damaged")

    words = memoryview(array("Q", [0]))
    memory: Any = SimpleNamespace(settled=words, refusals=words)
    no_copier: Any = None
    queues = Queues(
        memory,
        no_copier,
        submitted=submitted,
        is_lent=lambda *place: False,
        ring=lambda client: None,
        hang_up=lambda client, reason: hung_up.append(client),
    )
    lane: Any = SimpleNamespace(place=0, queue=SubmissionReader(fd))
    queues.attached(1, 0, lane)
    queues.writes_in_place(1)
    os.pwrite(fd, head.to_bytes(8, "little"), SUBMITTED_AT * 8)
    return queues


def test_a_queue_with_a_huge_head_ends_at_its_first_damage_though_more_is_asked_then() -> None:
    taken, hung_up, done = list[int](), list[int](), list[str]()
    queues = queue_with_head(lane_file(), 1 << 62, taken, hung_up)
    queues.after_added(1, lambda: done.append("asked"))
    assert (taken, hung_up, done) == ([1], [1], ["asked"])
    assert not queues.waiting and not queues.turn()


def test_a_truncated_queue_keeps_nobody_busy() -> None:
    fd = lane_file()
    queues = queue_with_head(fd, 1 << 62, [], [])
    os.ftruncate(fd, QUEUE_AT + RECORD_BYTES // 2)
    assert not queues.turn() and not queues.waiting


@pytest.mark.parametrize(
    ("asleep", "first"), [(AWAKE, None), (NAPS, NAP_RECORDS), (SLEEPS, 1)], ids=["awake", "naps", "sleeps"]
)
def test_a_client_rings_once_for_a_burst_and_again_when_the_daemon_has_carried_it_out(
    asleep: int, first: int | None
) -> None:
    words, queue = memoryview(array("Q", bytes(8 * (SUBMITTED_AT + 1)))), memoryview(bytearray(QUEUE_BYTES))
    settled, state = memoryview(array("Q", [0])), memoryview(array("Q", [asleep]))
    submissions = Submissions(words, SUBMITTED_AT, queue, settled, 0, state)
    rung = []
    for number in range(1, 4 * NAP_RECORDS + 1):
        assert submissions.add(NO_KEY, 0, 64, 0, 0, NO_KEY, 0.0, 0.0, 0, 0, 0, 0, 0, 0) == number
        if submissions.rings:
            rung.append(number)
            submissions.rang()
        if number == 2 * NAP_RECORDS:
            settled[0] = number
    assert rung == ([] if first is None else [first, 2 * NAP_RECORDS + first])


def test_a_turn_ends_when_its_time_is_used() -> None:
    inbox: Mailbox[int] = Mailbox(50)
    received: list[int] = []
    for number in range(50):
        inbox.tell_now(number)
    pump = Pump(inbox, received.append, lambda: len(received) * TURN_S / 4)
    pump.turn()
    assert received == [0, 1, 2, 3]
    pump.turn()
    assert len(received) == 8
