"""What users of a client rely on when they put: with a daemon that stops, loses connections, or has no room."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.client.arguments.put_options import PutOptions
from tensord.client.writing import outcomes
from tensord.errors import BadKey, UnsupportedLeaf, UsageError
from tensord.shm.ring.layout import QUEUE_RECORDS

from ...daemon_process import MIB, PATIENCE_S, Daemon, some, until
from ...faults.payloads import cut, with_place
from ...memory_bench import key
from ...processes import Child, Stage
from ...shm.test_packing import calls

PUT_CALLS_MAX = 40
KB = 1 << 10


@pytest.fixture(scope="module", params=["owner", "off"], ids=["in the ring", "through an inbox"])
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    with Daemon(ring_bytes=64 * MIB, write_in_place=request.param) as running:
        yield running.start()


@pytest.fixture
def cache(daemon: Daemon) -> Iterator[tensord.Client]:
    """A client of a daemon that has nothing but what this client put, with a place for more."""
    with daemon.client(timeout_s=PATIENCE_S) as made:
        made.clear()
        with_place(made, 1_000_000, 512 * KB)
        yield made


def test_what_was_put_in_any_way_is_read_as_it_was(daemon: Daemon, cache: tensord.Client) -> None:
    tree = {"pixels": np.arange(600.0).reshape(20, 30).T, "grid": (np.array([[1, 2]], np.int16), "x" * 300, 7)}
    reserved = cache.reserve({"hidden": tensord.Spec((3,), "float32"), "n": 5})
    reserved.tree["hidden"][:] = 7
    puts = [
        cache.put(key(0), tree, tokens=5, agent="planner", cost_ms=2.5, ttl_s=9000.0),
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
    entry = cache.peek(key(0))
    assert entry is not None and entry.tokens == 5
    assert entry.expires_unix_s - entry.created_unix_s == pytest.approx(9000, abs=60)
    assert cache.evict(key(1)) == 1
    until(lambda: not cache.contains(key(2)), "its child to end")
    assert cache.put(key(0), tree, wait=True).state == "existed"


WAYS: dict[str, Callable[[tensord.Client, bytes], bool]] = {
    "get": lambda cache, at: cache.get(at) is not None,
    "verified": lambda cache, at: cache.get(at, verify=True) is not None,
    "hold": lambda cache, at: cache.hold(at) is not None,
    "get_many": lambda cache, at: bool(cache.get_many([key(77), at]).found[1]),
    "contains": lambda cache, at: cache.contains(at),
    "peek": lambda cache, at: cache.peek(at) is not None,
    "get_into": lambda cache, at: cache.get_into(at, np.zeros(3)),
    "bytearray": lambda cache, at: cache.get(bytearray(at)) is not None,  # type: ignore[arg-type]
}


@pytest.mark.parametrize("way", WAYS)
def test_a_client_reads_what_it_has_put_though_the_daemon_takes_a_moment(
    daemon: Daemon, cache: tensord.Client, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "OWN_WAIT_S", PATIENCE_S)
    with daemon.stopped():
        cache.put(key(1), np.arange(3.0))
        assert not WAYS[way](cache, key(2)), "nobody has put it"
        timer = threading.Timer(0.005, daemon.resume)
        timer.start()
        assert WAYS[way](cache, key(1))
        timer.join()


def test_a_daemon_that_is_late_is_waited_for_once_and_not_by_each_lookup(daemon: Daemon, cache: tensord.Client) -> None:
    with daemon.stopped():
        for number in range(1, 200):
            cache.put(key(number), number)
        began_s = time.monotonic()
        assert cache.get(key(1)) is None
        assert time.monotonic() - began_s >= outcomes.OWN_WAIT_S
        assert not any(cache.contains(key(number)) for number in range(1, 200))
        assert time.monotonic() - began_s < 20 * outcomes.OWN_WAIT_S


async def test_an_asyncio_loop_goes_on_while_a_client_waits_for_its_own_put(
    daemon: Daemon, cache: tensord.Client
) -> None:
    async with tensord.AsyncClient(daemon.socket, timeout_s=PATIENCE_S) as shared:
        await shared.put(key(0), 1, wait=True)
        with_place(shared.client, 1_000_002)
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.001)

        with daemon.stopped():
            await shared.put(key(1), 1)
            task = asyncio.create_task(turn())
            await asyncio.sleep(0)
            assert await shared.get(key(1)) is None
            task.cancel()
        assert turns > 2


def test_what_is_settled_is_stored_and_the_rest_is_lost_with_its_connection(
    daemon: Daemon, cache: tensord.Client
) -> None:
    stored = cache.put(key(1), 1)
    assert stored.wait(PATIENCE_S).state == "stored"
    with_place(cache, 1_000_001)
    with daemon.stopped():
        lost = cache.put(key(2), 2)
        assert lost.state == "sent"
        cut(cache)
        assert lost.wait(PATIENCE_S).state == "lost" and "went away" in str(lost.error)
        assert stored.state == "stored"
    assert cache.wait_connected(PATIENCE_S)
    assert cache.put(key(3), 3, wait=True).state == "stored"
    assert (lost.state, stored.state) == ("lost", "stored")


def test_a_copy_that_outlives_its_connection_writes_nothing_into_the_next_ones_queue(
    daemon: Daemon, cache: tensord.Client
) -> None:
    writer = some(cache.link.puts.writer)

    class Slow:
        header, payload_bytes = b"\x01\x00", 64

        def write(self, memory: memoryview, start: int) -> None:
            cut(cache)
            assert cache.wait_connected(PATIENCE_S)
            assert cache.put(key(2), 2, wait=True).state == "stored"
            assert cache.link.puts.writer is not writer

    late = tensord.Put(key(3))
    writer.put(late, Slow(), PutOptions(), time.monotonic() + PATIENCE_S)
    assert late.state == "lost"
    states = [cache.put(key(number), number, wait=True).state for number in range(4, 30)]
    assert set(states) == {"stored"}


def test_a_put_right_after_this_process_has_ended_its_connection_is_stored(cache: tensord.Client) -> None:
    """As an exception in the middle of a message does."""
    for number in range(10):
        assert cache.put(key(number), number, wait=True).state == "stored"
        cache.link.attachment.end()


def test_mistakes_are_named_before_anything_is_put(daemon: Daemon, cache: tensord.Client) -> None:
    before = daemon.store("puts")
    for options in ({"tokens": -1}, {"tokens": 1 << 32}, {"ttl_s": 0}, {"cost_ms": float("nan")}, {"agent": "a" * 129}):
        with pytest.raises(UsageError, match="is"):
            cache.put(key(1), 1, **options)
    with pytest.raises(UnsupportedLeaf, match=r"tree\['a'\]"):
        cache.put(key(1), {"a": object()})
    with pytest.raises(UnsupportedLeaf):
        cache.put_many([(key(1), 1), (key(2), object())])
    two: list[tuple[bytes, Any]] = [(key(1), 1), (key(2), 2)]
    for parents in ([], [None], [None] * 3):
        with pytest.raises(UsageError, match="give a key or None for each"):
            cache.put_many(two, parents=parents)
    for wrong in ({"parents": b"ab"}, {"parents": [None, b"short"]}, {"ttl_s": -1}):
        with pytest.raises((UsageError, BadKey)):
            cache.put_many(two, **wrong)
    assert cache.put_many([], wait=True) == []
    reserved = cache.reserve(1)
    reserved.abandon()
    with pytest.raises(ValueError, match="committed or abandoned"):
        reserved.commit(key(1))
    assert daemon.store("puts") == before


def test_a_full_queue_waits_for_the_daemon_and_no_longer_than_the_time_limit(
    daemon: Daemon, cache: tensord.Client
) -> None:
    with daemon.stopped():
        puts = [cache.put(key(number), number) for number in range(1, QUEUE_RECORDS + 1)]
        late = cache.put(key(len(puts) + 1), 0, timeout_s=0.01)
        assert late.state == "lost" and "did not take the record" in str(late.error)
    puts.append(cache.put(key(len(puts) + 1), 0))
    assert [put for put in puts if put.wait(PATIENCE_S).state != "stored"] == []


def test_parent_and_child_of_a_fork_go_on_with_grants_in_hand(daemon: Daemon, cache: tensord.Client) -> None:
    """The parent keeps its connection, since the child shares nothing that is written."""
    for number in range(20):
        assert cache.put(key(number), np.full(100, number), wait=True).state == "stored"
    with_place(cache, 1_000_001)
    daemon.pause()
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
    daemon.resume()
    states = [cache.put(key(2000 + number), np.full(100, number), wait=True).state for number in range(200)]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert set(states) == {"stored"} and sent.wait(PATIENCE_S).state == "stored"
    assert cache.link.connection is connection
    for number in range(20):
        for base in (0, 1000, 2000):
            lease = cache.get(key(base + number))
            assert lease is not None and (lease.tree == number).all()


def test_an_inbox_keeps_no_memory_of_what_the_ring_has() -> None:
    with Daemon(ring_bytes=128 * MIB, write_in_place="off") as daemon, daemon.start().client() as cache:
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


def calls_of_puts(stage: Stage, path: Path, leaves: int) -> list[int]:
    """How many calls each of a hundred puts makes. In a process of its own, where no other test runs."""
    tree: Any = {f"layer{i}": np.zeros((16, 100), np.float32) for i in range(leaves)} or np.zeros(64 * KB, np.uint8)
    with tensord.Client(path, timeout_s=PATIENCE_S) as cache:
        with_place(cache, 1, 3 * MIB)
        keys = [os.urandom(32) for _ in range(100)]
        return sorted(calls(lambda at=at: cache.put(at, tree)) for at in keys)  # type: ignore[misc]


@pytest.mark.parametrize("leaves", [0, 40])
def test_a_put_of_an_array_costs_at_most_forty_calls_and_a_leaf_twelve(leaves: int) -> None:
    with Daemon(ring_bytes=256 * MIB) as daemon, Child(calls_of_puts, daemon.start().socket, leaves) as child:
        counted = child.hear()
    # One that asks for a place, or wakes the daemon, costs more.
    assert counted[0] <= PUT_CALLS_MAX + 12 * leaves, counted
