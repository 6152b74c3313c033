"""Clients that are killed, never read, come and go, or flood: what was committed stays, and nothing is left."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

import tensord
from tensord.daemon.actors.queues import AT_ONCE
from tensord.ipc.messages import control as messages
from tensord.ipc.wire.blocking import BlockingChannel
from tensord.ipc.wire.connection import Connection
from tensord.shm.ring.layout import span_bytes

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from ..processes import Child, Stage
from .payloads import has, key, lap, payload
from .raw import RawClient

RING_BYTES = 4 * MIB


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(ring_bytes=RING_BYTES) as running:
        yield running.start()


@pytest.fixture
def with_one() -> Iterator[Daemon]:
    with Daemon(ring_bytes=RING_BYTES, policy="lru", limits_claim_s=30) as running:
        running.start()
        assert running.client().put(key(1), payload(1), wait=True).state == "stored"
        yield running


def writes_whole(stage: Stage, socket: Path, writes: str) -> None:
    client = RawClient(socket, writes=writes)
    (place,) = client.borrow(payload(2).nbytes + 64)
    stage.tell("ready")
    stage.hear()
    client.submit(key(2), place, client.write(place, payload(2)))
    stage.tell("sent")
    stage.hear()


@pytest.mark.parametrize("writes", ["in place", "inbox"])
def test_a_wholly_sent_put_is_kept_though_its_writer_was_killed(with_one: Daemon, writes: str) -> None:
    with Child(writes_whole, with_one.socket, writes) as writer:
        assert writer.hear() == "ready"
        with_one.pause()  # so that the writer is certainly dead before the daemon looks
        writer.tell()
        assert writer.hear() == "sent"
        writer.kill()
    with_one.resume()
    reader = with_one.client()
    until(lambda: reader.contains(key(2)), "the entry to show")
    assert has(reader, 2, verify=True)


def asks_and_never_reads(stage: Stage, socket: Path) -> None:
    client = RawClient(socket)
    sent = 0
    try:
        for number in range(100_000, 200_000):
            client.channel.send(messages.Touch(number, [key(1)] * (number % 10)), timeout_s=2.0)
            sent += 1
    except tensord.TensordError as error:
        stage.tell(error.code)
    stage.tell(sent)
    stage.hear()


def test_a_client_that_never_reads_its_answers_disturbs_nobody(with_one: Daemon) -> None:
    before = with_one.memory_bytes()
    with Child(asks_and_never_reads, with_one.socket) as rude:
        writer = with_one.client()
        lap(writer, RING_BYTES)
        assert rude.hear() in ("LimitReached", "TimedOut", "DaemonUnavailable")
        assert with_one.client().contains(key(1)) or writer.put(key(1), payload(1), wait=True).state == "stored"
        assert with_one.memory_bytes() - before < 64 * MIB


ATTACHES = 2_000
GROWTH_BYTES_MAX = 8 * MIB


def own_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_thousands_of_clients_that_come_and_go_leave_nothing(daemon: Daemon) -> None:
    def come_and_go(number: int) -> None:
        # Now and then one comes with an inbox, too.
        RawClient(daemon.socket, inbox_bytes=MIB if number % 50 == 0 else 0).close()

    for _ in range(200):
        RawClient(daemon.socket).close()
    daemon.until(lambda s: s["lanes"] == s["clients"] == 0, "the first to be gone")
    here, there, held = own_descriptors(), daemon.descriptors(), daemon.memory_bytes()
    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(come_and_go, range(ATTACHES)))) == ATTACHES
    daemon.until(lambda s: s["lanes"] == s["clients"] == s["inboxes"] == 0, "the last to be gone")
    until(lambda: daemon.descriptors() <= there, "the daemon's descriptors to be closed")
    # A client of an earlier test may look for its daemon still, with a socket for a moment.
    until(lambda: own_descriptors() <= here, "this process's descriptors to be closed")
    assert not daemon.lanes()
    assert daemon.memory_bytes() - held < GROWTH_BYTES_MAX


def churn(client: tensord.Client, first: int, how_many: int) -> None:
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
        churn(client, 0, 2000)
        held = daemon.memory_bytes()
        churn(client, 10_000, 4000)
        status = daemon.status()["store"]
        assert status["entries"] <= 512 and status["namespaces"] <= 513
        assert daemon.memory_bytes() - held < GROWTH_BYTES_MAX


FLOOD = 150


@contextmanager
def watching(daemon: Daemon) -> Iterator[BlockingChannel]:
    """A status connection that is told of every event from now on."""
    channel = BlockingChannel.connect(daemon.status_socket, PATIENCE_S, Connection.status_client())
    try:
        channel.send(messages.Watch(1), timeout_s=PATIENCE_S)
        channel.receive(PATIENCE_S)
        yield channel
    finally:
        channel.close()


def events_until(channel: BlockingChannel, **last: object) -> list[dict[str, object]]:
    """Events up to the one whose body has all of `last`."""
    found: list[dict[str, object]] = []
    while not found or any(found[-1].get(name) != value for name, value in last.items()):
        event, _ = channel.receive(PATIENCE_S)
        found.append(event.body)
    return found


@pytest.mark.parametrize("writes", ["in place", "inbox"])
def test_a_flood_of_puts_delays_another_clients_put_by_one_turn(daemon: Daemon, writes: str) -> None:
    with (
        RawClient(daemon.socket, writes=writes) as loud,
        RawClient(daemon.socket, writes=writes) as quiet,
        watching(daemon) as watch,
    ):
        (large,), (small,) = loud.borrow(60_000), quiet.borrow(64)
        daemon.pause()
        for number in range(FLOOD):
            at = large._replace(offset=large.offset + number * span_bytes(64))
            loud.submit(key(number), at, loud.write(at, bytes(32)))
        quiet.submit(key(5000), small, quiet.write(small, bytes(32)))
        daemon.resume()
        before = events_until(watch, event="put", key=key(5000).hex())
        assert sum(event["event"] == "put" for event in before) <= AT_ONCE + 1
        assert loud.until_settled(FLOOD) is None


def test_a_backlog_of_puts_that_wait_for_room_delays_another_clients_put_by_one_a_turn(daemon: Daemon) -> None:
    full = daemon.client(name="full")
    for number in range(70):
        assert full.put(key(number), payload(number, 60_000), wait=True).state == "stored"
    with RawClient(daemon.socket, writes="in place") as loud, RawClient(daemon.socket, writes="in place") as quiet:
        daemon.pause()
        for number in range(60):
            loud.channel.send(messages.AskForGrants(1000 + number, [span_bytes(60_064)]), timeout_s=PATIENCE_S)
        quiet.channel.send(messages.AskForGrants(1000, [span_bytes(60_064)]), timeout_s=PATIENCE_S)
        daemon.resume()
        (place,) = quiet.lent(quiet.hear())
        assert quiet.until_settled(quiet.submit(key(5000), place, quiet.write(place, payload(8, 60_000)))) is None
        for number in range(60):
            (place,) = loud.lent(loud.hear())
            stored = loud.submit(key(1000 + number), place, loud.write(place, payload(7, 60_000)))
        assert loud.until_settled(stored) is None
        assert daemon.store("puts")["stored"] == 131
