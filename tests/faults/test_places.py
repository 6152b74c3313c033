"""Entries in the ring: what is written is whole, what is seen stays, no place is lost, and how long entries stay."""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.errors import LimitReached, StoreFull
from tensord.ipc.messages import control as messages
from tensord.shm.ring.layout import SPAN_HEADER_BYTES, SpanHeader

from ..daemon_process import MIB, PATIENCE_S, Daemon, some, until
from .payloads import PINNED, has, is_payload, key, payload
from .raw import RawClient

RING_BYTES = 64 * MIB


@pytest.fixture
def roomy() -> Iterator[Daemon]:
    with Daemon(ring_bytes=RING_BYTES) as running:
        yield running.start()


def test_write_in_place_off_maps_the_ring_for_writing_nowhere() -> None:
    with Daemon(write_in_place="off") as daemon, daemon.start().client() as client:
        assert client.put(key(1), payload(1), wait=True).state == "stored"
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        ring = next(path.name for path in daemon.segments() if path.name.endswith(".ring"))
        assert {words[1] for words in maps if words[-1].endswith(ring)} == {"r--s"}
        with RawClient(daemon.socket) as raw, pytest.raises(LimitReached, match="write_in_place is off"):
            raw.ask(messages.OpenRing)


@pytest.mark.parametrize("write_in_place", ["owner", "off"])
@pytest.mark.parametrize("size_bytes", [100_000, 8 * MIB])
def test_a_payload_that_changes_while_it_is_put_still_agrees_with_its_checksum(
    write_in_place: str, size_bytes: int
) -> None:
    with Daemon(ring_bytes=RING_BYTES, write_in_place=write_in_place) as daemon, daemon.start().client() as client:
        array = np.zeros(size_bytes, np.uint8)
        done = threading.Event()

        def change() -> None:
            while not done.is_set():
                array[:] += 1

        thread = threading.Thread(target=change)
        thread.start()
        try:
            for number in range(10):
                assert client.put(key(number), array, wait=True).state == "stored"
                assert client.get(key(number), verify=True) is not None
        finally:
            done.set()
            thread.join()


@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_a_lost_put_keeps_no_part_of_the_ring_though_its_caller_keeps_it(roomy: Daemon, end: str) -> None:
    with roomy.client() as client:
        for number in range(20):
            assert client.put(key(number), payload(number), wait=True).state == "stored"
        roomy.until(lambda s: s["store"]["lent_bytes"] >= payload(20).nbytes, "a place to be lent ahead")
        roomy.pause()
        gc.disable()
        try:
            put = client.put(key(20), payload(20))
            assert put.state == "sent"
            getattr(roomy, end)()
            roomy.start()
            assert put.wait(PATIENCE_S).state in {"kill": ["lost"], "terminate": ["lost", "stored"]}[end]
            roomy.attached(client)
            there = [number for number in range(21) if client.contains(key(number))]
            client.evict(*(key(number) for number in there))
            roomy.until(lambda s: not s["store"]["used_bytes"], "the place to be free, though the put is kept")
        finally:
            gc.enable()


def test_a_put_of_nearly_the_whole_ring_waits_for_places_that_other_clients_do_not_use(roomy: Daemon) -> None:
    with roomy.client() as other, roomy.client() as client:
        for number in range(64):
            assert other.put(key(number), np.zeros(20_000, np.uint8), wait=True).state == "stored"
        assert roomy.status()["store"]["lent_bytes"], "it has unused places"
        put = client.put(key(64), np.zeros(RING_BYTES - 10_000, np.uint8), wait=True)
        assert put.state == "stored", put.error
        assert other.put(key(65), np.zeros(20_000, np.uint8), wait=True).state == "stored"


def test_a_view_outlives_the_daemon_and_its_memory(small: Daemon) -> None:
    client = small.client()
    lease = client.get(key(PINNED))
    small.interrupt()
    until(lambda: not client.connected, "the client to notice")
    assert not small.segments()
    assert lease is not None and is_payload(lease.tree, PINNED)
    assert has(client, PINNED), "lookups go on without a daemon"


def test_a_replaced_ring_stays_mapped_for_as_long_as_a_view_of_it_lives(small: Daemon) -> None:
    client = small.client()
    for number in range(3):
        assert client.put(key(number), payload(number), wait=True, timeout_s=PATIENCE_S).state in ("stored", "existed")
        lease, ring = client.get(key(number)), client.ring()
        small.interrupt()
        small.start()
        until(lambda before=ring: client.connected and client.ring() is not before, "the new ring")  # type: ignore[misc]
        del ring
        assert _rings_mapped(small) == 2
        assert lease is not None and is_payload(lease.tree, number)
        del lease
        gc.collect()
        until(lambda: _rings_mapped(small) == 1, "the former ring to be unmapped")


def _rings_mapped(daemon: Daemon) -> int:
    """How many of a daemon's rings this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if f"{daemon.instance}.ring" in line})


NUMBERS = 200  # of entries: several times what the ring holds
SIZES = [8 << 10, 40 << 10, 96 << 10]


def test_gets_are_right_while_other_threads_put_and_release() -> None:
    with Daemon(ring_bytes=4 * MIB) as small:
        client, hits = small.start().client(), count()
        # What falls out at one end was got by another thread, most of the time.
        shared: deque[tuple[int, Any]] = deque(maxlen=10)

        def works(random: Random) -> None:
            for _ in range(100):
                number = random.randrange(NUMBERS)
                put = client.put(key(number), payload(number, SIZES[number % 3]), timeout_s=PATIENCE_S)
                # What is pinned and on its way may fill the ring for a moment; then it says so.
                assert put.state in ("sent", "stored", "existed") or isinstance(put.error, StoreFull), put
                numbers = random.sample(range(NUMBERS), 4)
                leases = [client.get(key(number)) for number in numbers[:2]]
                with client.get_many([key(number) for number in numbers[2:]]) as batch:
                    leases += batch
                    held = [(number, lease.tree) for number, lease in zip(numbers, leases, strict=True) if lease]
                    del leases
                for known, view in (*held, *list(shared)[:3]):
                    assert is_payload(view, known)
                    next(hits)
                # Not of the batch: one of its views keeps all of them in the ring.
                shared.extend(each for each in held if each[0] in numbers[:2])

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(works, Random(seed)) for seed in range(4)]:
                done.result(2 * PATIENCE_S)
        assert next(hits) > 50
        assert small.store("evictions")["capacity"] > 20
        shared.clear()
        gc.collect()
        small.until(lambda s: not s["pins"], "every pin to be released")
        assert small.store("found_corrupt") == 0


DAY_S = 86_400.0


def boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def header_of(daemon: Daemon, at: bytes) -> SpanHeader:
    """What stands before the only payload of the ring that is of this key."""
    ring = next(path for path in daemon.segments() if path.name.endswith(".ring"))
    content = ring.read_bytes()
    start = content.index(at) - 16
    assert content.find(at, start + SPAN_HEADER_BYTES) < 0
    return SpanHeader.unpack(content[start : start + SPAN_HEADER_BYTES])


def expires_unix_s(client: tensord.Client, at: bytes) -> float:
    entry = some(client.peek(at))
    return entry.expires_unix_s


@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_a_renewed_time_to_live_survives_a_restart(daemon: Daemon, end: str) -> None:
    client = daemon.client()
    for number in (1, 2):
        assert client.put(key(number), np.arange(5), ttl_s=DAY_S, wait=True).state == "stored"
    assert client.put(key(3), np.arange(5), wait=True).state == "stored"
    touched_s = boot_s()
    until(lambda: boot_s() > touched_s, "the clock to move")
    assert client.touch(key(1), key(3)) == 2
    before = [header_of(daemon, key(number)) for number in (1, 2, 3)]
    assert before[0].expires_s >= touched_s + DAY_S > before[1].expires_s > 0
    assert before[2].expires_s == 0
    for _ in range(2):
        getattr(daemon, end)()
        daemon.start()
        daemon.attached(client)
        # The daemon goes by what stands there, and has not changed it.
        assert [header_of(daemon, key(number)) for number in (1, 2, 3)] == before
        rows = {bytes.fromhex(row["key"]): row["expires_unix_s"] for row in entries(daemon)}
        assert rows[key(3)] is None
        apart_s = before[0].expires_s - before[1].expires_s
        assert rows[key(1)] - rows[key(2)] == pytest.approx(apart_s, abs=1e-4)
    # It is the time that the put asked for which is renewed, not what was left of it and more.
    assert client.touch(key(1)) == 1
    assert header_of(daemon, key(1)).expires_s <= boot_s() + DAY_S


def entries(daemon: Daemon) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = daemon.ask(messages.EntriesQuery)["entries"]
    return found


def test_gets_do_not_renew_the_time_to_live() -> None:
    with Daemon(default_ttl_s="1d") as daemon:
        client = daemon.start().client()
        assert client.put(key(1), np.arange(5), wait=True).state == "stored"
        before = header_of(daemon, key(1))
        assert before.expires_s >= before.created_s + DAY_S
        assert client.get(key(1)) is not None
        assert client.put(key(1), np.arange(5), wait=True).state == "existed"
        until(lambda: daemon.store("hits") == 1, "the daemon to hear of the get")
        (row,) = entries(daemon)
        assert row["uses"] == 2
        assert header_of(daemon, key(1)) == before
        kept = expires_unix_s(client, key(1))
        assert client.touch(key(1)) == 1
        assert expires_unix_s(client, key(1)) > kept
        assert header_of(daemon, key(1)).expires_s > before.expires_s
