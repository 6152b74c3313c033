"""A client that floods the daemon, of the same uid or of another, does not starve the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tensord.ipc import messages
from tensord.ipc.blocking import BlockingChannel
from tensord.ipc.connection import Connection

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from .payloads import key, payload
from .raw import RawClient

FLOOD = 900


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(ring_bytes=4 * MIB) as running:
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


def test_a_backlog_of_requests_delays_another_clients_request_by_one_a_turn(daemon: Daemon) -> None:
    with RawClient(daemon.socket) as loud, RawClient(daemon.socket) as quiet, watching(daemon) as watch:
        daemon.pause()
        loud.channel.send(*(messages.RequestClaim(100 + n, key(n)) for n in range(FLOOD)), timeout_s=PATIENCE_S)
        quiet.channel.send(messages.RequestClaim(100, key(5000)), timeout_s=PATIENCE_S)
        daemon.resume()
        assert isinstance(quiet.hear(), messages.Claimed)
        before = events_until(watch, event="claim", key=key(5000).hex())
        # What was read of the flood before the loop came to the other connection, and no more.
        assert len(before) < FLOOD // 2
        claimed = [loud.hear() for _ in range(FLOOD)]
        assert [answer.id for answer in claimed] == list(range(100, 100 + FLOOD)), "each client's keep their order"


def test_commits_without_bytes_evict_nothing_and_the_next_client_puts_as_before(daemon: Daemon) -> None:
    other = daemon.client(name="other")
    for number in range(50):
        assert other.put(key(number), payload(number, 60_000), wait=True).state == "stored"
    with RawClient(daemon.socket, inbox_bytes=MIB) as raw:
        for number in range(64):
            raw.channel.send(messages.Commit(100 + number, key(100 + number), 60_000, 16), timeout_s=PATIENCE_S)
        daemon.until(lambda status: status["store"]["puts_announced"] == 64, "all of them to be announced")
        assert daemon.store("entries") == 50
        assert other.put(key(99), payload(99, 60_000), wait=True).state == "stored"
    daemon.until(lambda status: status["store"]["puts_in_flight"] == 0, "them to end with their client")
    assert sum(other.contains(key(number)) for number in range(50)) == 50


def test_a_backlog_of_puts_that_wait_for_room_delays_another_clients_put_by_one_a_turn(daemon: Daemon) -> None:
    full = daemon.client(name="full")
    for number in range(70):
        full.put(key(number), payload(number, 60_000), wait=True)
    with (
        RawClient(daemon.socket, inbox_bytes=MIB) as loud,
        RawClient(daemon.socket, inbox_bytes=MIB) as quiet,
        watching(daemon) as watch,
    ):
        daemon.pause()
        for number in range(60):
            loud.begin(key(1000 + number), payload(7, 60_000), parts=1, sent=1)
        quiet.begin(key(5000), payload(8, 60_000), parts=1, sent=1)
        daemon.resume()
        until(lambda: isinstance(quiet.hear(), messages.Committed), "the quiet client's put")
        before = events_until(watch, event="put", key=key(5000).hex())
        assert sum(event["event"] == "put" for event in before) < 30
        stored = 0
        while stored < 60:
            answer = loud.hear()
            stored += isinstance(answer, messages.Committed) and answer.outcome == "stored"
