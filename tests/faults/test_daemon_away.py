"""No daemon, or none that we may use: errors say why. Which calls raise: test_what_raises.py."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

import tensord
from tensord.errors import BadKey, DaemonUnavailable, LimitReached, TimedOut, UnsupportedLeaf

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from .payloads import cut, has, key, payload, with_place

FOR_EVER_S = 10 * PATIENCE_S


CALLS: dict[str, Callable[[tensord.Client], str]] = {
    "put": lambda client: client.put(key(99), payload(99, MIB), timeout_s=FOR_EVER_S).state,
    "put and wait": lambda client: client.put(key(99), payload(99, MIB), wait=True, timeout_s=FOR_EVER_S).state,
    "put_many": lambda client: client.put_many([(key(99), payload(99, MIB))], timeout_s=FOR_EVER_S)[0].state,
    "commit": lambda client: client.reserve(tensord.Spec((MIB,), "uint8")).commit(key(99), timeout_s=FOR_EVER_S).state,
}


@pytest.mark.parametrize("goes", ["killed", "cut off", "given up"])
@pytest.mark.parametrize("way", CALLS)
def test_a_caller_that_waits_for_room_fails_at_once_when_the_daemon_ends(way: str, goes: str) -> None:
    with Daemon() as daemon:
        client = daemon.start().client(timeout_s=PATIENCE_S)
        assert client.put(key(100), payload(100), wait=True).state == "stored"
        writer = client.link.puts.writer
        assert writer is not None
        daemon.pause()
        outcome: Future[str] = Future()
        thread = threading.Thread(target=lambda: outcome.set_result(CALLS[way](client)), daemon=True)
        thread.start()
        until(lambda: writer.arena.waiting, "it to wait for a place")
        if goes == "killed":
            daemon.kill()
        elif goes == "given up":
            client.close()
        else:
            cut(client)
        assert outcome.result(PATIENCE_S) == "lost"


@pytest.mark.parametrize("there", [True, False])
def test_the_callers_mistakes_are_named_with_and_without_a_daemon(daemon: Daemon, there: bool) -> None:
    with tensord.Client(daemon.socket if there else daemon.folder / "nobody.sock", timeout_s=PATIENCE_S) as client:
        for wrong in (lambda: client.get(b"short"), lambda: client.put(b"short", 1)):
            with pytest.raises(BadKey, match="32"):
                wrong()
        with pytest.raises(UnsupportedLeaf):
            client.put(key(1), {"a": object()})


def test_required_raises_and_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnavailable, match=r"no daemon at .*nobody\.sock.*start it"):
        tensord.Client(tmp_path / "nobody.sock", required=True)


@pytest.mark.parametrize(
    "put",
    [
        lambda client: client.put(key(2), payload(2), wait=True),
        lambda client: client.put_many([(key(2), payload(2))], wait=True),
        lambda client: client.reserve(tensord.Spec((3,), "float32")).commit(key(2), wait=True),
    ],
    ids=["put", "put_many", "commit"],
)
def test_puts_that_a_daemon_has_not_answered_in_time_are_stored_after_all(
    daemon: Daemon, put: Callable[[tensord.Client], object]
) -> None:
    client = daemon.client(timeout_s=0.5)
    with_place(client, 1, payload(2).nbytes + 1024)
    with daemon.stopped(), pytest.raises(TimedOut, match=r"not acknowledged within 0\.5 s"):
        put(client)
    until(lambda: client.contains(key(2)), "what was put to be stored after all")


def test_over_clients_max_a_client_gets_an_error_with_the_limit_and_the_others_are_not_disturbed() -> None:
    with Daemon(limits_clients_max=2) as daemon:
        first = daemon.start().client()
        assert first.put(key(1), payload(1), wait=True).state == "stored"
        second = daemon.client()
        for _ in range(30):
            with pytest.raises(LimitReached, match=r"clients_max is 2.*raise it"):
                tensord.Client(daemon.socket, required=True, timeout_s=PATIENCE_S)
        assert first.connected and second.connected
        assert has(second, 1)
        second.close()
        third = daemon.client()
        assert third.contains(key(1))


def test_a_first_use_without_a_daemon_warns_once_with_the_command_that_starts_one(tmp_path: Path) -> None:
    socket = tmp_path / "control.sock"
    client = f"tensord.Client({str(socket)!r})"
    script = f"import tensord\nfor _ in range(3):\n with {client} as c:\n  c.get(bytes(32)), c.put(bytes(32), 1)"
    command = [sys.executable, "-c", script]
    told = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stderr
    assert told.count("\n") == 1
    assert f"no daemon at {socket}" in told
    assert "`systemctl start tensord`, or run `tensord`" in told
    assert "every lookup is a miss" in told
