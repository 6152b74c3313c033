"""kill -9 and SIGSTOP of clients and of the daemon: what was committed stays, what was not never shows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.client.core import link
from tensord.errors import DaemonUnavailable

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from ..processes import Child, Stage
from .payloads import Words, is_payload, key, lap, payload
from .raw import RawClient

RING_BYTES = 4 * MIB


@pytest.fixture
def small() -> Iterator[Daemon]:
    with Daemon(ring_bytes=RING_BYTES, policy="lru", limits_claim_s=30) as running:
        running.start()
        assert running.client().put(key(1), payload(1), wait=True).state == "stored"
        yield running


def as_before(daemon: Daemon, clients: int = 1) -> None:
    """Waits until only `clients` are left, and nothing of anybody else's."""
    daemon.until(
        lambda s: (
            s["clients"] == s["lanes"] == clients
            and not s["pins"]
            and not s["store"]["puts_in_flight"]
            and not s["store"]["claims_held"]
        ),
        "everything of the killed process to be gone",
    )
    assert len(daemon.lanes()) == clients


# ---- readers


def holds_views(stage: Stage, socket: Path, how_many: int) -> None:
    client = tensord.Client(socket, timeout_s=PATIENCE_S)
    held = [client.get(key(1)) for _ in range(how_many)]
    stage.tell(all(held))
    stage.hear()


def test_a_killed_readers_pins_are_gone(small: Daemon) -> None:
    with Child(holds_views, small.socket, 5) as reader:
        assert reader.hear() is True
        small.until(lambda s: s["pins"] == 5, "five pins")
        reader.kill()
        as_before(small)
    lap(small.client(), RING_BYTES, laps=2)
    assert not small.client().contains(key(1)), "what nobody pins makes room"


# ---- writers


def reserves(stage: Stage, socket: Path) -> None:
    client = tensord.Client(socket, timeout_s=PATIENCE_S)
    reserved = client.reserve(tensord.Spec((8192,), "uint64"))
    reserved.tree[:] = payload(2)
    stage.tell("filled")
    stage.hear()


def commits(stage: Stage, socket: Path, parts: int, sent: int) -> None:
    client = RawClient(socket, inbox_bytes=MIB)
    stage.tell("ready")
    stage.hear()
    client.begin(key(2), payload(2), parts=parts, sent=sent)
    stage.tell("sent")
    stage.hear()


def test_a_writer_killed_before_its_commit_leaves_nothing(small: Daemon) -> None:
    used = small.store("used_bytes")
    inboxes = small.status()["inboxes_bytes"]
    with Child(reserves, small.socket) as writer:
        assert writer.hear() == "filled"
        small.until(lambda s: s["inboxes_bytes"] > inboxes, "its inbox")
        writer.kill()
        as_before(small)
    small.until(lambda s: s["inboxes_bytes"] == inboxes, "its inbox to be unmapped")
    assert small.store("used_bytes") == used
    assert not small.client().contains(key(2))


@pytest.mark.parametrize("sent", [0, 1])
def test_a_half_sent_put_never_shows_and_its_span_is_freed(small: Daemon, sent: int) -> None:
    used = small.store("used_bytes")
    with Child(commits, small.socket, 2, sent) as writer:
        assert writer.hear() == "ready"
        writer.tell()
        assert writer.hear() == "sent"
        # It has its span from its first part on, which the daemon may handle a moment after the Commit.
        small.until(
            lambda s: s["store"]["puts_in_flight"] == 1 and (not sent or s["store"]["used_bytes"] > used),
            "the put to begin",
        )
        assert sent or small.store("used_bytes") == used
        assert not small.client().contains(key(2))
        writer.kill()
    small.until(lambda s: s["store"]["used_bytes"] == used and not s["store"]["puts_in_flight"], "its span to go")
    assert small.store("puts")["aborted"] == 1
    assert not small.client().contains(key(2))
    assert small.client().put(key(2), payload(2), wait=True).state == "stored"


@pytest.mark.parametrize("parts", [1, 2])
def test_a_wholly_sent_put_is_kept_though_its_writer_was_killed(small: Daemon, parts: int) -> None:
    with Child(commits, small.socket, parts, parts) as writer:
        assert writer.hear() == "ready"
        small.pause()  # so that the writer is certainly dead before the daemon looks
        writer.tell()
        assert writer.hear() == "sent"
        writer.kill()
    small.resume()
    reader = small.client()
    until(lambda: reader.contains(key(2)), "the entry to show")
    lease = reader.get(key(2), verify=True)
    assert lease is not None and is_payload(lease.tree, 2)


def puts_for_ever(stage: Stage, socket: Path, seed: int) -> None:
    client, random = tensord.Client(socket, timeout_s=PATIENCE_S), Random(seed)
    stage.tell("putting")
    while True:
        number = random.randrange(100, 140)
        client.put(key(number), payload(number, 8 * random.randrange(1, 1 << 16)))
        if random.random() < 0.3:
            client.evict(key(random.randrange(100, 140)))


def stored_more_than(daemon: Daemon, puts: int) -> bool:
    return bool(daemon.store("puts")["stored"] > puts)


def test_every_entry_of_a_writer_killed_at_random_is_complete(small: Daemon) -> None:
    reader = small.client()
    found = 0
    for round_ in range(6):
        with Child(puts_for_ever, small.socket, round_) as writer:
            assert writer.hear() == "putting"
            enough = small.store("puts")["stored"] + 7 * round_
            until(partial(stored_more_than, small, enough), "some puts")
            writer.kill()
        small.until(lambda s: not s["store"]["puts_in_flight"] and s["lanes"] == s["clients"], "its puts to end")
        for number in range(100, 140):
            lease = reader.get(key(number), verify=True)
            if lease is not None:
                assert is_payload(lease.tree, number)
                found += 1
            del lease
    assert found
    assert small.store("found_corrupt") == 0


def test_an_array_written_to_after_its_commit_never_reaches_another_key() -> None:
    # The inbox is small, so that the puts below would soon be given the array's bytes if they were free.
    with Daemon(ring_bytes=RING_BYTES, policy="lru", limits_inbox_bytes_max=MIB) as daemon:
        client = daemon.start().client()
        reserved = client.reserve(tensord.Spec((8192,), "uint64"))
        kept = reserved.tree
        kept[:] = payload(2)
        assert reserved.commit(key(2), wait=True).state == "stored"
        done = threading.Event()

        def scribble(array: Words) -> None:
            while not done.is_set():
                array[:] = 0xBAD

        scribbler = threading.Thread(target=scribble, args=(kept,))
        scribbler.start()
        try:
            for number in range(3, 200):
                assert client.put(key(number), payload(number), wait=True).state == "stored"
                lease = client.get(key(number))
                assert lease is not None and is_payload(lease.tree, number)
                first = client.get(key(2))
                assert first is None or is_payload(first.tree, 2)
        finally:
            done.set()
            scribbler.join()
            del scribbler
        inbox = client._link.puts.inboxes.current
        assert inbox is not None and inbox.used_bytes, "the array still holds its part of the inbox"
        del kept
        until(lambda: not inbox.used_bytes, "the part to be free once the array is gone")


# ---- stopped clients


def stands_still(stage: Stage, socket: Path) -> None:
    client = tensord.Client(socket, timeout_s=PATIENCE_S)
    lease = client.get(key(1))
    assert lease is not None
    stage.tell("holding")
    stage.hear()
    stage.tell((is_payload(lease.tree, 1), client.put(key(2), payload(2), wait=True).state))


def test_a_stopped_client_keeps_its_pins_and_disturbs_nobody(small: Daemon) -> None:
    with Child(stands_still, small.socket) as stopped:
        assert stopped.hear() == "holding"
        stopped.pause()
        writer = small.client()
        lap(writer, RING_BYTES, laps=20)
        assert small.status()["pins"] == 1
        assert writer.contains(key(1)), "what is pinned is not evicted"
        stopped.resume()
        stopped.tell()
        assert stopped.hear() == (True, "stored")


def asks_and_never_reads(stage: Stage, socket: Path) -> None:
    from tensord.ipc import messages

    client = RawClient(socket)
    sent = 0
    try:
        for number in range(100_000, 200_000):
            client.channel.send(messages.Touch(number, [key(1)] * 1000), timeout_s=2.0)
            sent += 1
    except tensord.TensordError as error:
        stage.tell(error.code)
    stage.tell(sent)
    stage.hear()


def test_a_client_that_never_reads_its_answers_disturbs_nobody(small: Daemon) -> None:
    before = small.memory_bytes()
    with Child(asks_and_never_reads, small.socket) as rude:
        writer = small.client()
        lap(writer, RING_BYTES, laps=5)
        assert rude.hear() in ("LimitReached", "TimedOut", "DaemonUnavailable")
        assert small.client().contains(key(1)) or writer.put(key(1), payload(1), wait=True).state == "stored"
        assert small.memory_bytes() - before < 64 * MIB


# ---- the daemon


def test_committed_entries_are_there_after_the_daemon_was_stopped_under_live_views(small: Daemon) -> None:
    client = small.client()
    for number in range(2, 12):
        assert client.put(key(number), payload(number), wait=True).state == "stored"
    held = client.get(key(1))
    assert small.terminate() == 0
    assert held is not None and is_payload(held.tree, 1)
    small.start()
    status = small.status()
    assert status["recovered"] and status["epoch"] == 2
    small.attached(client)
    fresh = small.client()
    for number in range(1, 12):
        for reader in (client, fresh):
            lease = reader.get(key(number), verify=True)
            assert lease is not None and is_payload(lease.tree, number)
    lease = None
    small.until(lambda s: s["pins"] == 1, "the view from before to be the only pin")
    lap(fresh, RING_BYTES, laps=20)
    assert is_payload(held.tree, 1)


def test_puts_wholly_sent_before_a_clean_stop_are_there_afterwards(small: Daemon) -> None:
    with RawClient(small.socket, inbox_bytes=MIB) as writer:
        small.pause()
        writer.begin(key(2), payload(2), parts=2, sent=2)
        small.terminate()
    small.start()
    reader = small.client()
    lease = reader.get(key(2), verify=True)
    assert lease is None or is_payload(lease.tree, 2)
    assert small.store("puts_in_flight") == 0


@pytest.mark.parametrize("size_bytes", [64 << 10, 3 * MIB])
def test_a_put_that_the_daemon_died_of_is_repeated_once_it_is_back(small: Daemon, size_bytes: int) -> None:
    client = small.client()
    assert client.put(key(9), payload(9), wait=True).state == "stored"
    small.pause()
    put = client.put(key(2), payload(2, size_bytes))
    assert put.state == "sent"
    small.kill()
    small.start()
    assert put.wait(PATIENCE_S).state == "stored", put
    lease = small.client().get(key(2), verify=True)
    assert lease is not None and is_payload(lease.tree, 2)


def test_a_put_that_waits_for_the_next_daemon_is_sent_soon_however_long_there_was_none(
    small: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = small.client()
    assert client.put(key(9), payload(9), wait=True).state == "stored"
    small.pause()
    put = client.put(key(2), payload(2))
    attempts: list[None] = []
    attach = client.link._attach

    def attached(protocol: int) -> Any:
        attempts.append(None)
        return attach(protocol)

    monkeypatch.setattr(client.link, "_attach", attached)
    monkeypatch.setattr(link, "_RETRY_MOST_S", 3600.0)
    small.kill()
    # Twice as long each time, it would come to the fifteenth after five minutes.
    until(lambda: len(attempts) > 15, "the client to ask for a daemon again and again")
    small.start()
    assert put.wait(PATIENCE_S).state == "stored", put


def test_a_streamed_put_that_the_daemon_died_of_is_lost_and_says_so() -> None:
    # A payload larger than the inbox never stands there as a whole, so there is nothing to send again.
    with Daemon(ring_bytes=RING_BYTES, policy="lru", limits_inbox_bytes_max=MIB, write_in_place="off") as daemon:
        client = daemon.start().client()
        assert client.put(key(9), payload(9), wait=True).state == "stored"
        daemon.pause()
        puts: list[tensord.Put] = []
        sender = threading.Thread(
            target=lambda: puts.append(client.put(key(2), payload(2, 3 * MIB), timeout_s=PATIENCE_S))
        )
        sender.start()
        until(lambda: len(client._link.puts.in_flight) == 1, "the put to begin")
        daemon.kill()
        sender.join(PATIENCE_S)
        assert puts[0].state == "lost"
        assert isinstance(puts[0].error, DaemonUnavailable)
        assert not client.contains(key(2))
        daemon.start()
        daemon.attached(client)
        assert client.put(key(2), payload(2, 3 * MIB), wait=True, timeout_s=PATIENCE_S).state == "stored"
        lease = client.get(key(2), verify=True)
        assert lease is not None and is_payload(lease.tree, 2)


def test_kill_9_of_the_daemon_at_any_moment_loses_no_entry_that_was_stored(small: Daemon) -> None:
    client = small.client()
    stored: set[int] = set()
    number = 100
    for round_ in range(4):
        killer = threading.Timer(0.01 * (round_ + 1), small.kill)
        killer.start()
        puts: dict[int, tensord.Put] = {}
        while killer.is_alive() and len(puts) < 40:
            number += 1
            puts[number] = client.put(key(number), payload(number, 16 << 10), timeout_s=PATIENCE_S)
        killer.join()
        small.start()
        small.attached(client)
        states = {n: put.wait(PATIENCE_S).state for n, put in puts.items()}
        assert set(states.values()) <= {"stored", "existed", "lost"}, states
        stored |= {n for n, state in states.items() if state != "lost"}
        for known in stored:
            lease = client.get(key(known), verify=True)
            assert lease is not None, f"entry {known} was lost in round {round_}"
            assert is_payload(lease.tree, known)
    assert stored


def test_a_client_started_before_the_daemon_finds_it(small: Daemon) -> None:
    small.terminate()
    client = tensord.Client(small.socket, timeout_s=PATIENCE_S)
    try:
        assert client.get(key(1)) is None and not client.connected
        small.start()
        assert client.wait_connected(PATIENCE_S)
        lease = client.get(key(1))
        assert lease is not None and np.array_equal(lease.tree, payload(1))
    finally:
        del lease
        client.close()


def test_puts_while_the_daemon_comes_back_are_stored_or_lost_and_never_refused(small: Daemon) -> None:
    client = small.client()
    assert client.put(key(9), payload(9), wait=True).state == "stored"
    back = threading.Event()
    puts: list[tensord.Put] = []

    def put_all_the_time() -> None:
        number = 1000
        while not back.is_set():
            put = client.put(key(number), payload(number, 512), timeout_s=PATIENCE_S)
            if put.state != "lost":
                number += 1
                puts.append(put)

    putting = threading.Thread(target=put_all_the_time)
    putting.start()
    try:
        small.kill()
        small.start()
        small.attached(client)
        before = len(puts)
        until(lambda: len(puts) > before + 20, "puts to go on")
    finally:
        back.set()
        putting.join(PATIENCE_S)
    states = {put.wait(PATIENCE_S).state for put in puts}
    assert states <= {"stored", "existed", "lost"}, [put for put in puts if put.state == "refused"][:3]
