"""How long entries stay, across restarts and whatever the wall clock says. Nothing here waits for a time to be up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.ipc.messages import control as messages
from tensord.shm.ring.layout import SPAN_HEADER_BYTES, SpanHeader

from ..daemon_process import Daemon, until
from .payloads import key

DAY_S = 86_400.0


def restart(daemon: Daemon) -> None:
    daemon.restart()


def kill_and_start(daemon: Daemon) -> None:
    daemon.kill()
    daemon.start()


def boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def header_of(daemon: Daemon, at: bytes) -> SpanHeader:
    """What stands before the only payload of the ring that is of this key."""
    ring = next(path for path in daemon.segments() if path.name.endswith(".ring"))
    content = ring.read_bytes()
    start = content.index(at) - 16
    assert content.find(at, start + SPAN_HEADER_BYTES) < 0
    return SpanHeader.unpack(content[start : start + SPAN_HEADER_BYTES])


def expires_unix_s(client: tensord.Client, at: bytes) -> float:
    entry = client.peek(at)
    assert entry is not None
    return entry.expires_unix_s


@pytest.mark.parametrize("again", [restart, kill_and_start])
def test_a_renewed_time_to_live_survives_a_restart(daemon: Daemon, again: Callable[[Daemon], None]) -> None:
    client = daemon.client()
    for number in (1, 2):
        assert client.put(key(number), np.arange(5), ttl_s=DAY_S, wait=True).state == "stored"
    assert client.put(key(3), np.arange(5), wait=True).state == "stored"
    touched_s = boot_s()
    until(lambda: boot_s() > touched_s, "the clock to move")
    assert client.touch(key(1), key(3)) == 2
    before = [header_of(daemon, key(number)) for number in (1, 2, 3)]
    assert before[0].expires_s >= touched_s + DAY_S > before[1].expires_s > 0
    assert before[2].expires_s == 0
    for _ in range(2):
        again(daemon)
        daemon.attached(client)
        # The daemon goes by what stands there, and has not changed it.
        assert [header_of(daemon, key(number)) for number in (1, 2, 3)] == before
        rows = {bytes.fromhex(row["key"]): row["expires_unix_s"] for row in entries(daemon)}
        assert rows[key(3)] is None
        apart_s = before[0].expires_s - before[1].expires_s
        assert rows[key(1)] - rows[key(2)] == pytest.approx(apart_s, abs=1e-4)
    # It is the time that the put asked for which is renewed, not what was left of it and more.
    assert client.touch(key(1)) == 1
    assert header_of(daemon, key(1)).expires_s <= boot_s() + DAY_S


def entries(daemon: Daemon) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = daemon.ask(messages.EntriesQuery)["entries"]
    return found


def test_gets_do_not_renew_the_time_to_live() -> None:
    with Daemon(default_ttl_s="1d") as daemon:
        client = daemon.start().client()
        assert client.put(key(1), np.arange(5), wait=True).state == "stored"
        before = header_of(daemon, key(1))
        assert before.expires_s >= before.created_s + DAY_S
        assert client.get(key(1)) is not None
        assert client.put(key(1), np.arange(5), wait=True).state == "existed"
        until(lambda: daemon.store("hits") == 1, "the daemon to hear of the get")
        (row,) = entries(daemon)
        assert row["uses"] == 2
        assert header_of(daemon, key(1)) == before
        kept = expires_unix_s(client, key(1))
        assert client.touch(key(1)) == 1
        assert expires_unix_s(client, key(1)) > kept
        assert header_of(daemon, key(1)).expires_s > before.expires_s
