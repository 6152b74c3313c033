"""Writers that are killed: what was committed stays, what was not never shows. And a client that never reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tensord

from ..daemon_process import MIB, Daemon, until
from ..processes import Child, Stage
from .payloads import has, key, lap, payload
from .raw import RawClient

RING_BYTES = 4 * MIB


@pytest.fixture
def small() -> Iterator[Daemon]:
    with Daemon(ring_bytes=RING_BYTES, policy="lru", limits_claim_s=30) as running:
        running.start()
        assert running.client().put(key(1), payload(1), wait=True).state == "stored"
        yield running


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
    assert has(reader, 2, verify=True)


def asks_and_never_reads(stage: Stage, socket: Path) -> None:
    from tensord.ipc.messages import control as messages

    client = RawClient(socket)
    sent = 0
    try:
        for number in range(100_000, 200_000):
            client.channel.send(messages.Touch(number, [key(1)] * (number % 10)), timeout_s=2.0)
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
