"""No daemon, or none that we may use: reads miss, puts are lost and say why, nothing raises but what was asked to."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.errors import (
    BadKey,
    DaemonUnavailable,
    LimitReached,
    SocketForbidden,
    TensordError,
    TimedOut,
    Unavailable,
    UnsupportedLeaf,
    VersionMismatch,
)
from tensord.ipc import messages
from tensord.ipc.blocking import BlockingChannel
from tensord.ipc.schema import PROTOCOL_VERSION

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from ..processes import Child, Stage
from .payloads import is_payload, key, payload

NOBODY = 65534
FOR_EVER_S = 10 * PATIENCE_S


def told_by(script: str, socket: Path) -> str:
    """The standard error of a program of its own."""
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys, tensord\nsocket = sys.argv[1]\n{script}", str(socket)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return ended.stderr


def never_starts(folder: Path) -> tensord.Client:
    return tensord.Client(folder / "nobody.sock", timeout_s=0.5)


def has_gone(daemon: Daemon) -> tensord.Client:
    client = daemon.client()
    assert client.put(key(9), payload(9), wait=True).state == "stored"
    daemon.interrupt()
    until(lambda: not client.connected, "the client to notice")
    return client


def is_closed(daemon: Daemon) -> tensord.Client:
    client = daemon.client()
    client.close()
    return client


@pytest.fixture(params=["never started", "gone", "client closed"])
def away(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[tensord.Client]:
    """A client without a daemon."""
    if request.param == "never started":
        client = never_starts(daemon.folder)
    else:
        client = has_gone(daemon) if request.param == "gone" else is_closed(daemon)
    yield client
    client.close()


def test_reads_miss(away: tensord.Client) -> None:
    assert away.get(key(1)) is None
    assert away.get(key(1), verify=True) is None
    assert list(away.get_many([key(1), key(2)])) == [None, None]
    assert not away.contains(key(1))
    assert away.peek(key(1)) is None
    assert not away.get_into(key(1), np.zeros(3))
    assert not away.connected


@pytest.mark.parametrize("wait", [False, True])
def test_puts_are_lost_and_say_why(away: tensord.Client, wait: bool) -> None:
    put = away.put(key(1), payload(1), wait=wait)
    assert put.wait(PATIENCE_S).state == "lost"
    assert isinstance(put.error, Unavailable)
    assert str(put.error)


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
            channel = client._link.attachment.channel
            assert channel is not None
            channel._sock.shutdown(socket.SHUT_RDWR)
        assert outcome.result(PATIENCE_S) == "lost"


def test_a_client_that_is_closed_while_it_connects_does_not_wait_for_a_stopped_daemon(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = tensord.Client(daemon.socket, timeout_s=FOR_EVER_S)
    connect, channel = BlockingChannel.connect, client.link.attachment.channel
    closing = threading.Thread(target=client.close, daemon=True)

    def connected(*args: Any) -> BlockingChannel:
        made = connect(*args)
        closing.start()
        until(lambda: client.link.closed, "the client to be closed")
        closing.join(0.1)
        return made

    daemon.pause()
    monkeypatch.setattr(BlockingChannel, "connect", connected)
    assert channel is not None
    channel.shut()
    until(lambda: client.link.closed, "the client to be closed")
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def test_a_call_without_a_daemon_raises_a_typed_error(away: tensord.Client) -> None:
    ns = tensord.Namespace(model="m", revision="r", dtype="f", processor="p")
    asked: list[Callable[[], object]] = [
        lambda: away.touch(key(1)),
        lambda: away.evict(key(1)),
        away.clear,
        lambda: away.invalidate(ns),
        lambda: away.pin(key(1), 1.0),
        lambda: away.unpin(key(1)),
    ]
    for ask in asked:
        with pytest.raises(Unavailable, match=r"daemon|closed"):
            ask()


def test_a_call_that_fails_keeps_nothing_of_its_callers(away: tensord.Client) -> None:
    kept = []

    def call() -> None:
        held = payload(1)
        kept.append(weakref.ref(held))
        away.put(key(1), held)
        with contextlib.suppress(Unavailable):
            away.touch(key(1))

    gc.disable()
    try:
        for _ in range(3):
            call()
    finally:
        gc.enable()
    assert all(ref() is None for ref in kept), "an error that is raised again keeps the frames of all its callers"


def test_a_reservation_is_not_to_be_had_or_its_commit_is_lost(away: tensord.Client) -> None:
    try:
        reserved = away.reserve(tensord.Spec((3,), "uint8"))
    except Unavailable:
        return
    assert reserved.commit(key(1), wait=True).state == "lost"


def test_the_callers_mistakes_are_named_with_and_without_a_daemon(away: tensord.Client) -> None:
    with pytest.raises(BadKey, match="32"):
        away.get(b"short")
    with pytest.raises(BadKey, match="32"):
        away.put(b"short", 1)
    with pytest.raises(UnsupportedLeaf):
        away.put(key(1), {"a": object()})


def test_required_raises_and_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnavailable, match=r"no daemon at .*nobody\.sock.*start it"):
        tensord.Client(tmp_path / "nobody.sock", required=True)


def test_status_without_a_daemon_says_so(tmp_path: Path) -> None:
    with tensord.Client(tmp_path / "nobody.sock") as client, pytest.raises(DaemonUnavailable, match="no daemon at"):
        client.status()


def test_a_client_finds_the_daemon_whenever_it_comes() -> None:
    with Daemon() as daemon, tensord.Client(daemon.socket, timeout_s=PATIENCE_S) as client:
        assert client.put(key(1), payload(1)).state == "lost"
        daemon.start()
        assert client.wait_connected(PATIENCE_S)
        assert client.put(key(1), payload(1), wait=True).state == "stored"
        assert client.contains(key(1))


# ---- a daemon that does not answer


def test_calls_on_a_daemon_that_stands_still_end_in_time(daemon: Daemon) -> None:
    client = daemon.client(timeout_s=1.0)
    assert client.put(key(1), payload(1), wait=True, timeout_s=PATIENCE_S).state == "stored"
    daemon.pause()
    try:
        lease = client.get(key(1))
        assert lease is not None and is_payload(lease.tree, 1)
        with pytest.raises(TimedOut, match=r"did not answer within 1 s"):
            client.touch(key(1))
        # Larger than the places that the client may have by now.
        assert client.put(key(2), payload(2, 1 << 20), wait=True).state == "lost"
        assert is_payload(client.get_or_compute(key(3), lambda: payload(3)), 3)
        with tensord.Client(daemon.socket, timeout_s=0.5) as newcomer:
            assert newcomer.get(key(1)) is None
            assert newcomer.put(key(1), payload(1)).state == "lost"
    finally:
        daemon.resume()
    assert client.wait_connected(PATIENCE_S)
    assert client.put(key(2), payload(2), wait=True, timeout_s=PATIENCE_S).state == "stored"


def test_puts_that_a_daemon_has_not_answered_in_time_are_stored_after_all(daemon: Daemon) -> None:
    client = daemon.client(timeout_s=0.5)
    for number in (1, 4, 5, 6):
        assert client.put(key(number), payload(number), wait=True, timeout_s=PATIENCE_S).state == "stored"
    daemon.pause()
    try:
        with pytest.raises(TimedOut, match="not acknowledged"):
            client.put(key(2), payload(2), wait=True)
    finally:
        daemon.resume()
    until(lambda: client.contains(key(2)), "what was put to be stored after all")


# ---- a socket that we may not use


def as_nobody(stage: Stage, path: Path) -> Any:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    answers: list[Any] = []
    with tensord.Client(path, timeout_s=PATIENCE_S) as client:
        answers.append(client.get(key(1)) is None)
        put = client.put(key(1), payload(1))
        answers.append((put.state, type(put.error).__name__))
    try:
        tensord.Client(path, required=True)
    except TensordError as error:
        answers.append((type(error).__name__, str(error)))
    return answers


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_a_user_without_access_to_the_socket_gets_its_owner_and_the_remedy(daemon: Daemon) -> None:
    daemon.folder.chmod(0o755)
    with Child(as_nobody, daemon.socket) as child:
        missed, put, (code, text) = child.hear()
    assert missed is True
    assert put == ("lost", SocketForbidden.__name__)
    assert code == SocketForbidden.__name__
    assert f"uid {NOBODY} may not use the socket {daemon.socket}" in text
    assert "uid 0" in text and "0660" in text and "set socket_group" in text and "usermod" not in text
    assert daemon.status()["clients"] == 0


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_another_user_who_is_let_in_shares_entries_and_cannot_write_to_the_ring() -> None:
    with Daemon(socket_mode="0666") as daemon:
        daemon.folder.chmod(0o755)
        daemon.start()
        with Child(shares_as_nobody, daemon.socket) as child:
            assert child.hear() == ("stored", True, ["PermissionError"] * 2)
        assert daemon.client().contains(key(1))


def shares_as_nobody(stage: Stage, path: Path) -> Any:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    from .raw import RawClient

    with tensord.Client(path, timeout_s=PATIENCE_S) as client:
        state = client.put(key(1), payload(1), wait=True).state
        lease = client.get(key(1))
        right = lease is not None and is_payload(lease.tree, 1)
    refused = []
    with RawClient(path) as raw:
        for fd in raw.fds[:2]:
            try:
                os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR))
                refused.append("opened")
            except OSError as error:
                refused.append(type(error).__name__)
    return state, right, refused


# ---- a peer of another version


def test_another_protocol_version_is_refused_with_both_named(tmp_path: Path) -> None:
    with Child(speaks_version_99, tmp_path / "other") as other:
        assert other.hear() == "listening"
        with pytest.raises(VersionMismatch, match=rf"version 99.*client {PROTOCOL_VERSION}"):
            tensord.Client(tmp_path / "other", required=True, timeout_s=PATIENCE_S)


def speaks_version_99(stage: Stage, path: Path) -> None:
    from tensord.ipc.frames import pack
    from tensord.ipc.schema import ClientLimits

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(path))
        listening.listen()
        stage.tell("listening")
        while True:
            peer, _ = listening.accept()
            peer.recv(65536)
            peer.sendall(pack(messages.Welcome(1, 99, "9.9", "other", 1, ClientLimits())))


def test_over_clients_max_a_client_gets_an_error_with_the_limit_and_the_others_are_not_disturbed() -> None:
    with Daemon(limits_clients_max=2) as daemon:
        first = daemon.start().client()
        assert first.put(key(1), payload(1), wait=True).state == "stored"
        second = daemon.client()
        for _ in range(30):
            with pytest.raises(LimitReached, match=r"clients_max is 2.*raise it"):
                tensord.Client(daemon.socket, required=True, timeout_s=PATIENCE_S)
        assert first.connected and second.connected
        lease = second.get(key(1))
        assert lease is not None and is_payload(lease.tree, 1)
        second.close()
        third = daemon.client()
        assert third.contains(key(1))


def test_a_first_use_without_a_daemon_warns_once_with_the_command_that_starts_one(tmp_path: Path) -> None:
    script = (
        "for _ in range(3):\n with tensord.Client(socket) as client:\n  client.get(bytes(32)), client.put(bytes(32), 1)"
    )
    told = told_by(script, tmp_path / "control.sock")
    assert told.count("\n") == 1
    assert f"no daemon at {tmp_path / 'control.sock'}" in told
    assert "`systemctl start tensord`, or run `tensord`" in told
    assert "every lookup is a miss" in told


def test_a_process_is_warned_of_each_socket_without_a_daemon(tmp_path: Path) -> None:
    script = "for name in ('a', 'b', 'a', 'b'):\n with tensord.Client(socket + name) as client: client.get(bytes(32))"
    told = told_by(script, tmp_path / "control.sock")
    assert told.count("\n") == 2
    assert "control.socka (" in told and "control.sockb (" in told


def test_a_client_that_requires_a_daemon_raises_and_does_not_warn(tmp_path: Path) -> None:
    script = "try:\n tensord.Client(socket, required=True)\nexcept tensord.errors.DaemonUnavailable: pass"
    assert told_by(script, tmp_path / "control.sock") == ""


def test_a_client_whose_daemon_goes_does_not_warn(daemon: Daemon) -> None:
    script = (
        "import os, signal\n"
        "client = tensord.Client(socket)\n"
        "os.kill(client.status()['pid'], signal.SIGKILL)\n"
        "while client.link.error is None: pass\n"
        "client.put(bytes(32), 1)"
    )
    assert told_by(script, daemon.socket) == ""
