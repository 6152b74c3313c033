"""Tensors that stay on their owner's card, against a real daemon that watches a card which is a folder."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from tensord import Client, DeviceCache
from tensord.client.device import cache as cache_module
from tensord.client.device import upkeep
from tensord.errors import BadKey, DeviceFull, UnderPressure, UsageError
from tensord.ipc.messages.modes import Mode
from tensord.testing.fake_vram import FakeCard, FakeVram

from ...daemon_process import PATIENCE_S, Daemon, until
from .card import CARD, ENTRY_BYTES, filled, filled_until, held, host_values, key, put_some, values, watching


@pytest.fixture(autouse=True)
def _as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a daemon takes longer to answer, and a thread to end, than an engine would wait for it."""
    monkeypatch.setattr(cache_module, "_PROMOTION_ASK_S", PATIENCE_S)
    monkeypatch.setattr(upkeep, "_END_S", PATIENCE_S)


@pytest.fixture
def vram(card: FakeCard) -> FakeVram:
    return FakeVram(card)


@pytest.fixture
def running(card: FakeCard) -> Iterator[Daemon]:
    with watching(card) as daemon:
        yield daemon.start()


@pytest.fixture
def cache(running: Daemon, vram: FakeVram) -> Iterator[DeviceCache]:
    with DeviceCache(running.client(), vram) as opened:
        yield opened
        assert opened.error is None


def device_row(daemon: Daemon) -> dict[str, Any]:
    """The daemon's view of the card."""
    rows: list[dict[str, Any]] = [row for row in daemon.status()["governor"]["devices"] if row["device"] == CARD]
    return rows[0] if rows else {"entries": 0, "bytes": 0, "tokens": 0}


def until_counted(daemon: Daemon, name: str, count: int) -> None:
    daemon.until(lambda status: status["governor"]["counters"][name] == count, f"the daemon to count {count} {name}")


def test_a_get_returns_the_tensors_that_were_put_and_the_daemon_knows_the_entry(
    cache: DeviceCache, vram: FakeVram, running: Daemon
) -> None:
    tree = {"a": vram.upload(values(1)), "n": 1}
    assert cache.put(key(1), tree, tokens=7, agent="planner", wait=True).state == "registered"
    with held(cache, key(1)) as lease:
        assert lease.tree is tree
        assert lease.tier == "device"
    assert (len(cache), cache.size_bytes) == (1, ENTRY_BYTES)
    row = device_row(running)
    assert (row["entries"], row["bytes"], row["tokens"]) == (1, ENTRY_BYTES, 7)
    assert cache.get(key(2)) is None


def test_an_entry_put_again_is_the_one_that_was_there_and_is_used(
    cache: DeviceCache, vram: FakeVram, running: Daemon
) -> None:
    (first,) = put_some(cache, vram, range(1), tokens=5)
    again = cache.put(key(0), {"a": vram.upload(np.zeros(2 * ENTRY_BYTES, np.uint8))}, tokens=9, wait=True)
    assert again is first and again.state == "registered"
    assert (len(cache), cache.size_bytes) == (1, ENTRY_BYTES)
    with held(cache, key(0)) as lease:
        assert np.array_equal(host_values(lease.tree), values(0))
    until_counted(running, "used", 2)


def test_views_of_one_batch_count_their_own_bytes_and_the_batch_is_freed_with_the_last_of_them(
    cache: DeviceCache, vram: FakeVram, card: FakeCard, running: Daemon
) -> None:
    batch = vram.empty((8, ENTRY_BYTES // 4), np.float32)
    puts = [cache.put(key(n), {"a": batch[n]}) for n in range(8)]
    del batch
    assert all(put.wait(30).state == "registered" for put in puts)
    assert cache.size_bytes == 8 * ENTRY_BYTES == device_row(running)["bytes"]
    assert cache.offload(*map(key, range(7)), wait=True) == 7
    gc.collect()
    assert cache.size_bytes == ENTRY_BYTES and vram.cached_bytes == 0
    assert cache.offload(key(7), wait=True) == 1
    until(lambda: card.reading()[0] == 0, "the batch to be freed with its last view")


# ---- what a caller may get wrong


def test_a_value_out_of_range_is_named_and_nothing_is_put(cache: DeviceCache, vram: FakeVram) -> None:
    wrong: dict[str, tuple[Any, ...]] = {
        "tokens": (-1, 1.5, True),
        "agent": ("x" * 129, 5),
        "cost_ms": (-1.0, float("nan")),
    }
    for name, value in ((name, value) for name, found in wrong.items() for value in found):
        with pytest.raises(UsageError, match=name):
            cache.put(key(1), vram.upload(values(1)), **{name: value})
    assert len(cache) == 0


def test_keys_and_tensors_that_are_none_are_named(cache: DeviceCache, vram: FakeVram) -> None:
    put_some(cache, vram, range(1))
    tensor = vram.upload(values(1))
    for call in (
        lambda: cache.put(b"short", tensor),
        lambda: cache.get(b"short"),
        lambda: cache.delete(key(0), b"short"),
        lambda: cache.offload(key(0), b"short"),
    ):
        with pytest.raises(BadKey, match="32"):
            call()
    assert len(cache) == 1
    with pytest.raises(UsageError, match="tensors"):
        cache.put(key(1), {"a": 5})
    with pytest.raises(UsageError, match=CARD):
        DeviceCache(cache.client, vram)


# ---- pressure


def test_an_offloaded_entry_comes_back_bit_identical(
    cache: DeviceCache, vram: FakeVram, card: FakeCard, running: Daemon
) -> None:
    put_some(cache, vram, range(6), tokens=3, agent="planner")
    filled_until(card, 0.93, lambda: len(cache) == 0, "all of it to be offloaded")
    until_counted(running, "offloaded", 6)
    assert running.status()["governor"]["counters"]["freed_bytes"] == 6 * ENTRY_BYTES
    card.occupy(0)
    until(lambda: cache.mode is Mode.RELAXED, "the card to relax")
    for n in range(6):
        for tier in ("host", "device"):
            with held(cache, key(n), promote=tier == "device") as lease:
                assert (lease.tier, lease.tree["n"]) == (tier, n)
                assert np.array_equal(host_values(lease.tree), values(n))
    assert len(cache) == 6
    until(lambda: device_row(running)["tokens"] == 18, "the daemon to know all of them again")
    until_counted(running, "promoted", 6)


def test_an_entry_in_use_stays_until_its_lease_ends(
    cache: DeviceCache, vram: FakeVram, card: FakeCard, running: Daemon
) -> None:
    put_some(cache, vram, range(2))
    lease = held(cache, key(0))
    filled(card, 0.93)
    running.until(lambda status: status["governor"]["counters"]["kept"] >= 1, "the used entry to be kept")
    until(lambda: not cache.contains(key(1)), "the other one to go")
    assert cache.contains(key(0))
    assert np.array_equal(host_values(lease.tree), values(0))
    lease.release()
    del lease
    until(lambda: len(cache) == 0, "it to go after all")


def test_an_offload_by_its_owner_is_complete_when_the_call_returns(
    cache: DeviceCache, vram: FakeVram, running: Daemon
) -> None:
    put_some(cache, vram, range(3), tokens=2)
    lease = held(cache, key(0))
    assert cache.offload(key(0), key(1), key(7), wait=True) == 1
    assert (cache.contains(key(0)), cache.contains(key(1)), cache.contains(key(2))) == (True, False, True)
    lease.release()
    assert cache.offload(key(0), key(2)) == 2
    until(lambda: len(cache) == 0, "them to go")
    for n in range(3):
        with held(cache, key(n)) as found:
            assert found.tier == "host" and np.array_equal(host_values(found.tree), values(n))
    until(lambda: device_row(running)["entries"] == 0, "the daemon to hear of it")


def test_in_emergency_nothing_new_is_taken_in_and_afterwards_it_is(
    cache: DeviceCache, vram: FakeVram, card: FakeCard, running: Daemon
) -> None:
    put_some(cache, vram, range(1))
    kept = held(cache, key(0))
    tensor = vram.upload(values(1))
    filled(card, 0.99)
    until(lambda: cache.mode is Mode.EMERGENCY, "the emergency")
    refused = cache.put(key(1), tensor)
    assert refused.state == "refused"
    assert isinstance(refused.error, UnderPressure) and CARD in str(refused.error)
    assert not cache.contains(key(1))
    assert cache.put(key(0), kept.tree, wait=True).state == "registered"
    card.occupy(0)
    until(lambda: cache.mode is not Mode.EMERGENCY, "the emergency to end")
    assert cache.put(key(1), tensor, wait=True).state == "registered"


def test_without_a_daemon_tensors_are_kept_and_registered_when_there_is_one(card: FakeCard, vram: FakeVram) -> None:
    with watching(card) as daemon, Client(daemon.socket) as client:
        cache = DeviceCache(client, vram)
        put = cache.put(key(0), {"a": vram.upload(values(0))}, tokens=2, wait=True)
        assert put.state == "sent"
        assert cache.get(key(0)) is not None
        assert cache.mode is None
        deleted = cache.put(key(1), vram.upload(values(1)))
        cache.delete(key(1))
        assert deleted.state == "lost"
        daemon.start()
        assert put.wait(30).state == "registered"
        assert device_row(daemon)["tokens"] == 2
        cache.close()


# ---- the end, forks, threads


def test_a_daemon_without_a_gauge_of_its_own_goes_by_what_the_owner_sees(card: FakeCard) -> None:
    filled(card, 0.75)
    with watching(card, gauges_device="owners", gauges_file=card.folder / "none") as daemon:
        cache = DeviceCache(daemon.start().client(), FakeVram(card, reports=True))
        until(lambda: cache.mode is Mode.NORMAL, "the daemon to hear of it")
        cache.close()


def test_a_closed_cache_holds_nothing_and_the_daemon_knows(cache: DeviceCache, vram: FakeVram, running: Daemon) -> None:
    put_some(cache, vram, range(3))
    cache.close()
    assert (len(cache), cache.size_bytes, cache.closed) == (0, 0, True)
    assert cache.put(key(5), vram.upload(values(5))).state == "lost"
    assert cache.get(key(0)) is None
    until_counted(running, "released", 3)
    gc.collect()
    assert vram.cached_bytes >= 3 * ENTRY_BYTES


def test_many_threads_put_get_and_delete_while_the_card_fills_and_empties(
    cache: DeviceCache, vram: FakeVram, card: FakeCard, running: Daemon
) -> None:
    wrong: list[Any] = []
    stop = threading.Event()

    def work(first: int) -> None:
        try:
            turn = 0
            while not stop.is_set():
                number = first + turn % 3
                turn += 1
                if turn % 7 == 0:
                    cache.delete(key(number))
                    continue
                lease = cache.get(key(number), promote=turn % 2 == 0)
                if lease is None:
                    cache.put(key(number), {"a": vram.upload(values(number))}, tokens=1)
                    continue
                with lease:
                    if not np.array_equal(host_values(lease.tree), values(number)):
                        wrong.append(number)
        except DeviceFull:
            pass  # the card is as full as it can be: an engine waits for room, this one has seen enough
        except BaseException as error:
            wrong.append(error)

    def offloaded() -> int:
        return int(running.status()["governor"]["counters"]["offloaded"])

    def some_left(before: int) -> bool:
        return offloaded() > before or len(cache) == 0

    with ThreadPoolExecutor(4) as pool:
        for first in range(4):
            pool.submit(work, first)
        for _ in range(2):
            filled_until(card, 0.93, partial(some_left, offloaded()), "entries to go")
            filled_until(card, 0.5, lambda: cache.mode in (Mode.RELAXED, Mode.NORMAL), "the card to empty")
        stop.set()
    assert not wrong
    gc.collect()

    def agree(status: dict[str, Any]) -> bool:
        """What was registered is there still or is gone, by one status: registrations and releases may be under way."""
        count = status["governor"]["counters"]
        there = sum(row["entries"] for row in status["governor"]["devices"] if row["device"] == CARD)
        left = count["offloaded"] + count["dropped"] + count["released"] + count["gone_with_owner"]
        return bool(there == len(cache) and count["registered"] == there + left)

    running.until(agree, "both to know the same")
    assert "UnknownOrder" not in running.status()["governor"]["counters"]["refused"]
