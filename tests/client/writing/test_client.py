"""What users of a client rely on when they put: against a stand-in for the daemon, over a real socket."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.client.writing.outcomes import OWN_WAIT_S
from tensord.errors import (
    BadKey,
    Invalidated,
    ObjectTooLarge,
    StoreFull,
    TimedOut,
    UnsupportedLeaf,
    UsageError,
)
from tensord.shm.lanes.records import AWAKE
from tensord.shm.ring.layout import ASLEEP_AT, QUEUE_RECORDS

from ...daemon_process import PATIENCE_S, until
from ...interruptions import interrupt
from ...memory_bench import key
from ...processes import Child, Stage
from ...shm.test_packing import calls
from ...stand_in import StandIn

PUT_CALLS_MAX = 40
KB = 1 << 10
WRITING = [f"client/writing/{name}.py" for name in ("arena", "memory", "outcomes", "put", "puts", "wire")]


@pytest.fixture(params=[True, False], ids=["in the ring", "through an inbox"])
def daemon(request: pytest.FixtureRequest) -> Iterator[StandIn]:
    with StandIn(uses_ring=request.param) as made:
        yield made


@pytest.fixture
def cache(daemon: StandIn) -> Iterator[tensord.Client]:
    with daemon.client() as made:
        yield made


def test_what_was_put_in_any_way_is_read_as_it_was(daemon: StandIn, cache: tensord.Client) -> None:
    tree = {"pixels": np.arange(600.0).reshape(20, 30).T, "grid": (np.array([[1, 2]], np.int16), "x" * 300, 7)}
    reserved = cache.reserve({"hidden": tensord.Spec((3,), "float32"), "n": 5})
    reserved.tree["hidden"][:] = 7
    puts = [
        cache.put(key(0), tree, tokens=5, agent="planner", cost_ms=2.5, ttl_s=9.0),
        *cache.put_many([(key(1), tree), (key(2), tree)], parents=[None, key(1)], agent="planner"),
        reserved.commit(key(3)),
    ]
    assert cache.get_or_compute(key(4), lambda: tree) is tree
    for put in puts:
        assert put.wait(PATIENCE_S).state == "stored", put
    for number in (0, 1, 2, 4):
        lease = cache.get(key(number), verify=True)
        assert lease is not None and (lease.tree["pixels"] == tree["pixels"]).all()
        assert lease.tree["grid"][1:] == ("x" * 300, 7)
    found = cache.get(key(3))
    assert found is not None and found.tree["n"] == 5 and (found.tree["hidden"] == 7).all()
    first = daemon.records[0]
    assert first[7:9] == (2.5, 9.0) and first[11] == 5
    assert daemon.records[2][6] == key(1)
    assert daemon.agents == ["planner"], "each name is sent once"
    assert cache.put(key(0), tree, wait=True).state == "existed"


WAYS: dict[str, Callable[[tensord.Client, bytes], bool]] = {
    "get": lambda cache, at: cache.get(at) is not None,
    "verified": lambda cache, at: cache.get(at, verify=True) is not None,
    "hold": lambda cache, at: cache.hold(at) is not None,
    "get_many": lambda cache, at: bool(cache.get_many([key(77), at]).found[1]),
    "contains": lambda cache, at: cache.contains(at),
    "get_into": lambda cache, at: cache.get_into(at, np.zeros(3)),
    "bytearray": lambda cache, at: cache.get(bytearray(at)) is not None,  # type: ignore[arg-type]
}


@pytest.mark.parametrize("way", WAYS)
def test_a_client_reads_what_it_has_put_though_the_daemon_takes_a_moment(
    daemon: StandIn, cache: tensord.Client, way: str
) -> None:
    cache.put(key(0), 1, wait=True)
    daemon.takes = False
    cache.put(key(1), np.arange(3.0))
    assert not WAYS[way](cache, key(2)), "nobody has put it"

    def take() -> None:
        daemon.takes = True
        daemon.work()

    timer = threading.Timer(0.005, take)
    timer.start()
    assert WAYS[way](cache, key(1))
    timer.join()


def test_a_daemon_that_is_late_is_waited_for_once_and_not_by_each_lookup(
    daemon: StandIn, cache: tensord.Client
) -> None:
    cache.put(key(0), 1, wait=True)
    daemon.takes = False
    for number in range(1, 200):
        cache.put(key(number), number)
    began_s = time.monotonic()
    assert cache.get(key(1)) is None
    assert time.monotonic() - began_s >= OWN_WAIT_S
    assert not any(cache.contains(key(number)) for number in range(1, 200))
    assert time.monotonic() - began_s < 20 * OWN_WAIT_S
    daemon.takes = True


def test_an_asyncio_loop_goes_on_while_a_client_waits_for_its_own_put(daemon: StandIn) -> None:
    async def main() -> int:
        async with tensord.AsyncClient(daemon.socket) as cache:
            await cache.put(key(0), 1, wait=True)
            daemon.takes = False
            await cache.put(key(1), 1)
            turns = 0

            async def turn() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0.001)

            task = asyncio.create_task(turn())
            await asyncio.sleep(0)
            assert await cache.get(key(1)) is None
            task.cancel()
            daemon.takes = True
            return turns

    assert asyncio.run(main()) > 2


def test_what_is_settled_is_stored_and_the_rest_is_lost_with_its_connection(
    daemon: StandIn, cache: tensord.Client
) -> None:
    stored = cache.put(key(1), 1)
    assert stored.wait(PATIENCE_S).state == "stored"
    daemon.takes = False
    lost = cache.put(key(2), 2)
    assert lost.state == "sent"
    daemon.hang_up()
    assert lost.wait(PATIENCE_S).state == "lost" and "went away" in str(lost.error)
    assert stored.state == "stored"
    daemon.takes = True
    assert cache.wait_connected(PATIENCE_S)
    assert cache.put(key(3), 3, wait=True).state == "stored"
    assert (lost.state, stored.state) == ("lost", "stored")


def test_a_copy_that_outlives_its_connection_writes_nothing_into_the_next_ones_queue(
    daemon: StandIn, cache: tensord.Client
) -> None:
    assert cache.put(key(1), 1, wait=True).state == "stored"
    writer = cache.link.puts.writer
    assert writer is not None

    class Slow:
        header, payload_bytes = b"\x01\x00", 64

        def write(self, memory: memoryview, start: int) -> None:
            daemon.hang_up()
            until(lambda: cache.link.puts.writer is None, "the end of the connection")
            assert cache.wait_connected(PATIENCE_S)
            assert cache.put(key(2), 2, wait=True).state == "stored"

    late = tensord.Put(key(3))
    writer.put(late, Slow(), time.monotonic() + PATIENCE_S)
    assert late.state == "lost"
    states = [cache.put(key(number), number, wait=True).state for number in range(4, 30)]
    assert set(states) == {"stored"}


def test_a_put_right_after_this_process_has_ended_its_connection_is_stored(
    daemon: StandIn, cache: tensord.Client
) -> None:
    """As an exception in the middle of a message does."""
    for number in range(10):
        assert cache.put(key(number), number, wait=True).state == "stored"
        cache.link.attachment.end()


def test_refusals_have_the_daemons_reason(daemon: StandIn, cache: tensord.Client) -> None:
    errors = {key(1): StoreFull("no room"), key(2): Invalidated("generation 1 is past")}
    daemon.refuses |= errors
    for at, error in errors.items():
        put = cache.put(at, 1, wait=True)
        assert put.state == "refused" and type(put.error) is type(error) and str(put.error) == str(error)
    assert cache.get_or_compute(key(1), lambda: 5) == 5
    until(lambda: cache.tally.not_stored == {"StoreFull": 1}, "the count of what was not stored")
    large = cache.put(key(3), np.zeros(100 << 20, np.uint8))
    assert large.state == "refused" and isinstance(large.error, ObjectTooLarge)


@pytest.mark.parametrize("limit", [1 << 20])
def test_a_payload_over_the_limit_is_refused_here(limit: int) -> None:
    with StandIn(object_bytes_max=limit) as daemon, daemon.client() as cache:
        put = cache.put(key(1), np.zeros(limit, np.uint8))
        assert put.state == "refused" and "object_bytes_max is 1048576" in str(put.error)
        with pytest.raises(ObjectTooLarge, match="object_bytes_max"):
            cache.reserve(tensord.Spec((limit,), "uint8"))
        assert not daemon.records


def test_a_put_without_room_ends_at_its_time_limit_and_the_next_one_is_stored(
    daemon: StandIn, cache: tensord.Client
) -> None:
    daemon.lends = False
    began_s = time.monotonic()
    put = cache.put(key(1), np.zeros(10), timeout_s=0.2)
    assert put.state == "lost" and isinstance(put.error, TimedOut)
    assert 0.2 <= time.monotonic() - began_s < PATIENCE_S / 2
    daemon.lends = True
    daemon.work()
    assert cache.put(key(1), np.zeros(10), wait=True).state == "stored"


def test_mistakes_are_named_before_anything_is_put(daemon: StandIn, cache: tensord.Client) -> None:
    for options in ({"tokens": -1}, {"tokens": 1 << 32}, {"ttl_s": 0}, {"cost_ms": float("nan")}, {"agent": "a" * 129}):
        with pytest.raises(UsageError, match="is"):
            cache.put(key(1), 1, **options)
    with pytest.raises(UnsupportedLeaf, match=r"tree\['a'\]"):
        cache.put(key(1), {"a": object()})
    with pytest.raises(UnsupportedLeaf):
        cache.put_many([(key(1), 1), (key(2), object())])
    two: list[tuple[bytes, Any]] = [(key(1), 1), (key(2), 2)]
    for parents in ([], [None], [None] * 3):
        with pytest.raises(UsageError, match="ends after"):
            cache.put_many(two, parents=parents)
    for wrong in ({"parents": b"ab"}, {"parents": [None, b"short"]}, {"ttl_s": -1}):
        with pytest.raises((UsageError, BadKey)):
            cache.put_many(two, **wrong)
    assert cache.put_many([], wait=True) == []
    reserved = cache.reserve(1)
    reserved.abandon()
    with pytest.raises(ValueError, match="committed or abandoned"):
        reserved.commit(key(1))
    assert not daemon.records


def test_an_exception_at_any_point_of_a_put_leaves_a_client_whose_next_call_works(
    daemon: StandIn, cache: tensord.Client
) -> None:
    """As Ctrl-C raises it."""
    tree = {"a": np.arange(100), "b": (np.zeros(500), "x" * 400), "c": np.zeros(40_000, np.uint8)}
    number = 0
    while interrupt(
        number,
        lambda number=number: cache.put(key(number), tree, wait=True),  # type: ignore[misc]
        ("client/core/puts.py", *WRITING, "shm/payloads/packing.py"),
    ):
        number += 1
        assert cache.put(key(100_000 + number), tree, wait=True).state == "stored", number
        lease = cache.get(key(number - 1))
        assert lease is None or (lease.tree["a"] == tree["a"]).all()
        del lease
    assert number > 60
    cache.close()
    until(lambda: (gc.collect(), not daemon.bench.pins())[1], "no place to be pinned")


def test_a_full_queue_waits_for_the_daemon_and_no_longer_than_the_time_limit(
    daemon: StandIn, cache: tensord.Client
) -> None:
    assert cache.put(key(0), 0, wait=True).state == "stored"
    daemon.takes = False
    puts = [cache.put(key(number), number) for number in range(1, QUEUE_RECORDS + 1)]
    late = cache.put(key(len(puts) + 1), 0, timeout_s=0.01)
    assert late.state == "lost" and "did not take the record" in str(late.error)
    daemon.takes = True
    daemon.work()
    puts.append(cache.put(key(len(puts) + 1), 0))
    assert [put for put in puts if put.wait(PATIENCE_S).state != "stored"] == []


def test_parent_and_child_of_a_fork_go_on_with_grants_in_hand(daemon: StandIn, cache: tensord.Client) -> None:
    """The parent keeps its connection, since the child shares nothing that is written."""
    for number in range(20):
        assert cache.put(key(number), np.full(100, number), wait=True).state == "stored"
    daemon.takes = False
    sent = cache.put(key(99), 1)
    connection = cache.link.connection
    child = os.fork()
    if not child:
        code = 1
        try:
            known = sent.state == "stored" or "forked" in str(sent.error)
            mine = [cache.put(key(1000 + number), np.full(100, number), wait=True) for number in range(20)]
            code = 0 if known and {put.state for put in mine} == {"stored"} else 2
        finally:
            os._exit(code)
    daemon.takes = True
    daemon.work()
    states = [cache.put(key(2000 + number), np.full(100, number), wait=True).state for number in range(200)]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert set(states) == {"stored"} and sent.wait(PATIENCE_S).state == "stored"
    assert cache.link.connection is connection
    for number in range(20):
        for base in (0, 1000, 2000):
            lease = cache.get(key(base + number))
            assert lease is not None and (lease.tree == number).all()


def test_an_inbox_keeps_no_memory_of_what_the_ring_has() -> None:
    with StandIn(uses_ring=False) as daemon, daemon.client() as cache:
        rng = np.random.default_rng(1)
        for number in range(300):
            size = int(rng.integers(100, 200 * KB))
            cache.put(key(number), np.full(size, number % 251, np.uint8))
        assert cache.put(key(999), 1, wait=True).state == "stored"
        _, inbox = cache.link.puts._inbox or (None, None)
        assert inbox is not None
        until(lambda: os.fstat(inbox.fd).st_blocks * 512 < 2 << 20, "the inbox to be nearly empty")
        for number in range(300):
            lease = cache.get(key(number))
            assert lease is not None and (lease.tree == number % 251).all()


def calls_of_puts(stage: Stage, leaves: int) -> list[int]:
    """How many calls each of a hundred puts makes. In a process of its own, where no test has turned tracing on."""
    tree: Any = {f"layer{i}": np.zeros((16, 100), np.float32) for i in range(leaves)} or np.zeros(64 * KB, np.uint8)
    with StandIn(1 << 30) as daemon, daemon.client() as cache:
        for number in range(20):
            cache.put(os.urandom(32), tree, wait=number % 5 == 0)
        memoryview(daemon.bench._index_map)[ASLEEP_AT : ASLEEP_AT + 8].cast("Q")[0] = AWAKE
        writer = cache.link.puts.writer
        assert writer is not None
        writer.arena._ahead = 64
        keys = [os.urandom(32) for _ in range(100)]
        return sorted(calls(lambda at=at: cache.put(at, tree)) for at in keys)  # type: ignore[misc]


@pytest.mark.parametrize("leaves", [0, 40])
def test_a_put_of_an_array_costs_at_most_forty_calls_and_a_leaf_twelve(leaves: int) -> None:
    with Child(calls_of_puts, leaves) as child:
        counted = child.hear()
    # One that asks for more places costs more.
    assert counted[len(counted) // 2] <= PUT_CALLS_MAX + 12 * leaves, counted
