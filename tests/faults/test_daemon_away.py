"""No daemon, none that we may use, or one that is stopped (SIGSTOP): errors say why, and clients do without it.

Which calls raise: test_what_raises.py. No call beside a stopped daemon has a time limit that the test could wait for:
one that waited for the daemon would never end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.client.link.absence import WORD_S
from tensord.errors import BadKey, DaemonUnavailable, TimedOut, UnsupportedLeaf

from ..daemon_process import MIB, PATIENCE_S, Daemon, some, until
from ..processes import python
from .payloads import cut, has, key, payload, with_place
from .test_what_raises import CLIENT_RAISES

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
        writer = some(client.link.puts.writer)
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


def test_a_first_use_without_a_daemon_warns_once_with_the_command_that_starts_one(tmp_path: Path) -> None:
    socket = tmp_path / "control.sock"
    client = f"tensord.Client({str(socket)!r})"
    script = f"import tensord\nfor _ in range(3):\n with {client} as c:\n  c.get(bytes(32)), c.put(bytes(32), 1)"
    told = python("-c", script).stderr
    assert told.count("\n") == 1
    assert f"no daemon at {socket}" in told
    assert "`systemctl start tensord`, or run `tensord`" in told
    assert "every lookup is a miss" in told


FOR_EVER_S = 1e6
NAMESPACE = tensord.Namespace(model="m", revision="r", dtype="f", processor="p")
TOKENS = np.arange(64, dtype=np.uint32)
AWAY, BACK = "has not answered", "answers again"


def left_without_an_answer(client: tensord.Client, number: int) -> None:
    """A miss, and the moment in which the client takes the daemon for away."""
    assert client.get_or_compute(key(number), lambda: number) == number
    until(lambda: not client.connected, "the client to take the daemon for away")


def changes(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [record.getMessage() for record in caplog.records if record.name == "tensord"]
    return [word for text in said for word in (AWAY, BACK) if word in text]


def test_misses_are_computed_hits_go_on_and_each_change_is_logged_once(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    client, other = (daemon.client(timeout_s=FOR_EVER_S) for _ in range(2))
    assert client.put(key(1), payload(1), wait=True).state == "stored"
    for _ in range(2):
        with daemon.stopped():
            for number in range(10, 20):
                assert client.get_or_compute(key(number), lambda number=number: number) == number  # type: ignore[misc]
            left_without_an_answer(client, 20)
            left_without_an_answer(other, 21)
            assert has(client, 1)
            assert client.get_or_compute(key(1), lambda: 0) is not None
        for each in (client, other):
            assert each.wait_connected(PATIENCE_S)
        assert client.put(key(2), payload(2), wait=True).state in ("stored", "existed")
        client.evict(*(key(number) for number in range(10, 22)))
    assert changes(caplog) == [AWAY, BACK] * 2


def test_calls_beside_a_silent_daemon_do_as_without_one(daemon: Daemon) -> None:
    client = daemon.client(timeout_s=FOR_EVER_S)
    prefixes = tensord.PrefixCache(client, NAMESPACE, block_tokens=16)
    layers = [tensord.NormalLayer(np.zeros((1, 1, len(TOKENS), 1)))]
    assert prefixes.put(TOKENS, layers, wait=True).state == "stored"
    with daemon.stopped():
        assert prefixes.match(TOKENS) is None, "nor does a match wait that is the first to ask"
        left_without_an_answer(client, 1)
        for name, call in CLIENT_RAISES.items():
            with pytest.raises(DaemonUnavailable, match="does not answer"):
                pytest.fail(f"{name} returned {call(client)}")
        put = client.put(key(2), payload(2), wait=True)
        assert put.state == "lost" and "does not answer" in str(put.error)
        assert [put.state for put in client.put_many([(key(3), 3), (key(4), 4)], wait=True)] == ["lost"] * 2
        assert client.put(key(5), np.zeros(4 << 20, np.uint8), wait=True).state == "lost"
        assert client.claim(key(6)).state == "alone"
        assert prefixes.match(TOKENS) is None and prefixes.put(TOKENS + 1, layers, wait=True).state == "lost"
        visual = tensord.VisualCache(client, NAMESPACE)
        assert visual.store("image", b"picture", np.zeros(3)).wait().state == "lost"
    assert client.wait_connected(PATIENCE_S)
    assert client.put(key(2), payload(2), wait=True).state == "stored"
    match = prefixes.match(TOKENS)
    assert match is not None and match.offset == len(TOKENS) - 1


def test_who_waits_for_another_ones_value_computes_it(daemon: Daemon) -> None:
    first, second = (daemon.client(timeout_s=FOR_EVER_S) for _ in range(2))
    go_on = threading.Event()
    computed: Future[Any] = Future()

    def compute() -> str:
        assert go_on.wait(PATIENCE_S)
        return "first"

    computing = threading.Thread(target=lambda: computed.set_result(first.get_or_compute(key(1), compute)))
    computing.start()
    daemon.until(lambda s: s["store"]["claims_held"], "the claim")
    waited: Future[Any] = Future()
    threading.Thread(target=lambda: waited.set_result(second.get_or_compute(key(1), lambda: "second"))).start()
    daemon.until(lambda s: s["store"]["claims_waiting"], "the other to wait")
    with daemon.stopped():
        assert waited.result(PATIENCE_S) == "second"
        go_on.set()
        assert computed.result(PATIENCE_S) == "first"
    computing.join(PATIENCE_S)


def test_only_the_first_client_of_a_process_waits_to_be_taken_in(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    with daemon.stopped():
        first = tensord.Client(daemon.socket, timeout_s=2 * WORD_S)
        until(lambda: isinstance(first.link.error, TimedOut), "the attempt to end")
        clients = [tensord.Client(daemon.socket, timeout_s=FOR_EVER_S) for _ in range(2)]
        for client in clients:
            assert client.get(key(1)) is None and client.get_or_compute(key(1), lambda: 1) == 1
            assert client.put(key(1), 1).state == "lost"
        with pytest.raises(DaemonUnavailable):
            tensord.Client(daemon.socket, timeout_s=FOR_EVER_S, required=True)
    for client in (first, *clients):
        assert client.wait_connected(PATIENCE_S)
        client.close()
    said = [record.getMessage() for record in caplog.records if record.name == "tensord"]
    assert len(said) == 2 and "Until it answers" in said[0] and BACK in said[1], said


def test_a_daemon_that_has_reason_to_let_a_request_wait_is_not_taken_for_away(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (daemon.client(timeout_s=FOR_EVER_S) for _ in range(2))
    caplog.set_level(logging.DEBUG, "tensord")
    claim = first.claim(key(1))
    claim.answer.result(PATIENCE_S)
    waiting = second.claim(key(1))
    until(lambda: waiting.state == "waiting", "the daemon's word")
    began = daemon.status()["uptime_s"]
    daemon.until(lambda s: s["uptime_s"] > began + 3, "more time than a silent daemon is given to pass")
    assert waiting.state == "waiting" and second.connected and not changes(caplog)
    claim.abandon()
    until(lambda: waiting.state == "compute", "the claim to be handed over")
