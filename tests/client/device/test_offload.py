"""An offload is copied from the card straight to where its put stands, and shows whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensord import DeviceCache
from tensord.testing.fake_vram import FakeCard, FakeVram

from ...daemon_process import MIB, Daemon, until
from .card import CARD, card_folder, held, key, watching

SMALL_BYTES = 256 << 10

# Where a put of some bytes is written, and what the daemon is told so that it is.
WAYS: dict[str, tuple[int, dict[str, object]]] = {
    "a small one in the ring": (SMALL_BYTES, {}),
    "in the ring": (9 * MIB, {}),
    "in the inbox": (9 * MIB, {"write_in_place": "off"}),
}


pytestmark = pytest.mark.parametrize("way", WAYS)


class Vram(FakeVram):
    """Tells of each read, before it copies; what `on_read` raises is the card's failure."""

    def __init__(self, card: FakeCard) -> None:
        super().__init__(card)
        self.landings: list[tuple[int, int]] = []
        self.on_read: Callable[[int], object] = lambda at: None

    def _read(self, source: Any, to: Any, start: int, stop: int) -> None:
        self.landings.append((to.ctypes.data, stop - start))
        self.on_read(start)
        super()._read(source, to, start, stop)


@pytest.fixture
def card() -> Iterator[FakeCard]:
    with card_folder() as folder, FakeCard(folder, CARD, 256 * MIB) as made:
        yield made


@pytest.fixture
def vram(card: FakeCard) -> Vram:
    return Vram(card)


@pytest.fixture
def daemon(card: FakeCard, way: str) -> Iterator[Daemon]:
    with watching(card, ring_bytes=64 * MIB, **WAYS[way][1]) as running:
        yield running.start()


@pytest.fixture
def cache(daemon: Daemon, vram: Vram) -> Iterator[DeviceCache]:
    with DeviceCache(daemon.client(), vram) as opened:
        yield opened


def values(way: str) -> Any:
    return np.random.default_rng(1).integers(0, 256, WAYS[way][0], np.uint8)


def put(cache: DeviceCache, vram: Vram, way: str) -> None:
    assert cache.put(key(1), {"a": vram.upload(values(way)), "n": 1}, wait=True).state == "registered"


def shared_memory() -> list[tuple[int, int, str]]:
    """The mappings of this process that are of shared memory: start, end, and name."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, permissions, *_, name = line.split(maxsplit=5)
        if "s" in permissions and ("tensord" in name or "memfd" in name):
            start, end = (int(part, 16) for part in place.split("-"))
            found.append((start, end, name))
    return found


def test_an_offload_is_copied_once_into_shared_memory(cache: DeviceCache, vram: Vram, way: str) -> None:
    put(cache, vram, way)
    assert cache.offload(key(1), wait=True) == 1
    assert sum(length for _, length in vram.landings) == WAYS[way][0]
    names = [[name for start, end, name in shared_memory() if start <= at < end] for at, _ in vram.landings]
    assert all(names)
    in_ring = ["ring" in name for (name,) in names]
    assert all(in_ring) if "ring" in way else not any(in_ring)
    with held(cache, key(1)) as lease:
        assert lease.tier == "host" and np.array_equal(lease.tree["a"], values(way))


@pytest.mark.parametrize("at", ["first", "last"])
def test_a_card_that_fails_in_the_middle_of_a_copy_shows_nothing_and_the_next_offload_works(
    cache: DeviceCache, vram: Vram, way: str, at: str
) -> None:
    put(cache, vram, way)

    def fails(start: int) -> None:
        if at == "first" or sum(length for _, length in vram.landings) == WAYS[way][0]:
            raise RuntimeError("the driver said no")

    vram.on_read = fails
    assert cache.offload(key(1), wait=True) == 0
    assert "the driver said no" in str(cache.error)
    assert cache.contains(key(1))
    vram.on_read = lambda start: None
    other = cache.client
    until(lambda: other.connected, "the client to be connected")
    assert other.get(key(1)) is None
    # One that takes longer than a call waits for it counts in no call.
    until(lambda: cache.offload(key(1), wait=True) == 1 or not cache.contains(key(1)), "the next offload")
    found = other.get(key(1))
    assert found is not None and np.array_equal(found.tree["a"], values(way))
    until(lambda: not other.link.puts.waiting, "the daemon to answer all requests")
