"""Tensors that stay on their owner's card, against a real daemon that watches a card which is a folder."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.client.device import cache as cache_module
from tensord.client.device import upkeep
from tensord.errors import BadKey, DaemonUnavailable, DeviceFull, NoGauge, TensordError, UnderPressure, UsageError
from tensord.ipc import messages
from tensord.ipc.modes import Mode
from tensord.testing.fake_vram import FakeCard, FakeStream, FakeVram

from ...daemon_process import PATIENCE_S, Daemon, until
from .card import (
    CARD,
    ELEMENTS,
    ENTRY_BYTES,
    TOTAL_BYTES,
    filled,
    filled_until,
    held,
    host_values,
    key,
    put_some,
    values,
    watching,
)


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
def cache(running: Daemon, vram: FakeVram) -> Iterator[tensord.DeviceCache]:
    with tensord.DeviceCache(running.client(), vram) as opened:
        yield opened
        assert opened.error is None


def device_row(daemon: Daemon) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [row for row in daemon.status()["governor"]["devices"] if row["device"] == CARD]
    return rows[0] if rows else {"entries": 0, "bytes": 0, "tokens": 0}


def counters(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.status()["governor"]["counters"]
    return found


# ---- put, get, delete


def test_a_get_returns_the_tensors_that_were_put_and_the_daemon_knows_the_entry(
    cache: tensord.DeviceCache, vram: FakeVram, running: Daemon
) -> None:
    tree = {"a": vram.upload(values(1)), "n": 1}
    assert cache.put(key(1), tree, tokens=7, agent="planner", wait=True).state == "registered"
    with held(cache, key(1)) as lease:
        assert lease.tree is tree
        assert lease.tier == "device"
    assert (cache.size, len(cache), cache.total_tokens, cache.size_bytes) == (1, 1, 7, ENTRY_BYTES)
    row = device_row(running)
    assert (row["entries"], row["bytes"], row["tokens"]) == (1, ENTRY_BYTES, 7)
    assert cache.get(key(2)) is None


def test_the_mode_is_known_as_soon_as_the_daemon_has_read_the_gauge(card: FakeCard, vram: FakeVram) -> None:
    tree = {"a": vram.upload(values(0))}
    card.gauge_file.unlink()  # every upload writes it
    with watching(card) as daemon, tensord.DeviceCache(daemon.start().client(), vram) as cache:
        assert cache.put(key(0), tree, wait=True).state == "registered"  # the device was opened by then
        assert cache.mode is None
        card.refresh()
        until(lambda: cache.mode is Mode.RELAXED, "the first reading")


def test_an_entry_put_again_is_counted_once_with_its_new_size(
    cache: tensord.DeviceCache, vram: FakeVram, running: Daemon
) -> None:
    put_some(cache, vram, range(1), tokens=5)
    cache.put(key(0), {"a": vram.upload(np.zeros(2 * ENTRY_BYTES, np.uint8))}, tokens=9, wait=True)
    assert (cache.size, cache.size_bytes, cache.total_tokens) == (1, 2 * ENTRY_BYTES, 9)
    row = device_row(running)
    assert (row["entries"], row["bytes"], row["tokens"]) == (1, 2 * ENTRY_BYTES, 9)
    assert counters(running)["renewed"] == 1


def test_deleted_entries_are_gone_here_and_there_and_leases_on_them_stay_right(
    cache: tensord.DeviceCache, vram: FakeVram, running: Daemon
) -> None:
    put_some(cache, vram, range(4), tokens=1)
    lease = held(cache, key(0))
    assert cache.delete(key(0), key(1), key(9)) == 2
    assert cache.clear() == 2
    assert (cache.size, cache.size_bytes, cache.total_tokens) == (0, 0, 0)
    running.until(lambda status: status["governor"]["counters"]["released"] == 4, "the daemon to hear of it")
    assert np.array_equal(host_values(lease.tree), values(0))
    assert device_row(running)["entries"] == 0


def test_views_of_one_batch_count_it_once_here_and_with_the_daemon(
    cache: tensord.DeviceCache, vram: FakeVram, card: FakeCard, running: Daemon
) -> None:
    batch = vram.empty((8, ELEMENTS), np.float32)
    puts = [cache.put(key(n), {"a": batch[n]}) for n in range(8)]
    del batch
    assert all(put.wait(30).state == "registered" for put in puts)
    assert cache.size_bytes == 8 * ENTRY_BYTES
    until(lambda: device_row(running)["bytes"] == 8 * ENTRY_BYTES, "the daemon to count the batch once")
    cache.delete(*(key(n) for n in range(5)))
    gc.collect()
    assert cache.size_bytes == 8 * ENTRY_BYTES
    until(lambda: device_row(running)["entries"] == 3, "the daemon to hear of it")
    until(lambda: abs(device_row(running)["bytes"] - 8 * ENTRY_BYTES) <= 3, "the others to count all of the batch")
    assert vram.cached_bytes == 0
    assert cache.offload(key(5), key(6), wait=True) == 2
    assert cache.size_bytes == 8 * ENTRY_BYTES and vram.cached_bytes == 0
    until(lambda: device_row(running)["bytes"] == 8 * ENTRY_BYTES, "the last one to count all of it")
    assert cache.offload(key(7), wait=True) == 1
    until(lambda: card.reading()[0] == 0, "the batch to be freed with its last view")
    assert cache.tally.freed_bytes == 8 * ENTRY_BYTES
    assert cache.size_bytes == 0


def test_a_share_that_the_daemon_has_no_room_for_stays_as_it_was(card: FakeCard, vram: FakeVram) -> None:
    """The entry is not offloaded for that: it was there before, and the total is the same."""
    with watching(card, device_max_bytes=4 * ENTRY_BYTES) as daemon:
        cache = tensord.DeviceCache(daemon.start().client(), vram)
        batch = vram.empty((2, 2 * ELEMENTS), np.float32)
        for n in range(2):
            assert cache.put(key(n), {"a": batch[n]}, wait=True).state == "registered"
        until(lambda: device_row(daemon)["bytes"] == 4 * ENTRY_BYTES, "both to count their share")
        lease = held(cache, key(1))
        cache.delete(key(0))
        put_some(cache, vram, range(2, 3))
        until(lambda: device_row(daemon)["entries"] >= 1, "the daemon to hear of it")
        assert cache.contains(key(1)) and cache.error is None
        lease.release()
        cache.close()


# ---- what a caller may get wrong


def test_a_value_out_of_range_is_named_and_nothing_is_put(cache: tensord.DeviceCache, vram: FakeVram) -> None:
    tensor = vram.upload(values(1))
    wrong: list[tuple[str, Any]] = [
        ("tokens", -1),
        ("tokens", 1.5),
        ("tokens", True),
        ("agent", "x" * 129),
        ("agent", 5),
        ("cost_ms", -1.0),
        ("cost_ms", float("nan")),
        ("kind", "picture"),
    ]
    for named, value in wrong:
        with pytest.raises(UsageError, match=named):
            cache.put(key(1), tensor, **{named: value})
    assert cache.size == 0


def test_keys_and_tensors_that_are_none_are_named(cache: tensord.DeviceCache, vram: FakeVram) -> None:
    for call in (lambda: cache.put(b"short", vram.upload(values(1))), lambda: cache.get(b"short")):
        with pytest.raises(BadKey, match="32"):
            call()
    put_some(cache, vram, range(1))
    with pytest.raises(BadKey, match="32"):
        cache.delete(key(0), b"short")
    assert cache.size == 1
    with pytest.raises(UsageError, match="tensors"):
        cache.put(key(1), {"a": 5})
    with pytest.raises(UsageError, match="size_bytes"):
        cache.reserve(0)
    with pytest.raises(UsageError, match="for_s"):
        cache.reserve(10, for_s=float("nan"))
    with pytest.raises(UsageError, match="wait_s"):
        cache.reserve(10, wait_s=-1.0)
    with pytest.raises(UsageError, match="priority"):
        cache.reserve(10, priority=101)
    with pytest.raises(UsageError, match=CARD):
        tensord.DeviceCache(cache.client, vram)


def test_of_threads_that_open_a_cache_of_one_card_at_once_one_gets_it(running: Daemon, vram: FakeVram) -> None:
    client, threads = running.client(), 8
    opened: list[tensord.DeviceCache] = []
    refused: list[UsageError] = []

    def open_one(together: threading.Barrier) -> None:
        together.wait()
        try:
            opened.append(tensord.DeviceCache(client, vram))
        except UsageError as error:
            refused.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            together = threading.Barrier(threads)
            started = [threading.Thread(target=open_one, args=(together,)) for _ in range(threads)]
            for thread in started:
                thread.start()
            for thread in started:
                thread.join()
            (one,) = opened
            assert len(refused) == threads - 1
            one.close()
            opened.clear()
            refused.clear()
    finally:
        sys.setswitchinterval(interval)


# ---- pressure


def test_the_time_of_an_offload_is_measured_from_the_order_to_its_acknowledgement(
    cache: tensord.DeviceCache, vram: FakeVram, card: FakeCard, running: Daemon
) -> None:
    put_some(cache, vram, range(2))
    assert "Offload" not in running.ask(messages.LatencyQuery)["kinds"]
    began_s = time.monotonic()
    filled_until(card, 0.93, lambda: cache.size == 0, "both to be offloaded")
    running.until(lambda status: status["governor"]["counters"]["offloaded"] == 2, "the acknowledgements")
    took = running.ask(messages.LatencyQuery)["kinds"]["Offload"]
    assert 1 <= sum(took["counts"]) <= 2
    assert 0 < took["sum"] / sum(took["counts"]) < time.monotonic() - began_s


def test_an_offloaded_entry_comes_back_bit_identical(
    cache: tensord.DeviceCache, vram: FakeVram, card: FakeCard, running: Daemon
) -> None:
    put_some(cache, vram, range(6), tokens=3, agent="planner")
    filled_until(card, 0.93, lambda: cache.size == 0, "all of it to be offloaded")
    running.until(lambda status: status["governor"]["counters"]["offloaded"] == 6, "the acknowledgements")
    assert counters(running)["freed_bytes"] == 6 * ENTRY_BYTES
    card.occupy(0)
    until(lambda: cache.mode is Mode.RELAXED, "the card to relax")
    for n in range(6):
        with held(cache, key(n)) as lease:
            assert lease.tier == "host"
            assert np.array_equal(host_values(lease.tree), values(n))
        with held(cache, key(n), promote=True) as lease:
            assert lease.tier == "device"
            assert np.array_equal(host_values(lease.tree), values(n)) and lease.tree["n"] == n
    assert (cache.size, cache.total_tokens) == (6, 18)
    running.until(lambda status: status["governor"]["counters"]["promoted"] == 6, "the daemon to hear of it")


def test_promotions_leave_the_card_below_pressure(
    cache: tensord.DeviceCache, vram: FakeVram, card: FakeCard, running: Daemon
) -> None:
    put_some(cache, vram, range(4), tokens=1)
    assert cache.offload(*map(key, range(4)), wait=True) == 4
    occupied = int(0.85 * TOTAL_BYTES) - 2 * ENTRY_BYTES - ENTRY_BYTES // 2
    card.occupy(occupied)
    running.until(lambda status: status["governor"]["gauges"][0]["used_bytes"] == occupied, "the gauge to show it")
    leases = [held(cache, key(n), promote=True) for n in range(4)]
    assert [lease.tier for lease in leases].count("device") <= 2
    # What was just promoted counts twice until a later reading: by the gauge, and as promised.
    until(lambda: [held(cache, key(n), promote=True).tier for n in range(4)].count("device") == 2, "two to fit")
    assert card.reading()[0] < 0.85 * TOTAL_BYTES
    for n, lease in enumerate(leases):
        assert np.array_equal(host_values(lease.tree), values(n))


def test_entries_come_back_only_as_far_as_the_card_stays_below_pressure_with_what_is_newer_than_its_reading(
    card: FakeCard, vram: FakeVram
) -> None:
    with watching(card, gauges_sample_s="1h", gauges_sample_pressed_s="1h") as daemon:
        daemon.start()
        daemon.until(lambda status: bool(status["governor"]["gauges"]), "the only reading, of an empty card")
        other = FakeVram(FakeCard(card.gauge_file.parent, CARD))
        with tensord.DeviceCache(daemon.client(), vram) as first, tensord.DeviceCache(daemon.client(), other) as second:
            for n in range(16, 30):
                first.client.put(key(n), {"a": values(n)}, wait=True)
            put_some(first, vram, range(16))
            fitting = int(0.85 * TOTAL_BYTES) // ENTRY_BYTES - 16
            leases = []
            for n in range(16, 30):
                leases.append(held(first if n % 2 else second, key(n), promote=True))
                entries = 16 + min(n - 15, fitting)
                daemon.until(partial(has_entries, entries), "its registration")
            assert [lease.tier for lease in leases] == ["device"] * fitting + ["host"] * (14 - fitting)
            assert card.reading()[0] < 0.85 * TOTAL_BYTES


def has_entries(entries: int, status: dict[str, Any]) -> bool:
    return bool(sum(row["entries"] for row in status["governor"]["devices"]) == entries)


def test_an_entry_stays_in_the_ring_while_the_gauge_of_its_card_cannot_be_read(card: FakeCard, vram: FakeVram) -> None:
    read = card.gauge_file.with_name("read")
    read.write_text(f"{CARD} 0 {TOTAL_BYTES}")
    with watching(card, gauges_file=read) as daemon:
        daemon.start()
        daemon.until(lambda status: bool(status["governor"]["gauges"]), "the gauge")
        with tensord.DeviceCache(daemon.client(), vram) as cache:
            cache.client.put(key(1), {"a": values(1)}, wait=True)
            read.unlink()
            daemon.until(lambda status: status["governor"]["gauges"][0]["stale"], "the gauge to be stale")
            assert held(cache, key(1), promote=True).tier == "host"
            read.write_text(f"{CARD} 0 {TOTAL_BYTES}")
            until(lambda: held(cache, key(1), promote=True).tier == "device", "the gauge to be read again")


def test_a_card_that_is_missing_in_a_reading_stays_as_full_as_it_was(card: FakeCard, vram: FakeVram) -> None:
    read = card.gauge_file.with_name("read")
    both = f"{CARD} {TOTAL_BYTES} {TOTAL_BYTES}\ncard1 0 {TOTAL_BYTES}\n"
    read.write_text(both)
    with watching(card, gauges_file=read) as daemon, tensord.DeviceCache(daemon.start().client(), vram) as cache:
        until(lambda: cache.is_blocked, "the emergency")
        waits = threading.Thread(target=lambda: errors.append(refusal(cache)))
        errors: list[Exception | None] = []
        waits.start()
        daemon.until(lambda status: waiting(status) == 1, "a reservation to wait")
        replaced(read, f"card1 0 {TOTAL_BYTES}\n")
        daemon.until(lambda status: gauge(status)["stale"], "the gauge to be stale")
        assert cache.put(key(1), vram.upload(values(1)), wait=True).state == "refused"
        assert cache.mode is Mode.EMERGENCY and daemon.until(lambda status: waiting(status) == 1, "it to wait on")
        replaced(read, both.replace(str(TOTAL_BYTES), "0", 1))
        waits.join()
        assert errors == [None]


def replaced(file: Path, text: str) -> None:
    file.with_name("next").write_text(text)
    file.with_name("next").rename(file)


def refusal(cache: tensord.DeviceCache) -> Exception | None:
    """Why a reservation that waits is refused in the end, if it is."""
    try:
        cache.reserve(TOTAL_BYTES // 2, wait_s=PATIENCE_S).release()
    except TensordError as error:
        return error
    return None


def gauge(status: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in status["governor"]["gauges"] if each["gauge"] == CARD)
    return found


def waiting(status: dict[str, Any]) -> int:
    return sum(row["waiting_reservations"] for row in status["governor"]["devices"] if row["device"] == CARD)


def test_the_cost_that_a_put_reports_decides_whether_its_entry_is_copied_or_dropped(
    card: FakeCard, vram: FakeVram
) -> None:
    with watching(card, pressure_copy_bytes_per_s="1MiB") as daemon:  # 31 ms for an entry
        daemon.start()
        with tensord.DeviceCache(daemon.client(), vram) as cache:
            put_some(cache, vram, range(1), tokens=1, cost_ms=1000.0, kind="kv")
            put_some(cache, vram, range(1, 2), tokens=1_000_000, cost_ms=1.0, kind="kv")
            filled_until(card, 0.93, lambda: cache.size == 0, "both to leave")
            assert (cache.client.contains(key(0)), cache.client.contains(key(1))) == (True, False)


def test_an_entry_in_use_stays_until_its_lease_ends(
    cache: tensord.DeviceCache, vram: FakeVram, card: FakeCard, running: Daemon
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
    until(lambda: cache.size == 0, "it to go after all")


def test_a_lease_that_is_forgotten_keeps_nothing(cache: tensord.DeviceCache, vram: FakeVram, card: FakeCard) -> None:
    put_some(cache, vram, range(1))
    cache.get(key(0))
    gc.collect()
    filled(card, 0.93)
    until(lambda: cache.size == 0, "it to go")


def test_copies_wait_for_earlier_work_on_the_stream(cache: tensord.DeviceCache, vram: FakeVram, card: FakeCard) -> None:
    """The tensors are filled late: whoever copied at once would have garbage."""
    with vram.stream.hold() as hold:
        for n in range(3):
            cache.put(key(n), {"a": vram.upload(values(n)), "n": n}, wait=True)
        filled(card, 0.93)
        until(lambda: cache.mode is Mode.CRITICAL, "the card to fill")
        assert cache.size == 3
        hold.release()
        until(lambda: cache.size == 0, "them to be offloaded")
    for n in range(3):
        with held(cache, key(n)) as lease:
            assert np.array_equal(host_values(lease.tree), values(n))


def test_tensors_are_not_freed_under_a_reader_of_another_stream(
    cache: tensord.DeviceCache, vram: FakeVram, card: FakeCard
) -> None:
    """The reader's work is begun within its lease and is done long after it: the memory waits for it."""
    put_some(cache, vram, range(1))
    seen: list[Any] = []
    with vram.on(FakeStream()) as stream, stream.hold() as hold:
        with held(cache, key(0)) as lease:
            tensor = lease.tree["a"]
            array = tensor._array
            vram.launch(lambda: seen.append(array.copy()))
            del tensor
        filled(card, 0.93)
        until(lambda: cache.mode is Mode.CRITICAL, "the card to fill")
        hold.release()
        until(lambda: cache.size == 0, "it to be offloaded")
    until(lambda: seen, "the reader to have read")
    assert np.array_equal(seen[0], values(0))


def test_an_offload_by_its_owner_is_complete_when_the_call_returns(
    cache: tensord.DeviceCache, vram: FakeVram, running: Daemon
) -> None:
    put_some(cache, vram, range(3), tokens=2)
    lease = held(cache, key(0))
    assert cache.offload(key(0), key(1), key(7), wait=True) == 1
    assert (cache.contains(key(0)), cache.contains(key(1)), cache.contains(key(2))) == (True, False, True)
    lease.release()
    until(lambda: not cache.contains(key(0)), "the one that was used to go")
    assert cache.offload(key(2)) == 1
    until(lambda: cache.size == 0, "the last one to go")
    for n in range(3):
        with held(cache, key(n)) as found:
            assert found.tier == "host" and np.array_equal(host_values(found.tree), values(n))
    until(lambda: device_row(running)["entries"] == 0, "the daemon to hear of it")
    with pytest.raises(BadKey):
        cache.offload(b"short")


def test_in_emergency_nothing_new_is_taken_in_and_afterwards_it_is(
    cache: tensord.DeviceCache, vram: FakeVram, card: FakeCard, running: Daemon
) -> None:
    put_some(cache, vram, range(1))
    kept = held(cache, key(0))
    tensor = vram.upload(values(1))
    filled(card, 0.99)
    until(lambda: cache.is_blocked, "the emergency")
    assert cache.mode is Mode.EMERGENCY
    refused = cache.put(key(1), tensor)
    assert refused.state == "refused"
    assert isinstance(refused.error, UnderPressure) and CARD in str(refused.error)
    assert not cache.contains(key(1))
    assert cache.tally.blocked == cache.tally.refused == 1
    assert cache.put(key(0), kept.tree, wait=True).state == "registered"
    card.occupy(0)
    until(lambda: not cache.is_blocked, "the emergency to end")
    assert cache.put(key(1), tensor, wait=True).state == "registered"


def test_a_put_over_a_budget_is_refused_and_other_entries_stay(card: FakeCard, vram: FakeVram) -> None:
    with watching(card, device_max_bytes=2 * ENTRY_BYTES) as daemon:
        cache = tensord.DeviceCache(daemon.start().client(), vram)
        put_some(cache, vram, range(1), tokens=4)
        before = held(cache, key(0))
        larger = vram.upload(np.zeros(3 * ENTRY_BYTES, np.uint8))
        for number in (0, 1):
            refused = cache.put(key(number), larger, wait=True)
            assert refused.state == "refused" and isinstance(refused.error, DeviceFull)
        assert (cache.size, cache.size_bytes, cache.total_tokens) == (1, ENTRY_BYTES, 4)
        with held(cache, key(0)) as after:
            assert after.tree is before.tree
        assert device_row(daemon)["bytes"] == ENTRY_BYTES
        cache.close()


# ---- reservations


def test_no_more_is_reserved_than_is_free(cache: tensord.DeviceCache, card: FakeCard, running: Daemon) -> None:
    card.occupy(TOTAL_BYTES // 2)
    other = running.client()
    until(lambda: running.status()["governor"]["gauges"][0]["used_bytes"] == TOTAL_BYTES // 2, "the gauge to show it")
    with cache.reserve(TOTAL_BYTES // 2 - 1000) as held:
        assert held.lasts_s > 0
        with pytest.raises(DeviceFull, match="1000"):
            other.reserve_device(CARD, 2000, wait_s=0)
        other.reserve_device(CARD, 1000).release()
    until(lambda: reserves(other, TOTAL_BYTES // 2 - 1000), "it to be free again")
    with pytest.raises(NoGauge, match="has no gauge"):
        other.reserve_device("card7", 1000)


def test_idle_entries_leave_for_a_reservation_and_come_from_the_host_afterwards(
    cache: tensord.DeviceCache, vram: FakeVram, card: FakeCard, running: Daemon
) -> None:
    put_some(cache, vram, range(9), tokens=1)
    card.occupy(TOTAL_BYTES - 12 * ENTRY_BYTES)
    used_bytes = TOTAL_BYTES - 3 * ENTRY_BYTES
    running.until(lambda status: status["governor"]["gauges"][0]["used_bytes"] >= used_bytes, "the gauge to show it")
    with running.client().reserve_device(CARD, 8 * ENTRY_BYTES, wait_s=PATIENCE_S):
        assert cache.size <= 4
        assert card.reading()[0] <= TOTAL_BYTES - 8 * ENTRY_BYTES
    for n in range(9):
        with held(cache, key(n)) as lease:
            assert np.array_equal(host_values(lease.tree), values(n))


def test_a_refused_reservation_says_how_much_is_pinned(card: FakeCard, vram: FakeVram) -> None:
    # What an owner has kept counts as pinned until it is ordered away again.
    with (
        watching(card, pressure_retry_s="1h") as daemon,
        tensord.DeviceCache(daemon.start().client(), vram) as cache,
    ):
        put_some(cache, vram, range(4), tokens=1)
        leases = [cache.get(key(n)) for n in range(4)]
        card.occupy(TOTAL_BYTES // 2)
        daemon.until(lambda status: status["governor"]["gauges"][0]["used_bytes"] > TOTAL_BYTES // 2, "the gauge")

        def names_them() -> bool:
            """A refusal names what the owner has said of its entries by then."""
            with pytest.raises(DeviceFull) as refused:
                cache.reserve(TOTAL_BYTES // 2, wait_s=0.3)
            return f"of {4 * ENTRY_BYTES} cached bytes {4 * ENTRY_BYTES} are pinned" in str(refused.value)

        until(names_them, "a refusal to name them")
        assert cache.size == len(leases)


def reserves(client: tensord.Client, size_bytes: int) -> bool:
    try:
        client.reserve_device(CARD, size_bytes, wait_s=0).release()
    except DeviceFull:
        return False
    return True


# ---- the daemon is away


def test_without_a_daemon_tensors_are_kept_and_registered_when_there_is_one(card: FakeCard, vram: FakeVram) -> None:
    with watching(card) as daemon, tensord.Client(daemon.socket) as client:
        cache = tensord.DeviceCache(client, vram)
        put = cache.put(key(0), {"a": vram.upload(values(0))}, tokens=2, wait=True)
        assert put.state == "sent"
        assert cache.get(key(0)) is not None
        assert (cache.mode, cache.is_blocked) == (None, False)
        with pytest.raises(DaemonUnavailable):
            cache.reserve(10)
        deleted = cache.put(key(1), vram.upload(values(1)))
        cache.delete(key(1))
        assert deleted.state == "lost"
        daemon.start()
        assert put.wait(30).state == "registered"
        assert device_row(daemon)["tokens"] == 2
        cache.close()


def test_a_new_daemon_gets_all_entries_registered(cache: tensord.DeviceCache, vram: FakeVram, running: Daemon) -> None:
    put_some(cache, vram, range(20), tokens=1)
    running.kill()
    until(lambda: not cache.client.connected, "the client to notice")
    cache.delete(key(0))
    late = cache.put(key(50), vram.upload(values(50)), tokens=1)
    running.start()
    assert late.wait(30).state == "registered"
    running.until(lambda status: status["governor"]["devices"], "the device")
    until(lambda: device_row(running)["entries"] == 20, "all of them to be registered")
    assert device_row(running)["tokens"] == cache.total_tokens == 20


def test_a_daemon_without_a_gauge_of_its_own_goes_by_what_the_owner_sees(card: FakeCard) -> None:
    card.occupy(int(0.75 * TOTAL_BYTES))
    with watching(card, gauges_device="owners", gauges_file=card.folder / "none") as daemon:
        cache = tensord.DeviceCache(daemon.start().client(), FakeVram(card, reports=True))
        until(lambda: cache.mode is Mode.NORMAL, "the daemon to hear of it")
        cache.close()


def test_an_owner_that_cannot_read_its_device_says_so_once_and_keeps_its_entries(
    card: FakeCard, caplog: pytest.LogCaptureFixture
) -> None:
    class Unreadable(FakeVram):
        asked = 0

        def reading(self) -> tuple[int, int]:
            self.asked += 1
            if self.asked < 3:
                raise RuntimeError("CUDA error: unknown error")
            return super().reading()

    with (
        watching(card, gauges_device="owners", gauges_file=card.folder / "none") as daemon,
        caplog.at_level(logging.WARNING, "tensord"),
    ):
        cache = tensord.DeviceCache(daemon.start().client(), Unreadable(card, reports=True))
        assert cache.put(key(1), cache.device.upload(values(1)), tokens=1).wait(30).state == "registered"  # type: ignore[attr-defined]
        until(lambda: cache.mode is Mode.RELAXED, "the first reading")
        cache.close()
    assert [line.message for line in caplog.records] == [
        f"the memory of {CARD} cannot be read: CUDA error: unknown error"
    ]


# ---- the end, forks, threads


def test_a_closed_cache_holds_nothing_and_the_daemon_knows(
    cache: tensord.DeviceCache, vram: FakeVram, running: Daemon
) -> None:
    put_some(cache, vram, range(3))
    cache.close()
    assert (cache.size, cache.size_bytes, cache.closed) == (0, 0, True)
    assert cache.put(key(5), vram.upload(values(5))).state == "lost"
    assert cache.get(key(0)) is None
    running.until(lambda status: status["governor"]["counters"]["released"] == 3, "the daemon to hear of it")
    gc.collect()
    assert vram.cached_bytes >= 3 * ENTRY_BYTES


def test_a_cache_that_nobody_holds_ends_its_thread(running: Daemon, vram: FakeVram) -> None:
    client = running.client()
    cache = tensord.DeviceCache(client, vram)
    put_some(cache, vram, range(1))
    name = f"tensord-device-{CARD}"
    assert any(thread.name == name for thread in threading.enumerate())
    del cache
    gc.collect()
    until(lambda: not any(thread.name == name for thread in threading.enumerate()), "the thread to end")
    again = tensord.DeviceCache(client, vram)
    again.close()


def test_the_child_of_a_fork_has_an_empty_closed_cache_and_the_parent_goes_on(
    cache: tensord.DeviceCache, vram: FakeVram, running: Daemon
) -> None:
    put_some(cache, vram, range(3))
    lease = held(cache, key(0))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            found = (cache.closed, cache.size, cache.put(key(9), vram, wait=True).state, cache.get(key(0)))
            del lease
            status = 0 if found == (True, 0, "lost", None) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert cache.size == 3
    assert put_some(cache, vram, range(3, 4))[0].state == "registered"
    until(lambda: device_row(running)["entries"] == 4, "the daemon to know all of them")
    assert np.array_equal(host_values(lease.tree), values(0))


def some_left(cache: tensord.DeviceCache, offloaded: int) -> bool:
    """Whether entries were offloaded after the first `offloaded`, or none is there."""
    return cache.tally.offloaded > offloaded or cache.size == 0


def test_many_threads_put_get_and_delete_while_the_card_fills_and_empties(
    cache: tensord.DeviceCache, vram: FakeVram, card: FakeCard, running: Daemon
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

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1, 2, 3)]
    for thread in threads:
        thread.start()
    for share in (0.93, 0.5, 0.93, 0.5):
        if share > 0.9:
            filled_until(card, share, partial(some_left, cache, cache.tally.offloaded), "entries to go")
        else:
            filled(card, share)
            until(lambda: cache.mode in (Mode.RELAXED, Mode.NORMAL), "the card to empty")
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    gc.collect()

    def agree(status: dict[str, Any]) -> bool:
        """What was registered is there still or is gone, by one status: registrations and releases may be under way."""
        count = status["governor"]["counters"]
        there = sum(row["entries"] for row in status["governor"]["devices"] if row["device"] == CARD)
        left = count["offloaded"] + count["dropped"] + count["released"] + count["gone_with_owner"]
        return bool(there == cache.size and count["registered"] == there + left)

    running.until(agree, "both to know the same")
    assert "UnknownOrder" not in counters(running)["refused"]
