"""A client that floods the daemon, of the same uid or of another, does not starve the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tensord.daemon.actors.queues import AT_ONCE
from tensord.ipc.messages import control as messages
from tensord.ipc.wire.blocking import BlockingChannel
from tensord.ipc.wire.connection import Connection
from tensord.shm.ring.layout import span_bytes

from ..daemon_process import MIB, PATIENCE_S, Daemon
from .payloads import key, payload
from .raw import RawClient

FLOOD = 900
RING_BYTES = 4 * MIB


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(ring_bytes=RING_BYTES) as running:
        yield running.start()


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
        for number in range(FLOOD // 6):
            at = large._replace(offset=large.offset + number * span_bytes(64))
            loud.submit(key(number), at, loud.write(at, bytes(32)))
        quiet.submit(key(5000), small, quiet.write(small, bytes(32)))
        daemon.resume()
        before = events_until(watch, event="put", key=key(5000).hex())
        assert sum(event["event"] == "put" for event in before) <= AT_ONCE + 1
        assert loud.until_settled(FLOOD // 6) is None


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
