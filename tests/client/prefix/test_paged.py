"""Snapshots by the chain of blocks they stand after: found by the whole chain, the least recently used goes first."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.client.prefix.paged import PagedSnapshots
from tensord.errors import BadPrefix

from ...daemon_process import Daemon, until

_numbers = count()
CAPACITY = 8


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon.start()


@pytest.fixture(scope="module")
def client(running: Daemon) -> tensord.Client:
    return running.client()


@pytest.fixture
def namespace() -> tensord.Namespace:
    return tensord.Namespace(model=f"model-{next(_numbers)}", revision="1", dtype="float32", processor="none")


@pytest.fixture
def snapshots(client: tensord.Client, namespace: tensord.Namespace) -> PagedSnapshots:
    return PagedSnapshots(client, namespace, CAPACITY)


def chain(number: int, blocks: int = 3) -> list[bytes]:
    return [hashlib.sha256(b"%d of %d" % (at, number)).digest() for at in range(blocks)]


def state(number: int) -> list[Any]:
    """A state per layer."""
    return [np.full((2, 3), number, np.float32), np.arange(4) + number]


def kept(snapshots: PagedSnapshots, numbers: range) -> list[int]:
    """Which of the chains are in the store, without using them."""
    return [n for n in numbers if snapshots._client.contains(snapshots.key(chain(n)))]


def test_a_state_is_found_by_its_whole_chain_by_whoever_has_the_namespace(
    snapshots: PagedSnapshots, running: Daemon, namespace: tensord.Namespace
) -> None:
    assert snapshots.put(chain(1), state(1), wait=True).state == "stored"
    other = PagedSnapshots(running.client(), namespace, CAPACITY)
    lease = other.get(chain(1))
    assert lease is not None
    for mine, found in zip(state(1), lease.tree, strict=True):
        assert np.array_equal(mine, found) and mine.dtype == found.dtype
    first, second, third = chain(1)
    for wrong in ([first, second], [second, first, third], [*chain(1), b"x"], [first, second + third]):
        assert other.get(wrong) is None


def test_beyond_the_capacity_the_one_that_was_used_longest_ago_leaves_the_store(snapshots: PagedSnapshots) -> None:
    for n in range(CAPACITY):
        snapshots.put(chain(n), state(n), wait=True)
    assert snapshots.get(chain(0)) is not None
    assert snapshots.put(chain(1), state(1)).state == "stored"
    snapshots.put(chain(CAPACITY), state(CAPACITY), wait=True)
    until(lambda: kept(snapshots, range(CAPACITY + 1)) == [0, 1, *range(3, CAPACITY + 1)], "the oldest to go")
    assert len(snapshots) == CAPACITY
    held = snapshots.get(chain(3))
    snapshots.put(chain(50), state(50), wait=True)
    until(lambda: 4 not in kept(snapshots, range(5)), "the one after it to go")
    assert held is not None and 3 in kept(snapshots, range(5))


def test_entries_of_other_processes_are_not_evicted_from_here(
    snapshots: PagedSnapshots, running: Daemon, namespace: tensord.Namespace
) -> None:
    small = PagedSnapshots(running.client(), namespace, 1)
    snapshots.put(chain(1), state(1), wait=True)
    assert small.put(chain(1), state(1), wait=True).state == "existed"
    for n in (2, 3):
        small.put(chain(n), state(n), wait=True)
    until(lambda: kept(snapshots, range(5)) == [1, 3], "its own to go")
    assert small.clear() == 1
    assert small.put(chain(1), state(1), wait=True).state == "existed"
    assert small.clear() == 0 and len(small) == 0
    assert kept(snapshots, range(5)) == [1]


def test_an_entry_evicted_elsewhere_is_a_miss_and_is_stored_again(
    snapshots: PagedSnapshots, client: tensord.Client
) -> None:
    for n in (1, 2):
        snapshots.put(chain(n), state(n), wait=True)
    client.evict(*(snapshots.key(chain(n)) for n in (1, 2)))
    assert snapshots.get(chain(1)) is None
    assert [snapshots.put(chain(n), state(n), wait=True).state for n in (1, 2)] == ["stored", "stored"]
    assert snapshots.clear() == 2 and len(snapshots) == 0 and snapshots.clear() == 0


def test_a_chain_that_is_none_is_named(snapshots: PagedSnapshots) -> None:
    wrong: list[tuple[Any, str]] = [
        ([], "0 items"),
        (b"x" * 32, "a bytes"),
        ([b"x", b""], r"chain\[1\]"),
        ([b"x", 5], r"chain\[1\] is 5"),
        ([b"x" * 65], r"chain\[0\]"),
        ([b"x"] * 1025, "1025 items"),
    ]
    for given, message in wrong:
        with pytest.raises(BadPrefix, match=message):
            snapshots.put(given, state(1))
        with pytest.raises(BadPrefix, match=message):
            snapshots.get(given)
    assert len(snapshots) == 0


def test_the_child_of_a_fork_has_none_of_its_own(snapshots: PagedSnapshots) -> None:
    snapshots.put(chain(1), state(1), wait=True)
    with snapshots._lock:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            found = snapshots.get(chain(1))
            os._exit(0 if len(snapshots) == 0 and found is not None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(snapshots) == 1
