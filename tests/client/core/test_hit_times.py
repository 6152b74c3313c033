"""One lookup is timed and all others run the code of View.get, with every count as without."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tensord.client.core.hit_times import TimedView, arm
from tensord.client.core.view import View
from tensord.shm.lane_reader import LaneRecords

from ...memory_bench import MemoryBench, key


@pytest.fixture
def bench() -> Iterator[MemoryBench]:
    with MemoryBench() as made:
        made.put(key(1), np.arange(9))
        yield made


def drained(bench: MemoryBench) -> LaneRecords:
    found = bench.readers[0].drain()
    assert found is not None
    return found


def test_the_hit_after_the_skipped_ones_is_timed_and_no_other(bench: MemoryBench) -> None:
    view = bench.view()
    arm(view, 3)
    for before in range(3):
        assert type(view) is TimedView, before
        assert view.get(key(1)) is not None
    assert drained(bench).times_ns == []
    assert view.get(key(1)) is not None
    assert type(view) is View, "later lookups run View.get itself"
    for _ in range(5):
        assert view.get(key(1)) is not None
    records = drained(bench)
    assert len(records.span_ids) == 6 and records.misses == 0
    [took_ns] = records.times_ns
    assert took_ns > 0


def test_holds_and_batches_are_no_gets(bench: MemoryBench) -> None:
    view = bench.view()
    arm(view, 0)
    assert view.hold(key(1)) is not None and view.contains(key(1))
    assert view.get_many(np.frombuffer(key(1), np.uint8).reshape(1, -1))[0] is not None
    assert type(view) is TimedView and drained(bench).times_ns == []


def test_threads_that_read_while_a_view_is_armed_again_and_again_get_every_hit(bench: MemoryBench) -> None:
    view = bench.view()
    wrong: list[object] = []

    def read() -> None:
        for _ in range(3000):
            lease = view.get(key(1))
            if lease is None or lease.tree[8] != 8:
                wrong.append(lease)

    threads = [threading.Thread(target=read) for _ in range(3)]
    # On a busy machine the threads may be done before this one runs again.
    arm(view, 1)
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        arm(view, 1)
    for thread in threads:
        thread.join()
    records = drained(bench)
    assert not wrong
    assert len(records.span_ids) + records.lost == 9000 and records.misses == 0
    assert records.times_ns and view.lane.in_use == 0
