"""How much an entry is shared, as clients read it from the index: by a real daemon's count."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest

import tensord

from ..daemon_process import COUNTING_OFTEN, PATIENCE_S, Daemon, until
from ..memory_bench import key
from ..processes import Child, Stage

_numbers = count(1)


def counting() -> Daemon:
    daemon = Daemon()
    daemon.constants = COUNTING_OFTEN
    return daemon


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    with counting() as running:
        yield running.start()


@pytest.fixture
def stored(shared: Daemon) -> Iterator[tuple[tensord.Client, bytes]]:
    """A client, and the key of an entry that nobody has used."""
    with tensord.Client(shared.socket, timeout_s=PATIENCE_S) as client:
        wanted = key(next(_numbers))
        assert client.put(wanted, {"x": np.arange(9)}, wait=True).state == "stored"
        assert shares(client, wanted) == (0, 0)
        yield client, wanted


def shares(client: tensord.Client, wanted: bytes) -> tuple[int, int] | None:
    entry = client.peek(wanted)
    return None if entry is None else (entry.holders, entry.uses)


def becomes(client: tensord.Client, wanted: bytes, holders: int, uses: int) -> None:
    until(lambda: shares(client, wanted) == (holders, uses), f"{uses} uses and {holders} holders to be told")


def holds(stage: Stage, socket: Path, wanted: bytes) -> None:
    """Holds the entry twice, until it is told otherwise."""
    client = tensord.Client(socket, timeout_s=PATIENCE_S)
    held = [client.hold(wanted), client.hold(wanted)]
    assert all(lease is not None for lease in held)
    stage.tell("holding")
    stage.hear()
    held.clear()
    stage.tell("released")
    stage.hear()


def test_each_client_counts_once_and_only_while_it_holds(shared: Daemon, stored: tuple[tensord.Client, bytes]) -> None:
    client, wanted = stored
    with Child(holds, shared.socket, wanted) as first, Child(holds, shared.socket, wanted) as second:
        assert first.hear() == second.hear() == "holding"
        becomes(client, wanted, 2, 0)
        mine = client.hold(wanted)
        assert mine is not None
        view = mine.tree["x"][3:]
        becomes(client, wanted, 3, 0)
        first.tell()
        assert first.hear() == "released"
        becomes(client, wanted, 2, 0)
        second.kill()
        becomes(client, wanted, 1, 0)
        del mine
        client.get_many([wanted]).release()
        becomes(client, wanted, 1, 1)
        assert view[0] == 3
        del view
        becomes(client, wanted, 0, 1)
    assert client.evict(wanted) == 1 and client.peek(wanted) is None
    assert client.put(wanted, np.arange(3), wait=True).state == "stored"
    assert shares(client, wanted) == (0, 0), "an entry begins anew"


@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_a_restarted_daemon_goes_on_counting(end: str) -> None:
    with counting() as daemon:
        client = daemon.start().client()
        for number in (1, 2):
            assert client.put(key(number), np.arange(9), wait=True).state == "stored"
        kept = client.get(key(1))
        dropped = client.get(key(2))
        assert kept is not None and dropped is not None
        becomes(client, key(1), 1, 1)
        becomes(client, key(2), 1, 1)
        getattr(daemon, end)()
        dropped.release()
        daemon.start()
        daemon.attached(client)
        assert client.get(key(2)) is not None
        becomes(client, key(2), 0, 2)
        # Were the log counted twice, there would be more uses, and never fewer again.
        becomes(client, key(1), 1, 1)
        kept.release()
        becomes(client, key(1), 0, 1)
