"""Connections that end again and again while puts are on their way leave nothing behind."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

import tensord

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from .payloads import is_payload, key, payload

LARGE_BYTES = MIB


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
