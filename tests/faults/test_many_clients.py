"""Many clients at once, and many one after another: all are served, and nothing of them is left."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

import tensord

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from ..processes import Child, Stage
from .payloads import is_payload, key, payload
from .raw import RawClient

ATTACHES = 10_000
GROWTH_BYTES_MAX = 8 * MIB


@pytest.fixture
def small() -> Iterator[Daemon]:
    with Daemon(ring_bytes=4 * MIB) as running:
        yield running.start()


def own_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def eight_clients(stage: Stage, path: Path, number: int) -> int:
    """Eight clients in one process, each with a put of its own, and views of everybody's."""
    clients = [tensord.Client(path, timeout_s=PATIENCE_S) for _ in range(8)]
    right = 0
    for at, client in enumerate(clients):
        mine = number * 8 + at
        right += client.put(key(mine), payload(mine, 8192), wait=True).state == "stored"
    stage.tell(right)
    stage.hear()
    held = []
    for client in clients:
        for other in range(64):
            lease = client.get(key(other))
            right += lease is not None and is_payload(lease.tree, other)
            held.append(lease)
    stage.tell(right)
    stage.hear()
    return right


def test_64_clients_at_once_are_all_served(small: Daemon) -> None:
    descriptors = small.descriptors()
    with ExitStack() as stack:
        children = [stack.enter_context(Child(eight_clients, small.socket, number)) for number in range(8)]
        assert [child.hear() for child in children] == [8] * 8
        assert small.status()["clients"] == 64
        for child in children:
            child.tell()
        assert [child.hear() for child in children] == [8 + 8 * 64] * 8
        assert small.status()["pins"] == 64 * 64
        for child in children[:4]:
            child.kill()
        small.until(lambda s: s["clients"] == 32 and s["pins"] == 32 * 64, "half of them to be gone")
        for child in children[4:]:
            child.tell()
            child.wait()
    small.until(lambda s: s["lanes"] == s["clients"] == s["inboxes"] == 0, "all to be gone")
    assert not small.lanes()
    until(lambda: small.descriptors() <= descriptors, "its descriptors to be closed")


def test_ten_thousand_clients_that_come_and_go_leave_nothing(small: Daemon) -> None:
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


def test_connections_that_say_nothing_or_never_attach_leave_nothing(small: Daemon) -> None:
    small.status()
    before = small.descriptors()
    for _ in range(300):
        RawClient(small.socket, attach=False).close()
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(str(small.socket))
    small.until(lambda s: s["clients"] == 0, "them to be gone")
    until(lambda: small.descriptors() <= before, "the daemon's descriptors to be closed")


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


@pytest.mark.parametrize("which", ["socket", "status_socket"])
def test_a_client_that_breaks_the_rules_gets_an_error_and_is_logged(small: Daemon, which: str) -> None:
    with socket.socket(socket.AF_UNIX) as rude:
        rude.settimeout(PATIENCE_S)
        rude.connect(str(getattr(small, which)))
        rude.sendall(b"\xc1 is no msgpack")
        assert b"BadMessage" in rude.recv(4096)
        assert rude.recv(4096) == b"", "and hung up on"
    until(lambda: "protocol error;" in small.log, "a line in the log")
    assert small.client().connected


def test_forty_clients_put_small_payloads_at_default_limits() -> None:
    with Daemon() as daemon:
        daemon.start()
        clients = [daemon.client() for _ in range(40)]
        for number, client in enumerate(clients):
            assert client.put(key(number), payload(number), wait=True).state == "stored"
        found = [client.get(key(39 - number)) for number, client in enumerate(clients)]
        assert all(lease is not None and is_payload(lease.tree, 39 - n) for n, lease in enumerate(found))
