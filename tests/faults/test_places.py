"""Places of the ring that are lent to a client: what is written there is whole, and no place is lost or lent twice."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tensord.errors import LimitReached
from tensord.ipc.messages import control as messages

from ..daemon_process import MIB, PATIENCE_S, Daemon
from .payloads import key, payload
from .raw import RawClient

RING_BYTES = 64 * MIB


@pytest.fixture
def daemon() -> Iterator[Daemon]:
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
def test_a_lost_put_keeps_no_part_of_the_ring_though_its_caller_keeps_it(daemon: Daemon, end: str) -> None:
    with daemon.client() as client:
        for number in range(20):
            assert client.put(key(number), payload(number), wait=True).state == "stored"
        daemon.until(lambda s: s["store"]["lent_bytes"] >= payload(20).nbytes, "a place to be lent ahead")
        daemon.pause()
        gc.disable()
        try:
            put = client.put(key(20), payload(20))
            assert put.state == "sent"
            getattr(daemon, end)()
            daemon.start()
            assert put.wait(PATIENCE_S).state in {"kill": ["lost"], "terminate": ["lost", "stored"]}[end]
            daemon.attached(client)
            there = [number for number in range(21) if client.contains(key(number))]
            client.evict(*(key(number) for number in there))
            daemon.until(lambda s: not s["store"]["used_bytes"], "the place to be free, though the put is kept")
        finally:
            gc.enable()


def test_a_put_of_nearly_the_whole_ring_waits_for_places_that_other_clients_do_not_use(daemon: Daemon) -> None:
    with daemon.client() as other, daemon.client() as client:
        for number in range(64):
            assert other.put(key(number), np.zeros(20_000, np.uint8), wait=True).state == "stored"
        assert daemon.status()["store"]["lent_bytes"], "it has unused places"
        assert client.put(key(64), np.zeros(RING_BYTES - 10_000, np.uint8), wait=True).state == "stored"
        assert other.put(key(65), np.zeros(20_000, np.uint8), wait=True).state == "stored"
