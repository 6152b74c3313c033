"""A client that is stopped as a whole in the middle of a put in place, while others overwrite the ring many times."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from unittest import mock

import pytest

import tensord
from tensord.shm.payloads.packing import Packed

from ..daemon_process import MIB, PATIENCE_S, Daemon
from ..processes import Child, Stage
from .payloads import is_payload, key, payload

RING_BYTES = 48 * MIB
WRITTEN_BYTES = 16 * MIB
WRITTEN = 1
SIZES_BYTES = (MIB // 2, MIB, 2 * MIB)
"""Of the entries of others."""
LAPS = 2


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(ring_bytes=RING_BYTES, policy="lru") as running:
        yield running.start()


def stops_in_a_put(stage: Stage, socket: Path) -> None:
    """Tells how the put in which it was stopped has ended, and why. Stays connected until it is told to end."""
    write = Packed.write

    def write_half(packed: Packed, memory: memoryview, start: int) -> None:
        """Stops the whole process after half of the payload's bytes."""
        whole = bytearray(packed.payload_bytes)
        write(packed, memoryview(whole), 0)
        half = len(whole) // 2
        memory[start : start + half] = whole[:half]
        os.kill(os.getpid(), signal.SIGSTOP)
        memory[start + half : start + len(whole)] = whole[half:]

    with mock.patch.object(Packed, "write", write_half), tensord.Client(socket, timeout_s=PATIENCE_S) as client:
        assert client.wait_connected(PATIENCE_S)
        put = client.put(key(WRITTEN), payload(WRITTEN, WRITTEN_BYTES), timeout_s=PATIENCE_S).wait(PATIENCE_S)
        stage.tell((put.state, put.error and put.error.code))
        stage.hear()


def others(client: tensord.Client, first: int) -> dict[int, int]:
    """Overwrites the ring LAPS times with entries from number `first` on, and gives the size of each."""
    sizes: dict[int, int] = {}
    for number in count(first):
        size_bytes = SIZES_BYTES[number % len(SIZES_BYTES)]
        put = client.put(key(number), payload(number, size_bytes), wait=True)
        assert put.state == "stored", put
        sizes[number] = size_bytes
        if sum(sizes.values()) > LAPS * RING_BYTES:
            return sizes
    raise AssertionError


def sound(client: tensord.Client, sizes: dict[int, int]) -> set[int]:
    """Those of these entries that are there, each with its own bytes."""
    there = set()
    for number, size_bytes in sizes.items():
        lease = client.get(key(number), verify=True)
        if lease is not None:
            assert lease.tree.nbytes == size_bytes and is_payload(lease.tree, number), f"entry {number} was overwritten"
            there.add(number)
    return there


def given_back(daemon: Daemon, reader: tensord.Client, numbers: set[int]) -> None:
    """Waits until nothing of the ring is anybody's once these entries are evicted."""
    daemon.until(
        lambda s: not s["store"]["retired_bytes"] and not s["store"]["grants"] and not s["pins"],
        "the written place to be pinned no more",
    )
    assert reader.evict(*(key(number) for number in numbers)) == len(numbers)
    daemon.until(lambda s: not s["store"]["used_bytes"], "all of the ring to be free")


def test_a_put_in_place_of_a_process_that_was_stopped_while_others_overwrote_the_ring_is_stored(daemon: Daemon) -> None:
    with Child(stops_in_a_put, daemon.socket) as stopped:
        stopped.until_stopped()
        early = daemon.client()
        before = others(early, 1000)
        writer = daemon.client()
        after = others(writer, 2000)
        stopped.resume()
        outcome = stopped.hear()
        there = sound(writer, {**before, **after, WRITTEN: WRITTEN_BYTES})
        assert not there & before.keys(), "the ring was not overwritten"
        assert len(there) > 10
        assert outcome == ("stored", None) and WRITTEN in there
        given_back(daemon, writer, there)


def test_a_put_in_place_of_a_process_that_was_stopped_beyond_a_restart_is_lost_and_changes_nothing(
    daemon: Daemon,
) -> None:
    with Child(stops_in_a_put, daemon.socket) as stopped:
        stopped.until_stopped()
        daemon.restart()
        writer = daemon.client()
        after = others(writer, 2000)
        assert daemon.status()["pins"] == 1
        stopped.resume()
        outcome = stopped.hear()
        there = sound(writer, after)
        assert len(there) > 10
        assert outcome == ("lost", "DaemonUnavailable") and not writer.contains(key(WRITTEN))
        given_back(daemon, writer, there)
