"""Many clients at once, and many one after another: all are served, and nothing of them is left."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import tensord

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from .payloads import key, payload
from .raw import RawClient

ATTACHES = 2_000
GROWTH_BYTES_MAX = 8 * MIB


@pytest.fixture
def small() -> Iterator[Daemon]:
    with Daemon(ring_bytes=4 * MIB) as running:
        yield running.start()


def own_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_thousands_of_clients_that_come_and_go_leave_nothing(small: Daemon) -> None:
    def come_and_go(number: int) -> None:
        # Now and then one comes with an inbox, too.
        RawClient(small.socket, inbox_bytes=MIB if number % 50 == 0 else 0).close()

    for _ in range(200):
        RawClient(small.socket).close()
    small.until(lambda s: s["lanes"] == s["clients"] == 0, "the first to be gone")
    here, there, held = own_descriptors(), small.descriptors(), small.memory_bytes()
    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(come_and_go, range(ATTACHES)))) == ATTACHES
    small.until(lambda s: s["lanes"] == s["clients"] == s["inboxes"] == 0, "the last to be gone")
    until(lambda: small.descriptors() <= there, "the daemon's descriptors to be closed")
    # A client of an earlier test may look for its daemon still, with a socket for a moment.
    until(lambda: own_descriptors() <= here, "this process's descriptors to be closed")
    assert not small.lanes()
    assert small.memory_bytes() - held < GROWTH_BYTES_MAX


def churn(small: Daemon, client: tensord.Client, first: int, how_many: int) -> None:
    """Entries of namespaces of their own, claims, misses, evictions, each with a key that was never seen before."""
    data = payload(1, 512)
    puts = []
    for number in range(first, first + how_many):
        own = struct.pack("<Q", number) + key(number)[8:]
        client.get(own)
        puts.append(client.put(own, data, ttl_s=60.0, tokens=3))
        if number % 10 == 0:
            client.get_or_compute(own[::-1], lambda: data)
    assert {put.wait(PATIENCE_S).state for put in puts} <= {"stored"}


def test_the_daemons_memory_does_not_grow_with_the_entries_it_has_seen() -> None:
    with Daemon(ring_bytes=4 * MIB, max_entries=512) as daemon:
        client = daemon.start().client()
        churn(daemon, client, 0, 2000)
        held = daemon.memory_bytes()
        churn(daemon, client, 10_000, 4000)
        status = daemon.status()["store"]
        assert status["entries"] <= 512 and status["namespaces"] <= 513
        assert daemon.memory_bytes() - held < GROWTH_BYTES_MAX
