"""Puts: each payload of a batch has the outcome of a put of its own; and how much an entry is shared."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import tensord
from tensord.client.reading.ring_mapping import Handle
from tensord.errors import ObjectTooLarge, ParentGone
from tensord.shm.ring.layout import QUEUE_RECORDS, SPAN_CHECKSUM_AT, SPAN_HEADER_BYTES

from ..daemon_process import COUNTING_OFTEN, MIB, PATIENCE_S, Daemon, some, until
from ..faults.payloads import key, payload
from ..processes import Child, Stage


def items(numbers: range, size_bytes: int = 4096) -> list[tuple[bytes, Any]]:
    return [(key(number), payload(number, size_bytes)) for number in numbers]


def states(puts: list[tensord.Put]) -> list[str]:
    return [put.state for put in puts]


def test_a_checksum_that_is_left_to_the_daemon_is_made_while_it_is_idle() -> None:
    with Daemon(ring_bytes=64 * MIB) as daemon, daemon.start().client() as client:
        assert client.put(key(0), payload(0, 4 * MIB), wait=True).state == "stored"
        lease = some(client.get(key(0)))
        found = some(Handle.unpack(lease.handle() or b""))
        with daemon.segment("ring").open("rb", buffering=0) as ring:

            def checksum() -> int:
                return int.from_bytes(os.pread(ring.fileno(), 8, found.offset + SPAN_CHECKSUM_AT), "little")

            made = until(checksum, "the daemon to be idle")
            stored = os.pread(ring.fileno(), found.payload_bytes, found.offset + SPAN_HEADER_BYTES)
        assert made == xxhash.xxh3_64_intdigest(stored)


def test_each_put_has_its_own_outcome_in_the_order_of_the_items() -> None:
    with Daemon(ring_bytes=64 * MIB, limits_object_bytes_max=MIB) as daemon, daemon.start().client() as client:
        client.put(key(1), payload(1, 4096), wait=True)
        batch = items(range(4))
        batch[2] = (key(2), payload(2, 2 * MIB))
        puts = client.put_many(batch, wait=True)
        assert [put.key for put in puts] == [key(number) for number in range(4)]
        assert states(puts) == ["stored", "existed", "refused", "stored"]
        assert isinstance(puts[2].error, ObjectTooLarge)


@pytest.mark.parametrize("write_in_place", ["owner", "off"])
def test_more_payloads_are_put_than_have_room_in_the_queue_or_in_the_ring_at_once(write_in_place: str) -> None:
    with (
        Daemon(ring_bytes=64 * MIB, max_entries=8192, write_in_place=write_in_place) as daemon,
        daemon.start().client() as client,
    ):
        for batch in (items(range(QUEUE_RECORDS + 500), 64), items(range(5000, 5200), MIB // 2)):
            assert states(client.put_many(batch, wait=True, timeout_s=PATIENCE_S)) == ["stored"] * len(batch)


async def test_coroutines_put_chains_in_one_call(daemon: Daemon) -> None:
    async with tensord.AsyncClient(daemon.socket, timeout_s=PATIENCE_S) as client:
        *stored, refused = await client.put_many(items(range(3)), parents=[None, key(0), key(7)], wait=True)
    assert states(stored) == ["stored"] * 2 and isinstance(refused.error, ParentGone)


_numbers = count(1)


@pytest.fixture(scope="module")
def counts() -> Iterator[Daemon]:
    with Daemon(COUNTING_OFTEN) as running:
        yield running.start()


@pytest.fixture
def stored(counts: Daemon) -> Iterator[tuple[tensord.Client, bytes]]:
    """A client, and the key of an entry that nobody has used."""
    with tensord.Client(counts.socket, timeout_s=PATIENCE_S) as client:
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


def test_each_client_counts_once_and_only_while_it_holds(counts: Daemon, stored: tuple[tensord.Client, bytes]) -> None:
    client, wanted = stored
    with Child(holds, counts.socket, wanted) as first, Child(holds, counts.socket, wanted) as second:
        assert first.hear() == second.hear() == "holding"
        becomes(client, wanted, 2, 0)
        mine = some(client.hold(wanted))
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
    with Daemon(COUNTING_OFTEN) as daemon:
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
