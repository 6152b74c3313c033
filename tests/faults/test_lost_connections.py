"""A connection ends while puts are on their way: no key ever gets another put's bytes, however late the daemon reads.

The daemon is stopped by SIGSTOP meanwhile. When it goes on it carries out the puts of the old connection, out of the
ring or the inbox as it then stands.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tensord

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from ..processes import Child, Stage
from .payloads import Words, is_payload, key, payload, with_place

FIRST, SECOND = 1, 2
LARGE_BYTES, SMALL_BYTES = MIB, 64 << 10


@pytest.fixture(params=["owner", "off"])
def one(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    # Ahead of need a client has at most 1/64 of the ring: here four of the large places.
    with Daemon(ring_bytes=256 * MIB, policy="lru", write_in_place=request.param) as running:
        yield running.start()


def cut(client: tensord.Client) -> None:
    """The connection ends, and the client knows it."""
    channel = client._link.attachment.channel
    assert channel is not None
    channel._sock.shutdown(socket.SHUT_RDWR)
    until(lambda: client._link.attachment.channel is not channel, "the client to notice")


def forked_under_a_lease(client: tensord.Client) -> None:
    """A fork with a live view gives the connection up."""
    channel = client._link.attachment.channel
    forked = os.fork()
    if not forked:
        os._exit(0)
    os.waitpid(forked, 0)
    until(lambda: client._link.attachment.channel is not channel, "the client to notice")


def puts(client: tensord.Client) -> Any:
    """They do not wait for the next connection, which the daemon does not take yet."""
    small, large = payload(SECOND, SMALL_BYTES), payload(3, LARGE_BYTES)
    return client.put(key(SECOND), small, timeout_s=0.0), client.put(key(3), large, timeout_s=0.0)


def reserves(client: tensord.Client) -> Any:
    reserved = client.reserve(tensord.Spec((LARGE_BYTES // 8,), "uint64"))
    reserved.tree[:] = payload(SECOND, LARGE_BYTES)
    return reserved, reserved.commit(key(SECOND), timeout_s=0.0)


def matches(client: tensord.Client) -> Any:
    """A query is written to the inbox as well."""
    ns = tensord.Namespace(model="m", revision="r", dtype="f", processor="p")
    cache = tensord.PrefixCache(client, ns)
    return cache.match(list(range(100_000)))


def stands_still(
    stage: Stage, path: Path, size_bytes: int, loses: str, then: str
) -> tuple[str, bool, str, list[tuple[int, str]]]:
    """Puts while the daemon stands still; the connection ends; something else is written."""
    client = tensord.Client(path, timeout_s=PATIENCE_S)
    assert client.put(key(100), payload(100), wait=True).state == "stored"
    with_place(client, 200, size_bytes)
    lease = client.get(key(100))
    stage.tell("attached")
    stage.hear()
    first = client.put(key(FIRST), payload(FIRST, size_bytes))
    sent = first.state
    {"cut": cut, "fork": forked_under_a_lease}[loses](client)
    held = {"puts": puts, "reserves": reserves, "matches": matches}[then](client)
    stage.tell("written")
    stage.hear()
    state = first.wait(PATIENCE_S).state
    assert client.wait_connected(PATIENCE_S)
    again = client.put(key(4), payload(4, size_bytes), wait=True).state
    wrong = []
    for number in (FIRST, SECOND, 3, 4):
        found = client.get(key(number), verify=True)
        if found is not None and not is_payload(found.tree, number):
            wrong.append((number, "wrong"))
    del held, lease
    return sent, client.contains(key(FIRST)) or state == "lost", again, wrong


@pytest.mark.parametrize("then", ["puts", "reserves", "matches"])
@pytest.mark.parametrize("loses", ["cut", "fork"])
@pytest.mark.parametrize("size_bytes", [SMALL_BYTES, LARGE_BYTES], ids=["small", "large"])
def test_a_daemon_that_reads_late_finds_the_bytes_that_were_put(
    one: Daemon, size_bytes: int, loses: str, then: str
) -> None:
    with Child(stands_still, one.socket, size_bytes, loses, then) as child:
        assert child.hear() == "attached"
        one.pause()
        child.tell()
        try:
            assert child.hear() == "written"
        finally:
            one.resume()
        reader = one.client()
        until(lambda: reader.contains(key(FIRST)), "the first put to be carried out")
        found = reader.get(key(FIRST), verify=True)
        assert found is not None and is_payload(found.tree, FIRST)
        child.tell()
        sent, told, again, wrong = child.hear()
        assert (sent, told, again, wrong) == ("sent", True, "stored", [])


def test_a_reservation_outlives_a_lost_connection(one: Daemon) -> None:
    client = one.client(timeout_s=PATIENCE_S)
    reserved = client.reserve(tensord.Spec((8192,), "uint64"))
    put = client.put(key(FIRST), payload(FIRST))
    one.pause()
    other = client.put(key(SECOND), payload(SECOND))
    cut(client)
    reserved.tree[:] = payload(3)
    one.resume()
    assert client.wait_connected(PATIENCE_S)
    assert reserved.commit(key(3), wait=True).state == "stored"
    assert put.wait(PATIENCE_S).state in ("stored", "lost") and other.wait(PATIENCE_S).state == "lost"
    for number in (FIRST, SECOND, 3):
        found = client.get(key(number), verify=True)
        assert is_payload(found.tree, number) if found is not None else number != 3


def test_connections_that_are_lost_again_and_again_leave_no_inbox_behind(one: Daemon) -> None:
    client = one.client(timeout_s=PATIENCE_S)
    for lap in range(5):
        sent = [client.put(key(10 * lap + n), payload(10 * lap + n, LARGE_BYTES)) for n in range(3)]
        cut(client)
        assert client.wait_connected(PATIENCE_S)
        for put in sent:
            put.wait(PATIENCE_S)
        for n in range(3):
            found = client.get(key(10 * lap + n), verify=True)
            assert found is None or is_payload(found.tree, 10 * lap + n)
    assert client.put(key(99), payload(99, LARGE_BYTES), wait=True).state == "stored"
    inboxes = int(one.flags["write_in_place"] == "off")
    one.until(lambda s: (s["inboxes"], s["lanes"]) == (inboxes, 1), "no inbox but the current one")
    entries_bytes = (5 * 3 + 1) * (LARGE_BYTES + 4096)
    one.until(
        lambda s: s["store"]["used_bytes"] - s["store"]["lent_bytes"] <= entries_bytes,
        "the places of lost puts to be free",
    )


@pytest.mark.parametrize("size_bytes", [SMALL_BYTES, LARGE_BYTES], ids=["small", "large"])
def test_a_clean_stop_carries_out_and_answers_what_has_wholly_arrived(one: Daemon, size_bytes: int) -> None:
    client = one.client(timeout_s=PATIENCE_S)
    with_place(client, 200, size_bytes)
    one.pause()
    # The daemon finds the signal and the put at once.
    put = client.put(key(FIRST), payload(FIRST, size_bytes))
    assert put.state == "sent"
    assert one.terminate() == 0
    assert put.wait(PATIENCE_S).state == "stored"
    until(lambda: not client.connected, "the client to notice the end")
    one.start()
    one.attached(client)
    found = client.get(key(FIRST), verify=True)
    assert found is not None and is_payload(found.tree, FIRST)


def restarts(stage: Stage, path: Path) -> list[int]:
    """Puts of both sizes while the daemon is stopped and started; which keys show other bytes than their own."""
    client = tensord.Client(path, timeout_s=PATIENCE_S)
    number = 0
    stage.tell("attached")
    waiting: list[tuple[int, Words]] = []
    while number < 60:
        number += 1
        size_bytes = (SMALL_BYTES, LARGE_BYTES)[number % 2]
        client.wait_connected(PATIENCE_S)
        client.put(key(number), payload(number, size_bytes))
        waiting.append((number, payload(number, 8)))
    assert client.wait_connected(PATIENCE_S)
    client.put(key(99), payload(99), wait=True)
    wrong = []
    for number, _ in waiting:
        found = client.get(key(number), verify=True)
        if found is not None and not is_payload(found.tree, number):
            wrong.append(number)
    return wrong


def wait_for_a_put(daemon: Daemon, child: Child) -> None:
    before = daemon.store("put_bytes")
    until(lambda: daemon.store("put_bytes") != before or not child.silent(), "a put to be stored")


def test_a_daemon_that_is_stopped_and_started_in_the_middle_of_puts_shows_no_wrong_bytes(one: Daemon) -> None:
    with Child(restarts, one.socket) as child:
        assert child.hear() == "attached"
        ends: list[Callable[[], object]] = [one.terminate, one.kill, one.terminate]
        for end in ends:
            reader = one.client()
            wait_for_a_put(one, child)
            reader.close()
            end()
            one.start()
        assert child.hear() == []
