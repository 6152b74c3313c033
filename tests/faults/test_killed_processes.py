"""kill -9 and SIGSTOP of clients and of the daemon: what was committed stays, what was not never shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tensord

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from ..processes import Child, Stage
from .payloads import is_payload, key, lap, payload
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
    lap(small.client(), RING_BYTES)
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
        lap(writer, RING_BYTES)
        assert small.status()["pins"] == 1
        assert writer.contains(key(1)), "what is pinned is not evicted"
        stopped.resume()
        stopped.tell()
        assert stopped.hear() == (True, "stored")


def asks_and_never_reads(stage: Stage, socket: Path) -> None:
    from tensord.ipc.messages import control as messages

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
        lap(writer, RING_BYTES)
        assert rude.hear() in ("LimitReached", "TimedOut", "DaemonUnavailable")
        assert small.client().contains(key(1)) or writer.put(key(1), payload(1), wait=True).state == "stored"
        assert small.memory_bytes() - before < 64 * MIB
