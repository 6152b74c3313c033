"""What one process lends another by a handle alone stays right, whatever becomes of the entry and of the daemon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tensord

from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from ..processes import Child, Stage
from .payloads import is_payload, key, lap, payload

RING_BYTES = 2 * MIB
LENT = 1


@pytest.fixture(params=["an array", "a tree"])
def lent(request: pytest.FixtureRequest) -> Iterator[tuple[Daemon, tensord.Client, bytes, list[Any]]]:
    """A daemon, the lender's client, its handle, and what it holds for it: a view and nothing else."""
    with Daemon(ring_bytes=RING_BYTES, policy="lru") as daemon:
        client = daemon.start().client()
        tree = payload(LENT) if request.param == "an array" else {"x": payload(LENT), "y": "text"}
        assert client.put(key(LENT), tree, wait=True).state == "stored"
        lease = client.get(key(LENT))
        assert lease is not None
        handle = lease.handle()
        assert handle is not None
        held = [lease.tree if request.param == "an array" else lease.tree["x"]]
        del lease
        yield daemon, client, handle, held


def borrows(stage: Stage, socket: Path) -> None:
    """Borrows by the handles it hears, through the ring that it was attached to at first, and says what it sees."""
    client = tensord.Client(socket, timeout_s=PATIENCE_S)
    ring = client.ring()
    assert ring is not None
    stage.tell(ring.identity)
    while True:
        lease = ring.borrow(stage.hear())
        found = lease.tree if lease is not None else None
        found = found["x"] if isinstance(found, dict) else found
        stage.tell("nothing" if found is None else "right" if is_payload(found, LENT) else "wrong")


def evict(daemon: Daemon, client: tensord.Client) -> None:
    assert client.evict(key(LENT)) == 1


def kill(daemon: Daemon, client: tensord.Client) -> None:
    daemon.kill()


def start(daemon: Daemon, client: tensord.Client) -> None:
    daemon.start()
    daemon.attached(client)


def overwrite(daemon: Daemon, client: tensord.Client) -> None:
    writer = daemon.client()
    lap(writer, RING_BYTES, laps=20)
    writer.close()


def test_a_borrower_reads_what_its_lender_holds_after_anything(lent: tuple[Any, ...]) -> None:
    daemon, client, handle, held = lent
    with Child(borrows, daemon.socket) as borrower:
        assert borrower.hear() == handle[:16] == client.ring().identity
        for event in (evict, overwrite, kill, start, overwrite, kill, start, overwrite):
            event(daemon, client)
            borrower.tell(handle)
            assert borrower.hear() == "right", event.__name__
        with Child(borrows, daemon.socket) as late:
            assert late.hear() == handle[:16], "a restarted daemon's ring is the same ring"
            late.tell(handle)
            assert late.hear() == "right"
        held.clear()
        until(lambda: not daemon.status()["pins"], "the lender's pin to go")
        overwrite(daemon, client)
        borrower.tell(handle)
        assert borrower.hear() == "nothing", "a span that was reused is refused"


def test_a_ring_goes_on_when_its_client_is_attached_to_another(lent: tuple[Any, ...]) -> None:
    daemon, client, handle, held = lent
    with Child(borrows, daemon.socket) as borrower:
        assert borrower.hear() == handle[:16]
        daemon.interrupt()
        daemon.start()
        assert client.wait_connected(PATIENCE_S)
        until(lambda: client.ring().identity != handle[:16], "the client to be attached to the new ring")
        assert client.ring().borrow(handle) is None, "a new daemon's ring is another one"
        borrower.tell(handle)
        assert borrower.hear() == "right"
        assert is_payload(held[0], LENT)


def test_without_a_daemon_there_is_no_ring(tmp_path: Path) -> None:
    with tensord.Client(tmp_path / "nobody.sock", timeout_s=0.5) as client:
        assert client.ring() is None
        assert client.hold(key(LENT)) is None
