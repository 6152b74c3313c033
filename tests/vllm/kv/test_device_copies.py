"""Copies of a KV cache on a stand-in card: what may be read when, and what becomes of errors.

Owns: what only a card's copies promise. test_worker.py has what both kinds promise.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tensord.client.vllm.kv.copying import copies, host_memory, registered_ring
from tensord.client.vllm.kv.copying.registered_ring import RegisteredRing
from tensord.ipc.messages import control as messages
from tensord.testing.fake_stream import FakeStream

from ...client.device.standin import Accelerator
from ...daemon_process import MIB, RING_BYTES, Daemon, until
from ...faults.raw import RawClient
from .worker_stand import PER_CHUNK, STORED_BYTES, Array, WorkerStand, key, whole_daemon

CHUNK_BYTES = PER_CHUNK * STORED_BYTES[0]


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with whole_daemon() as daemon:
        yield daemon


@pytest.fixture
def card() -> Accelerator:
    return Accelerator(8 * MIB)


@pytest.fixture
def stand(daemon: Daemon, card: Accelerator) -> Iterator[WorkerStand]:
    with WorkerStand(daemon, card) as stand:
        yield stand


def loads(stand: WorkerStand) -> FakeStream:
    """The stream for loads."""
    stream: FakeStream = stand.copies._up.stream.belt  # type: ignore[union-attr]
    return stream


def ring(stand: WorkerStand) -> RegisteredRing:
    assert stand.copies.ring is not None
    return stand.copies.ring


def with_chunk(stand: WorkerStand, number: int) -> Array:
    """Stores a chunk of blocks 1 and 2; gives the blocks."""
    stand.keep([number], [[1, 2], []], seed=number)
    return stand.blocks(0, [1, 2])


def loaded(stand: WorkerStand, number: int) -> Array:
    stand.fetch([number], [[20, 21], []])
    stand.reported()
    return stand.blocks(0, [20, 21])


def from_ring(stand: WorkerStand) -> int:
    """Bytes copied from the ring without a buffer."""
    view = stand.worker._background.view
    assert stand.card is not None and view is not None
    begin = np.frombuffer(view.ring.mapping, np.uint8).ctypes.data
    return sum(size for source, _, size in stand.card.copied if begin <= source < begin + len(view.ring))


def test_pins_are_held_while_the_card_reads_the_ring(stand: WorkerStand) -> None:
    with_chunk(stand, 1)
    with loads(stand).hold():
        job = stand.load([1], [[20, 21], []])
        until(lambda: stand.worker._pending[job].queued.is_set(), "the copies are queued")
        assert stand.worker.get_finished() == []
        assert stand.worker.report() is None
        assert stand.daemon.status()["pins"] == 1
    stand.finished(job)
    assert stand.reported().done == {job: 1}


def test_a_sleep_waits_for_copies_of_the_kv_cache_that_it_frees(stand: WorkerStand, card: Accelerator) -> None:
    order: list[str] = []

    def settle() -> None:
        stand.worker.wait()
        order.append("settled")

    settling = threading.Thread(target=settle)
    with card.hold():
        stand.write(5)
        job = stand.store([1], [[1, 2], []])
        settling.start()
        settling.join(0.2)  # one that does not wait ends in that time
        order.append("copied")
    settling.join()
    assert order == ["copied", "settled"]
    stand.finished(job)


def test_a_ring_that_cannot_be_registered_is_read_through_a_buffer_and_said_once(
    stand: WorkerStand, card: Accelerator, caplog: pytest.LogCaptureFixture
) -> None:
    card.driver.refusal = 801
    expected = with_chunk(stand, 1)
    for _ in range(3):
        assert np.array_equal(loaded(stand, 1), expected)
    assert from_ring(stand) == 0
    assert card.driver.calls == 1
    assert caplog.text.count("cuMemHostRegister gave 801") == 1


@pytest.mark.parametrize(("bytes_max", "direct"), [(0, 0), (RING_BYTES - 1, 0), (RING_BYTES, CHUNK_BYTES)])
def test_no_more_than_the_setting_is_registered(daemon: Daemon, card: Accelerator, bytes_max: int, direct: int) -> None:
    with WorkerStand(daemon, card, registered_bytes_max=bytes_max) as stand:
        expected = with_chunk(stand, 1)
        assert np.array_equal(loaded(stand, 1), expected)
        assert from_ring(stand) == direct
        assert sum(card.driver.ranges.values()) <= bytes_max


def test_chunks_larger_than_the_buffers_are_loaded_in_parts(
    daemon: Daemon, card: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "LOAD_BYTES", 1)
    card.driver.refusal = 801
    with WorkerStand(daemon, card) as stand:
        stand.keep(range(1, 9), [range(1, 17), []])
        expected = stand.blocks(0, range(1, 17))
        stand.zero()
        # A buffer that is written again too early is read late.
        loads(stand).delay_s = 0.02
        stand.finished(stand.load(range(1, 9), [range(8, 24), []]))
        assert np.array_equal(stand.blocks(0, range(8, 24)), expected)
        assert sum(card.locked.values()) <= host_memory.SLAB_BYTES + copies.LOADS * STORED_BYTES[0]


def test_pages_that_the_daemon_gave_back_are_not_read_any_more(
    daemon: Daemon, card: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver keeps the pages that it registered, with the bytes that were there."""
    monkeypatch.setattr(registered_ring, "REST_S", 1e9)
    with WorkerStand(daemon, card) as stand:
        expected = with_chunk(stand, 1)
        assert np.array_equal(loaded(stand, 1), expected)
        assert card.driver.ranges
        _limit(daemon, 4 * MIB)
        daemon.until(lambda status: status["store"]["resident_bytes"] <= 4 * MIB, "pages were given back")
        until(lambda: not card.driver.ranges, "the driver gives the pages back too")
        copied = from_ring(stand)
        expected = with_chunk(stand, 2)
        assert np.array_equal(loaded(stand, 2), expected)
        assert from_ring(stand) == copied, "a ring with missing pages is not registered"
        _limit(daemon, RING_BYTES)
        daemon.until(lambda status: status["store"]["resident_bytes"] == RING_BYTES, "the ring is whole again")
        loaded(stand, 2)
        assert not card.driver.ranges, "memory that was given back under pressure is not taken again at once"
        ring(stand)._rest_until_s = 0.0
        expected = with_chunk(stand, 3)
        assert np.array_equal(loaded(stand, 3), expected)
        assert from_ring(stand) > copied and card.driver.ranges


def test_a_larger_ring_after_a_restart_is_registered_anew_and_the_former_mapping_given_up(
    daemon: Daemon, card: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registered_ring, "REST_S", 0.0)
    with WorkerStand(daemon, card) as stand:
        expected = with_chunk(stand, 1)
        assert np.array_equal(loaded(stand, 1), expected)
        (former,) = card.driver.ranges
        daemon.kill()
        daemon.flags["ring_bytes"] = 2 * RING_BYTES
        daemon.start()
        daemon.until(lambda status: status["store"]["resident_bytes"] == 2 * RING_BYTES, "the ring has grown")
        until(lambda: _mapped_bytes(stand) == 2 * RING_BYTES, "the worker maps all of it")
        until(lambda: former not in card.driver.ranges, "the former mapping is given up")
        assert np.array_equal(loaded(stand, 1), expected)
        until(lambda: list(card.driver.ranges.values()) == [2 * RING_BYTES], "the larger ring is registered")


def test_a_former_mapping_stays_registered_until_copies_from_it_are_complete(stand: WorkerStand) -> None:
    """The stand-in card fails a copy from memory that its driver does not know."""
    with_chunk(stand, 1)
    loaded(stand, 1)
    ended = threading.Event()
    with loads(stand).hold():
        job = stand.load([1], [[20, 21], []])
        until(lambda: stand.worker._pending[job].queued.is_set(), "the copies are queued")
        stand.worker._work.put(lambda: ring(stand).keep_only(()))
        stand.worker._work.put(ended.set)
        assert not ended.wait(0.2)  # one that does not wait ends in that time
    until(ended.is_set, "the mapping is given up")
    stand.finished(job)
    assert not stand.worker.take_failed() and not ring(stand).registered_bytes


@pytest.mark.parametrize("fails", ["swap", "stream", "mark", "loaded"])
def test_a_card_that_fails_fails_the_load_and_no_job_and_the_next_one_is_right(
    stand: WorkerStand, card: Accelerator, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    stand.keep([1, 2], [[1, 2, 3, 4], []])
    with monkeypatch.context() as breaks:
        match fails:
            case "swap":
                card.swap_fails = True
            case "stream":
                loads(stand).enqueue(broken)
            case _:
                breaks.setattr(stand.copies, fails, broken)
        load, store = stand.load([1, 2], [[20, 21, 22, 23], []]), stand.store([3], [[1, 2], []])
        results = stand.finished(load, store)
        assert all(result.success for result in results.values()), "vLLM ends the engine otherwise"
    assert stand.worker.take_failed() == {load}
    report = stand.reported()
    assert (report.done, report.failed, report.damaged) == ({load: 1}, {load: {0, 1}}, set())
    card.swap_fails = False
    expected = with_chunk(stand, 4)
    if fails in ("swap", "mark"):
        assert not stand.client.contains(key(3))
    assert np.array_equal(loaded(stand, 4), expected)


def test_more_chunks_than_page_locked_memory_are_stored_as_far_as_there_is_room(
    daemon: Daemon, card: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "SLAB_BYTES", 2 * CHUNK_BYTES)
    monkeypatch.setattr(host_memory, "STORE_BYTES_MAX", 2 * CHUNK_BYTES)
    with WorkerStand(daemon, card) as stand:
        stand.write(1)
        stand.finished(stand.store([1, 2, 3], [[1, 2, 3, 4, 5, 6], []]))
        stand.stored(1, 2)
        assert not stand.client.contains(key(3))
        expected = with_chunk(stand, 4)
        assert np.array_equal(loaded(stand, 4), expected), "places come back after a put"
        assert sum(card.locked.values()) <= 2 * CHUNK_BYTES + copies.LOADS * copies.LOAD_BYTES


def _limit(daemon: Daemon, limit_bytes: int) -> None:
    with RawClient(daemon.socket, attach=False) as operator:
        operator.ask(lambda number: messages.Limit(number, limit_bytes))


def _mapped_bytes(stand: WorkerStand) -> int:
    view = stand.worker._background.view
    return len(view.ring) if view is not None else 0
