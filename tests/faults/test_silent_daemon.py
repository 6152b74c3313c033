"""A daemon that is stopped (SIGSTOP) keeps its connections and says nothing. Clients do without it until it answers.

No call here has a time limit that the test could wait for: one that waited for the daemon would never end.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.client.link.absence import WORD_S
from tensord.errors import DaemonUnavailable, TimedOut

from ..daemon_process import PATIENCE_S, Daemon, until
from .payloads import has, key, payload
from .test_what_raises import CLIENT_RAISES

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


def test_the_first_match_waits_no_longer_than_others(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody notices in time that the daemon is away.
    monkeypatch.setattr("tensord.client.link.absence.AWAY_S", FOR_EVER_S)
    client = daemon.client(timeout_s=FOR_EVER_S)
    with daemon.stopped():
        assert tensord.PrefixCache(client, NAMESPACE, block_tokens=16).match(TOKENS) is None


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
