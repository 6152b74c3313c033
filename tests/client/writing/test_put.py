"""A put is in the ring byte for byte, has one outcome, and waits for nothing but a place."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.client.writing.wire import Granted
from tensord.errors import TimedOut
from tensord.shm.ring.layout import QUEUE_RECORDS

from ...daemon_process import PATIENCE_S, until
from ...interruptions import interrupt
from ...memory_bench import key
from ...writing_bench import WritingBench


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def read(bench: WritingBench, at: bytes) -> Any:
    lease = bench.view.get(at)
    assert lease is not None, "a miss"
    return lease.tree


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40_000)), max_size=60))
def test_puts_of_all_sizes_in_a_small_ring_are_there_or_evicted_and_never_wrong(puts: list[tuple[int, int]]) -> None:
    with WritingBench(ring_bytes=1 << 18) as bench:
        for number, size in puts:
            put = bench.put(key(number), np.full(size, number, np.uint8), soon())
            assert put.state in ("stored", "existed", "refused"), put
            if put.state == "stored":
                assert (read(bench, key(number)) == number).all()
        for number in range(31):
            if (lease := bench.view.get(key(number))) is not None:
                assert (lease.tree == number).all()
            del lease


def test_a_full_queue_waits_for_the_daemon_and_no_longer_than_the_deadline() -> None:
    with WritingBench(ring_bytes=16 << 20, buckets=2048) as bench:
        bench.takes = False
        puts = [bench.put(key(i), i, soon()) for i in range(QUEUE_RECORDS)]
        late = bench.put(key(len(puts)), 0, time.monotonic())
        assert late.state == "lost" and "did not take the record" in str(late.error)
        bench.takes = True
        bench.serve()
        puts.append(bench.put(key(len(puts)), 0, soon()))
        assert {put.wait(PATIENCE_S).state for put in puts} == {"stored"}


def test_an_exception_anywhere_in_a_put_leaves_nothing_to_mend() -> None:
    """As Ctrl-C raises it, at each point of a put and of the wait for it; the same client goes on."""
    with WritingBench(ring_bytes=1 << 20) as bench:
        bench.serve()
        tree = {"a": np.arange(100), "b": (np.zeros(500), "x" * 400), "c": np.zeros(40_000, np.uint8)}
        number = 0
        while True:
            at = key(number)
            if not interrupt(
                number,
                lambda at=at: bench.put(at, tree, soon()).wait(PATIENCE_S),  # type: ignore[misc]
                (
                    "client/writing/put.py",
                    "client/writing/arena.py",
                    "client/writing/outcomes.py",
                    "shm/payloads/packing.py",
                ),
            ):
                break
            number += 1
            after = bench.put(key(100_000 + number), tree, soon()).wait(PATIENCE_S)
            assert after.state == "stored", number
            lease = bench.view.get(at)
            assert lease is None or (lease.tree["a"] == tree["a"]).all()
            del lease
            assert (read(bench, key(100_000 + number))["b"][0] == 0).all()
        assert number > 40
        # Nothing is held: what is lent is what the arena has.
        bench.writer.arena.rest()
        bench.stop()
        until(
            lambda: (bench.work(), bench.lent.keys() == {grant[1] for grant in bench.writer.arena._grants})[1],
            "the daemon to know what is lent",
        )
        bench.writer.arena.end(TimedOut("over"))
        assert bench.bench.pins() == set()


def test_a_place_that_was_taken_back_is_neither_used_nor_pinned() -> None:
    with WritingBench() as bench:
        granted = bench._in_ring(Granted(1, 0, 4096))
        bench.bench.slots.revoke(granted.slot)
        assert bench.memory.hold(granted) is None
        gc.collect()
        assert granted.span_id not in bench.bench.pins()
        bench.bench.slots.release(granted.slot)
