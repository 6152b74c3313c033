"""What a worker promises wherever its KV cache lies: in host memory, and on a stand-in card with the ring registered,
with a ring that cannot be registered, and with no page-locked memory at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import SEEK_CUR
from typing import Any, BinaryIO

import numpy as np
import pytest

from tensord.client.reading.ring_mapping import Handle
from tensord.client.vllm.kv.copying import registered_ring
from tensord.shm.ring.layout import SPAN_HEADER_BYTES, SpanHeader

from ...client.device.standin import Accelerator
from ...daemon_process import MIB, Daemon, until
from .worker_stand import BLOCKS, STORED_BYTES, WorkerStand, key, whole_daemon

EDGES_BYTES = 4 << 10
"""Registrations so small that each chunk lies across several of them."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with whole_daemon() as daemon:
        yield daemon


def _card(lockable: bool = True, refusal: int = 0) -> Accelerator:
    card = Accelerator(8 * MIB)
    card.lockable, card.driver.refusal = lockable, refusal
    return card


@pytest.fixture(params=["host", "registered", "edges", "staged", "pageable"])
def stand(request: pytest.FixtureRequest, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerStand]:
    card = {
        "host": None,
        "registered": _card(),
        "edges": _card(),
        "staged": _card(refusal=801),
        "pageable": _card(lockable=False, refusal=801),
    }[request.param]
    if request.param == "edges":
        monkeypatch.setattr(registered_ring, "CHUNK_BYTES", EDGES_BYTES)
    with WorkerStand(daemon, card) as stand:
        yield stand
        if card is not None and request.param in ("registered", "edges"):
            assert card.driver.overlaps == 0
    assert card is None or not card.driver.ranges, "the driver still knows the ring"
    stand.daemon.until(lambda status: not status["pins"], "pins are given back")
    with daemon.client() as client:
        client.clear()


def test_blocks_come_back_as_they_were_stored(stand: WorkerStand) -> None:
    stand.keep([1, 2, 3], [[5, 9, 7, 3], [4, 8]])
    expected = [stand.blocks(0, [5, 9, 7, 3]), stand.blocks(1, [4, 8])]
    stand.write(2)
    job = stand.load([1, 2, 3], [[11, 12, 13, 14], [15, 16]])
    result = stand.finished(job)[job]
    assert result.success and result.transfer_size and result.transfer_size >= 4 * STORED_BYTES[0] + 2 * STORED_BYTES[1]
    assert stand.worker.take_failed() == set()
    assert stand.reported().done == {job: 1}
    assert np.array_equal(stand.blocks(0, [11, 12, 13, 14]), expected[0])
    assert np.array_equal(stand.blocks(1, [15, 16]), expected[1])


def test_only_the_blocks_that_were_asked_for_are_written(stand: WorkerStand) -> None:
    stand.keep([1, 2, 3], [[1, 2, 3, 4], [5, 6]])
    right, other = stand.blocks(0, [2, 3, 4]), stand.blocks(1, [6])
    # Block 0 stands for none: it is shared by all requests.
    stand.fetch([1, 2, 3], [[20, 0, 22], [23]], [1, 1])
    stand.reported()
    assert np.array_equal(stand.blocks(0, [20]), right[:1])
    assert np.array_equal(stand.blocks(0, [22]), right[2:])
    assert np.array_equal(stand.blocks(1, [23]), other)
    untouched = [number for number in range(BLOCKS) if number not in (20, 22)]
    assert not stand.blocks(0, untouched).any()
    assert not stand.blocks(1, range(BLOCKS - 1)).any()


def test_a_step_that_waited_for_a_store_may_write_the_blocks(stand: WorkerStand) -> None:
    stand.write(1)
    job = stand.store([1], [[6, 7], []])
    stand.worker.wait({job})
    expected = stand.blocks(0, [6, 7])
    stand.zero()
    stand.finished(job)
    stand.stored(1)
    stand.fetch([1], [[6, 7], []])
    stand.reported()
    assert np.array_equal(stand.blocks(0, [6, 7]), expected)


def test_stored_blocks_are_put_though_the_engine_takes_no_step_any_more(stand: WorkerStand) -> None:
    stand.store([1], [[6, 7], []])
    stand.stored(1)


def test_a_damaged_chunk_is_not_loaded_and_is_evicted(stand: WorkerStand) -> None:
    stand.keep([1, 2], [[1, 2, 3, 4], []])
    with _in_ring(stand, 2) as (memory, payload_bytes):
        memory.seek(SPAN_HEADER_BYTES + payload_bytes - 100, SEEK_CUR)
        memory.write(b"\xff" * 8)
    job = stand.fetch([1, 2], [[20, 21, 22, 23], []])
    assert stand.worker.take_failed() == {job}
    report = stand.reported()
    assert (report.failed, report.damaged) == ({job: {1}}, {key(2)})
    assert not stand.blocks(0, [22, 23]).any()
    until(lambda: not stand.client.contains(key(2)), "the damaged chunk is evicted")


def test_a_chunk_whose_checksum_nobody_has_taken_yet_is_loaded(stand: WorkerStand) -> None:
    """The daemon takes the checksum of a chunk over 128 KiB after it was stored."""
    stand.keep([1], [[1, 2], []])
    expected = stand.blocks(0, [1, 2])
    with _in_ring(stand, 1) as (memory, _):
        begin = memory.tell()
        header = SpanHeader.unpack(memory.read(SPAN_HEADER_BYTES))
        memory.seek(begin)
        memory.write(header.pack(checksum=0))
    stand.fetch([1], [[20, 21], []])
    assert stand.worker.take_failed() == set()
    stand.reported()
    assert np.array_equal(stand.blocks(0, [20, 21]), expected)


def test_a_chunk_that_is_gone_fails_its_load_alone(stand: WorkerStand) -> None:
    stand.keep([1], [[1, 2], []])
    bad = stand.load([1], [[20, 21, 22], []])
    good = stand.load([1], [[20, 21], []])
    assert all(result.success for result in stand.finished(bad, good).values())
    assert stand.worker.take_failed() == {bad}
    until(lambda: not stand._leases or stand.reported(), "all pins are given back")


@contextmanager
def _in_ring(stand: WorkerStand, number: int) -> Iterator[tuple[BinaryIO, int]]:
    """The ring's file at the beginning of a chunk's span, and the bytes of the chunk's payload."""
    lease = stand.client.get(key(number))
    assert lease is not None
    named: Any = Handle.unpack(lease.handle() or b"")
    (ring,) = [path for path in stand.daemon.segments() if path.name.endswith(".ring")]
    with ring.open("r+b") as memory:
        memory.seek(named.offset)
        yield memory, named.payload_bytes
