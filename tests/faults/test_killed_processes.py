"""kill -9 and SIGSTOP of clients and of the daemon: what was committed stays, what was not never shows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest

import tensord
from tensord.errors import DaemonUnavailable

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from ..processes import Child, Stage
from .payloads import Words, is_payload, key, lap, payload, with_place
from .raw import RawClient

RING_BYTES = 4 * MIB


@pytest.fixture
def small() -> Iterator[Daemon]:
    with Daemon(ring_bytes=RING_BYTES, policy="lru", limits_claim_s=30) as running:
        running.start()
        assert running.client().put(key(1), payload(1), wait=True).state == "stored"
        yield running


def as_before(daemon: Daemon, clients: int = 1) -> None:
    """Waits until only `clients` are left, each with a place for its next put, and nothing of anybody else's."""
    daemon.until(
        lambda s: (
            s["clients"] == s["lanes"] == clients
            and not s["pins"]
            and s["store"]["grants"] <= clients
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


def writes_half(stage: Stage, socket: Path, share: float) -> None:
    client = RawClient(socket, writes="in place")
    (place,) = client.borrow(payload(2).nbytes + 64)
    client.write(place, payload(2), share)
    stage.tell("half written")
    stage.hear()


def writes_whole(stage: Stage, socket: Path, writes: str) -> None:
    client = RawClient(socket, writes=writes)
    (place,) = client.borrow(payload(2).nbytes + 64)
    stage.tell("ready")
    stage.hear()
    client.submit(key(2), place, client.write(place, payload(2)))
    stage.tell("sent")
    stage.hear()


def test_a_writer_killed_before_its_commit_leaves_nothing(small: Daemon) -> None:
    used = small.store("used_bytes")
    with Child(reserves, small.socket) as writer:
        assert writer.hear() == "filled"
        writer.kill()
        as_before(small)
    assert small.store("used_bytes") == used
    assert not small.client().contains(key(2))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_half_sent_put_never_shows_and_its_span_is_freed(small: Daemon, share: float) -> None:
    used, grants = small.store("used_bytes"), small.store("grants")
    with Child(writes_half, small.socket, share) as writer:
        assert writer.hear() == "half written"
        assert small.store("grants") == grants + 1 and small.store("used_bytes") > used
        assert not small.client().contains(key(2))
        writer.kill()
    small.until(lambda s: (s["store"]["used_bytes"], s["store"]["grants"]) == (used, grants), "its place to go")
    assert not small.client().contains(key(2))
    assert small.client().put(key(2), payload(2), wait=True).state == "stored"


@pytest.mark.parametrize("writes", ["in place", "inbox"])
def test_a_wholly_sent_put_is_kept_though_its_writer_was_killed(small: Daemon, writes: str) -> None:
    with Child(writes_whole, small.socket, writes) as writer:
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
        small.until(lambda s: s["lanes"] == s["clients"], "its puts to end")
        for number in range(100, 140):
            lease = reader.get(key(number), verify=True)
            if lease is not None:
                assert is_payload(lease.tree, number)
                found += 1
            del lease
    assert found
    assert small.store("found_corrupt") == 0


def test_an_array_written_to_after_its_commit_never_reaches_any_key(small: Daemon) -> None:
    client = small.client()
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


@pytest.mark.parametrize("writes", ["in place", "inbox"])
def test_puts_wholly_sent_before_a_clean_stop_are_there_afterwards(small: Daemon, writes: str) -> None:
    with RawClient(small.socket, writes=writes) as writer:
        (place,) = writer.borrow(payload(2).nbytes + 64)
        small.pause()
        writer.submit(key(2), place, writer.write(place, payload(2)))
        small.terminate()
    small.start()
    reader = small.client()
    lease = reader.get(key(2), verify=True)
    assert lease is None or is_payload(lease.tree, 2)
    small.until(lambda s: not s["store"]["grants"] and not s["store"]["retired_bytes"], "its place to go")


@pytest.mark.parametrize("write_in_place", ["owner", "off"])
@pytest.mark.parametrize("size_bytes", [64 << 10, 3 * MIB])
def test_a_put_that_the_daemon_died_of_is_lost_and_says_so(write_in_place: str, size_bytes: int) -> None:
    # Ahead of need a client has at most 1/64 of the ring.
    with Daemon(ring_bytes=256 * size_bytes, policy="lru", write_in_place=write_in_place) as daemon:
        client = daemon.start().client()
        with_place(client, 9, size_bytes)
        daemon.pause()
        put = client.put(key(2), payload(2, size_bytes))
        assert put.state == "sent"
        daemon.kill()
        daemon.start()
        assert put.wait(PATIENCE_S).state == "lost"
        assert isinstance(put.error, DaemonUnavailable)
        daemon.attached(client)
        assert not client.contains(key(2))
        assert client.put(key(2), payload(2, size_bytes), wait=True).state == "stored"
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
