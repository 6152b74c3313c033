"""A put is in the ring byte for byte, has one outcome, and waits for nothing but a place."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event, Thread
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tensord.client.writing.put import CHECKED_BYTES_MAX
from tensord.errors import ObjectTooLarge, StoreFull, TensordError, TimedOut, UnsupportedLeaf
from tensord.shm import unshared
from tensord.shm.layout import QUEUE_RECORDS, SPAN_HEADER_BYTES
from tensord.shm.packing import Packed, pack, write

from ...daemon_process import PATIENCE_S, until
from ...interruptions import interrupt
from ...memory_bench import key
from ...shm.test_packing import calls
from ...writing_bench import WritingBench

PUT_CALLS_MAX = 40


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def read(bench: WritingBench, at: bytes) -> Any:
    lease = bench.view.get(at)
    assert lease is not None, "a miss"
    return lease.tree


@pytest.mark.parametrize("inbox_bytes", [0, 1 << 20])
def test_what_was_put_is_read_as_it_was(inbox_bytes: int) -> None:
    with WritingBench(16 << 20, inbox_bytes=inbox_bytes) as bench:
        tree = {"pixels": np.arange(5000.0).reshape(50, 100).T, "grid": (np.array([[1, 2]], np.int16), "x" * 300, 7)}
        for number in range(100):
            tree["number"] = number
            put = bench.put(key(number), tree, soon())
            assert put.state == "stored", put
        found = read(bench, key(99))
        assert (found["pixels"] == tree["pixels"]).all() and found["grid"][1:] == ("x" * 300, 7)
        assert found["number"] == 99
        with pytest.raises(ValueError, match="read-only"):
            found["pixels"][0, 0] = 1
        del found
        assert bench.put(key(99), tree, soon()).state == "existed"


def test_the_record_says_what_was_put() -> None:
    with WritingBench() as bench:
        array = np.arange(1000, dtype=np.float32)
        bench.put(
            key(1), array, soon(), tokens=5, ttl_s=9.0, claim=6, cost_ms=2.5, agent=3, prefix_bytes=8, parent=key(2)
        )
        bench.put(key(3), np.zeros(CHECKED_BYTES_MAX, np.uint8), soon())
        first, second = bench.records
        offset, payload_bytes = first[2:4]
        memory = bench.bench.bytes[offset + SPAN_HEADER_BYTES :][:payload_bytes]
        assert first[0] == 1 and first[1] == key(1)
        assert first[4] == xxhash.xxh3_64_intdigest(memory.data)
        assert first[5:9] == (6, key(2), 2.5, 9.0)
        assert first[10:] == (len(pack(array).header), 5, 8, 3, 0)
        assert [first[9], second[9]] == [1, 3]
        assert second[4] == 0, "the daemon sums large payloads"


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


def test_threads_copy_at_once() -> None:
    """All threads are within their copy at the same moment."""
    threads, per_thread = 4, 50
    barrier = Barrier(threads)

    def together(*args: Any) -> None:
        barrier.wait(PATIENCE_S)
        write(*args)
        barrier.wait(PATIENCE_S)

    with WritingBench(ring_bytes=64 << 20) as bench, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Packed, "write", together)
        bench.serve()

        def puts(thread: int) -> list[Any]:
            return [
                bench.put(key(thread * 1000 + i), np.full(5000, thread * 7 + i % 7), soon()) for i in range(per_thread)
            ]

        with ThreadPoolExecutor(threads) as pool:
            outcomes = [put for some in pool.map(puts, range(threads)) for put in some]
        assert {put.wait(PATIENCE_S).state for put in outcomes} == {"stored"}
        for thread in range(threads):
            for i in range(per_thread):
                assert (read(bench, key(thread * 1000 + i)) == thread * 7 + i % 7).all()


def test_a_busy_daemon_is_not_rung() -> None:
    with WritingBench() as bench:
        bench.put(key(0), np.zeros(10), soon())
        rung = bench.rung
        bench.asleep[0] = 0
        put = bench.put(key(1), np.zeros(10), soon())
        states = [put.state]
        assert bench.rung == rung
        bench.work()
        assert [*states, put.state] == ["sent", "stored"]


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


def test_a_payload_larger_than_every_grant_waits_for_one_of_its_own() -> None:
    with WritingBench() as bench:
        bench.put(key(0), np.zeros(100, np.uint8), soon())
        bench.lends = False
        big = np.ones(1 << 20, np.uint8)
        put = bench.put(key(1), big, time.monotonic() + 0.01)
        assert put.state == "lost" and isinstance(put.error, TimedOut) and "1048" in str(put.error)
        outcomes: list[Any] = []
        thread = Thread(target=lambda: outcomes.append(bench.put(key(1), big, soon())))
        thread.start()
        bench.lends = True
        bench.serve()
        bench.ring_bell()
        thread.join()
        assert outcomes[0].wait(PATIENCE_S).state == "stored"
        assert (read(bench, key(1)) == 1).all()


@pytest.mark.parametrize(
    ("size_bytes", "error"), [(5 << 20, ObjectTooLarge), (3 << 20, StoreFull)], ids=["the ring", "the room"]
)
def test_a_payload_that_the_daemon_has_no_place_for_is_refused_with_its_error(
    size_bytes: int, error: type[TensordError]
) -> None:
    with WritingBench() as bench:
        bench.lent_max_bytes = 2 << 20
        put = bench.put(key(1), np.zeros(size_bytes, np.uint8), soon())
        assert put.state == "refused" and type(put.error) is error
        assert put.error.__traceback__ is None
        assert bench.put(key(2), np.zeros(100, np.uint8), soon()).state == "stored"


def test_a_tree_that_no_payload_holds_leaves_nothing_behind() -> None:
    with WritingBench() as bench:
        with pytest.raises(UnsupportedLeaf, match=r"tree\['a'\]"):
            bench.put(key(1), {"a": object()}, soon())
        with pytest.raises(ObjectTooLarge):
            bench.put(key(1), [np.zeros(1)] * 20_000, soon())
        assert not bench.asked and not bench.records


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
                ("client/writing/put.py", "client/writing/arena.py", "client/writing/outcomes.py", "shm/packing.py"),
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


def test_a_lost_connection_ends_every_put_and_the_next_one_starts_anew() -> None:
    with WritingBench() as bench:
        stored = bench.put(key(0), np.zeros(9), soon())
        bench.takes = False
        lost = bench.put(key(1), np.zeros(9), soon())
        bench.lends = False
        waiting: list[Any] = []
        begun = Event()
        ask = bench.ask_for_grants

        def asked(*args: Any, **options: Any) -> bool:
            sent = ask(*args, **options)
            begun.set()
            return sent

        bench.ask_for_grants = asked  # type: ignore[method-assign]
        thread = Thread(target=lambda: waiting.append(bench.put(key(2), np.zeros(99_999), soon())))
        thread.start()
        assert begun.wait(PATIENCE_S)
        bench.lose()
        thread.join()
        assert [put.state for put in (stored, lost, *waiting)] == ["stored", "lost", "lost"]
        assert lost.wait(0).error is not None and "connection was lost" in str(lost.error)
        assert bench.put(key(3), 1, soon()).state == "lost"
        assert bench.bench.pins() == set()
        bench.lends = bench.takes = True
        bench._asks.clear()
        bench.writer = bench.new_writer(1 << 20)
        assert bench.put(key(3), 1, soon()).wait(PATIENCE_S).state == "stored"


def test_a_forked_child_writes_nothing_into_the_ring_of_its_parent() -> None:
    with WritingBench() as bench:
        bench.put(key(0), np.zeros(9), soon())
        bench.asleep[0] = 0
        put = bench.put(key(1), np.zeros(9), soon())
        before = bench.bench.bytes.tobytes()
        child = os.fork()
        if child == 0:
            unshared.after_fork_in_child()
            bench.writer.outcomes.disown()
            bench.memory.bytes[:4096] = bytes(range(256)) * 16
            os._exit(0 if put.state == "lost" else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert bench.bench.bytes.tobytes() == before
        bench.work()
        assert put.state == "stored"


@pytest.mark.parametrize("kind", ["array", "tree", "tensor"])
def test_a_put_of_one_array_costs_at_most_forty_calls_and_a_leaf_twelve(kind: str) -> None:
    with WritingBench(ring_bytes=64 << 20) as bench:
        tree: Any = np.zeros(65536, np.uint8)
        leaves = 0
        if kind == "tree":
            leaves = 40
            tree = {f"layer{i}": np.zeros((16, 100), np.float32) for i in range(leaves)}
        if kind == "tensor":
            torch = pytest.importorskip("torch")
            leaves = 1
            tree = torch.zeros((256, 128), dtype=torch.bfloat16)
        for number in range(20):
            bench.put(key(number), tree, soon())
        counted = []
        bench.writer.arena._ahead = 64
        bench.asleep[0] = 0
        for number in range(20, 120):
            at, deadline = key(number), soon()
            counted.append(calls(lambda at=at, deadline=deadline: bench.put(at, tree, deadline)))  # type: ignore[misc]
        bench.work()
        # A put that asks for more grants costs more: the stand-in lends them in this thread.
        assert sorted(counted)[len(counted) * 3 // 4] <= PUT_CALLS_MAX + 12 * leaves
