"""An outcome is right at every moment, whoever is faster: the daemon's words or its messages."""

from __future__ import annotations

import time
from array import array
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from tensord.client.writing.outcomes import OWN_WAIT_S, Outcomes, Put
from tensord.errors import DaemonUnavailable, LimitReached, TimedOut
from tensord.shm.layout import QUEUE_RECORDS
from tensord.shm.records import WAITS_AT

from ...daemon_process import PATIENCE_S
from ...memory_bench import key
from ...writing_bench import LANE, WritingBench


def soon() -> float:
    return time.monotonic() + PATIENCE_S


@pytest.fixture
def bench() -> Any:
    with WritingBench() as bench:
        yield bench


def test_a_refusal_is_known_with_its_error(bench: WritingBench) -> None:
    bench.refuses[key(1)] = LimitReached("entries_max is 1")
    put = bench.put(key(1), 1, soon())
    assert put.state == "refused" and put.error is bench.refuses[key(1)]
    assert "refused, LimitReached" in repr(put)
    assert bench.put(key(2), 1, soon()).state == "stored"


def test_no_put_counts_as_stored_while_a_refusal_is_still_unread(bench: WritingBench) -> None:
    """The daemon settles both, and its message is read later."""
    bench.asleep[0] = 0
    first, second = bench.put(key(1), 1, soon()), bench.put(key(2), 1, soon())
    bench.refusals[LANE] += 1
    bench.settled[LANE] = 2
    assert [first.state, second.state] == ["sent", "sent"]
    with pytest.raises(TimedOut, match="was not acknowledged within 0"):
        second.wait(0.01)
    bench.writer.outcomes.refused(1, LimitReached("full"))
    assert [first.state, second.state] == ["refused", "stored"]


def test_a_refusal_that_comes_before_the_put_is_noted_is_not_lost(bench: WritingBench) -> None:
    outcomes = bench.writer.outcomes
    bench.refusals[LANE] += 1
    outcomes.refused(1, LimitReached("full"))
    bench.settled[LANE] = 1
    put = Put(key(1))
    outcomes.note(put, 1)
    assert put.state == "refused"


def test_a_wait_ends_with_the_daemon_s_bell(bench: WritingBench) -> None:
    bench.asleep[0] = 0
    puts = [bench.put(key(i), i, soon()) for i in range(3)]
    told: list[Any] = []
    threads = [Thread(target=lambda put=put: told.append(put.wait(PATIENCE_S).state)) for put in puts]
    bench.settled[LANE] = 0
    for thread in threads:
        thread.start()
    while len(bench.writer.outcomes._waiting) < 3:
        time.sleep(0)
    assert bench.words[WAITS_AT] == 1
    bench.work()
    for thread in threads:
        thread.join()
    assert told == ["stored"] * 3
    assert bench.words[WAITS_AT] == 0


def test_many_threads_wait_for_a_daemon_that_sleeps_and_wakes() -> None:
    with WritingBench(ring_bytes=16 << 20) as bench:
        bench.serve()
        states: list[str] = []

        def work(thread: int) -> None:
            states.extend(bench.put(key(thread * 1000 + i), i, soon()).wait(PATIENCE_S).state for i in range(200))

        threads = [Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert states == ["stored"] * 600


def test_a_client_waits_for_its_own_put_of_a_key_and_for_no_other(bench: WritingBench) -> None:
    outcomes = bench.writer.outcomes
    assert not outcomes.wait_for_own(key(1))
    bench.asleep[0] = 0
    bench.put(key(1), 1, soon())
    assert outcomes.unsettled.keys() == {key(1)}
    assert not outcomes.wait_for_own(key(2))
    bench.eager = False
    assert not outcomes.wait_for_own(key(1)), "the daemon has not taken it"
    began_s = time.monotonic()
    assert not any(outcomes.wait_for_own(key(1)) for _ in range(1000))
    assert time.monotonic() - began_s < OWN_WAIT_S, "a daemon that is late once is waited for no more"
    bench.put(key(3), 1, soon())
    bench.work()
    assert outcomes.wait_for_own(key(3))
    assert not outcomes.unsettled and not outcomes.wait_for_own(key(3))


@pytest.mark.parametrize("refused", [False, True])
def test_what_is_settled_is_forgotten(bench: WritingBench, refused: bool) -> None:
    outcomes = bench.writer.outcomes
    puts = []
    for i in range(3 * QUEUE_RECORDS):
        if refused:
            bench.refuses[key(i)] = LimitReached("full")
        puts.append(bench.put(key(i), None, soon()))
        assert len(outcomes._open) <= 2 * QUEUE_RECORDS and len(outcomes.unsettled) <= 2 * QUEUE_RECORDS
        assert len(outcomes._early) == 0
    assert {put.state for put in puts} <= ({"refused"} if refused else {"stored", "refused"})
    assert len(outcomes._open) <= QUEUE_RECORDS and len(outcomes.unsettled) <= QUEUE_RECORDS


def test_a_lost_connection_ends_a_wait(bench: WritingBench) -> None:
    bench.asleep[0] = 0
    put = bench.put(key(1), np.zeros(3), soon())
    ended = Event()

    def wait() -> None:
        put.wait(PATIENCE_S)
        ended.set()

    thread = Thread(target=wait)
    thread.start()
    while not bench.writer.outcomes._waiting:
        time.sleep(0)
    bench.lose()
    assert ended.wait(PATIENCE_S)
    thread.join()
    assert put.state == "lost" and isinstance(put.error, DaemonUnavailable)
    late = Put(key(2))
    bench.writer.outcomes.note(late, 2)
    assert late.state == "lost"


def test_a_wait_that_sees_the_end_first_says_lost(bench: WritingBench) -> None:
    """The connection's thread has said that it is over, and has not come to this put yet."""
    bench.asleep[0] = 0
    put = bench.put(key(1), 1, soon())
    bench.writer.outcomes.ended = DaemonUnavailable("gone")
    assert put.wait(PATIENCE_S).state == "lost" and "gone" in str(put.error)
    assert not bench.writer.outcomes.wait_for(2, soon())


def test_a_refusal_of_a_put_that_was_cut_short_is_forgotten(bench: WritingBench) -> None:
    outcomes = bench.writer.outcomes
    bench.refusals[LANE] += 1
    outcomes.refused(1, LimitReached("full"))
    assert outcomes._early
    bench.settled[LANE] = 2 * QUEUE_RECORDS
    outcomes.note(Put(key(1)), 2 * QUEUE_RECORDS)
    assert not outcomes._early


def test_in_a_forked_child_puts_are_lost_and_the_lane_is_not_written(bench: WritingBench) -> None:
    bench.asleep[0] = 0
    put = bench.put(key(1), 1, soon())
    outcomes = bench.writer.outcomes
    with outcomes._lock:
        outcomes.disown()
    assert put.state == "lost" and "forked" in str(put.error)
    assert not outcomes.wait_for(5, time.monotonic() + 0.01)
    assert bench.words[WAITS_AT] == 0


@pytest.mark.parametrize("ends_first", [True, False])
def test_what_the_next_daemon_has_settled_is_no_outcome(bench: WritingBench, ends_first: bool) -> None:
    """It may give the lane's words to another lane before the end of the connection is noticed."""
    epochs = memoryview(array("Q", [1]))
    outcomes = Outcomes(bench.words, bench.settled, bench.refusals, LANE, bench, epochs)
    stored, put = Put(key(1)), Put(key(2))
    outcomes.note(stored, 1)
    outcomes.note(put, 2)
    bench.settled[LANE] = 1
    assert (stored.state, put.state) == ("stored", "sent")
    epochs[0] = 2
    bench.settled[LANE] = 9
    if not ends_first:
        assert put.state == "sent"
    outcomes.end(DaemonUnavailable("gone"))
    assert (stored.state, put.state) == ("stored", "lost")
