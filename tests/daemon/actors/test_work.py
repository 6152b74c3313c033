"""An actor's inbox and work loop; the store actor's jobs over real lanes: logs, holders, scans and queues."""

from __future__ import annotations

import os
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensord.daemon.actors import lanes as lane_jobs
from tensord.daemon.actors.lanes import (
    ACCESSED_AT_ONCE,
    DRAIN_EVERY_S,
    HOLDERS_EVERY_S,
    LANES_AT_ONCE,
    UNCHECKED_MAX,
    LaneJobs,
    scanned,
)
from tensord.daemon.actors.mailbox import TURN_S, Mailbox, Pump, Sender
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


def lane_with(*pins: int, log: tuple[int, ...] = ()) -> LaneReader:
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
            index=SimpleNamespace(held=lambda: nothing, span_ids=lambda: [span_ids]),
            readers=readers,
            fence_is_quick=True,
            fence=self._fence,
            forget_abandoned=self._forget,
        )
        self.lanes = LaneJobs(
            memory, clock=lambda: self.now, handle=self.heard.append, begin=self.jobs.append, report=lambda fenced: None
        )

    def _fence(self) -> None:
        self.fences += 1

    def _forget(self) -> None:
        self.forgotten += 1

    def work(self) -> None:
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


# ---- scans

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


# ---- queues


class QueueStand:
    """One client's queue. The core refuses each record as none of the client's."""

    def __init__(self) -> None:
        self.fd = lane_file()
        self.taken = 0
        self.hung_up: list[str] = []
        words = memoryview(array("Q", [0]))
        memory = SimpleNamespace(settled=words, refusals=words)
        self.queues = Queues(
            cast(Any, memory),
            cast(Any, None),
            submitted=self._submitted,
            is_lent=lambda *place: False,
            ring=lambda client: None,
            hang_up=lambda client, reason: self.hung_up.append(reason),
        )
        lane = SimpleNamespace(place=0, queue=SubmissionReader(self.fd))
        self.queues.attached(1, 0, cast(Any, lane))
        self.queues.writes_in_place(1)

    def _submitted(self, client: int, records: memoryview, errors: object) -> int:
        self.taken += 1
        assert self.taken < 9, "a damaged queue is carried out further"
        raise BadMessage("the queue is damaged")

    def head(self, number: int) -> None:
        os.pwrite(self.fd, number.to_bytes(8, "little"), SUBMITTED_AT * 8)


def test_a_queue_with_a_huge_head_ends_at_its_first_damage_though_more_is_asked_then() -> None:
    stand, done = QueueStand(), []
    stand.head(1 << 62)
    stand.queues.after_added(1, lambda: done.append("asked"))
    assert (stand.taken, len(stand.hung_up), done) == (1, 1, ["asked"])
    assert not stand.queues.waiting and not stand.queues.turn()


def test_a_truncated_queue_keeps_nobody_busy() -> None:
    stand = QueueStand()
    stand.head(1 << 62)
    os.ftruncate(stand.fd, QUEUE_AT + RECORD_BYTES // 2)
    assert not stand.queues.turn()
    assert not stand.queues.waiting


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


# ---- the inbox

LOUD: Sender = (1000, 1)
QUIET: Sender = (1000, 3)


async def flood(inbox: Mailbox[str], sender: Sender, count: int) -> None:
    for number in range(count):
        await inbox.tell(f"flood {sender[1]} {number}", sender)


async def test_the_actors_own_messages_come_first_and_never_wait() -> None:
    inbox: Mailbox[str] = Mailbox(2)
    await flood(inbox, LOUD, 2)
    for number in range(5):
        inbox.tell_now(f"own {number}")
    assert inbox.take(6) == [*(f"own {number}" for number in range(5)), "flood 1 0"]


# ---- the work loop


class Clock:
    """Literal time: each item takes `item_s` seconds."""

    def __init__(self, item_s: float = 0.0) -> None:
        self.now = 0.0
        self.item_s = item_s

    def __call__(self) -> float:
        return self.now


def pump_of(count: int, clock: Clock, also: Callable[[int], None] = lambda _: None) -> tuple[Pump[int], list[int]]:
    """A pump with `count` messages waiting, and the list of those that were received."""
    inbox: Mailbox[int] = Mailbox(count + 1)
    received: list[int] = []

    def receive(message: int) -> None:
        received.append(message)
        clock.now += clock.item_s
        also(message)

    for number in range(count):
        inbox.tell_now(number)
    return Pump(inbox, receive, clock), received


def job(done: list[str], name: str, slices: int) -> Iterator[None]:
    for number in range(slices):
        done.append(f"{name}{number}")
        yield


def test_a_turn_ends_when_its_time_is_used() -> None:
    pump, received = pump_of(50, Clock(item_s=TURN_S / 4))
    pump.turn()
    assert received == [0, 1, 2, 3]
    pump.turn()
    assert len(received) == 8


def test_jobs_take_turns_with_each_other_and_with_messages() -> None:
    done: list[str] = []
    pump, _ = pump_of(2, Clock(), lambda number: done.append(str(number)))
    pump.begin(job(done, "a", 3))
    pump.begin(job(done, "b", 2))
    pump.turn()
    assert done == ["0", "a0", "1", "b0", "a1", "b1", "a2"]
    assert not pump.busy
