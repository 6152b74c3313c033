"""An offload shows whole or not at all, wherever its put is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tensord import DeviceCache
from tensord.testing.fake_vram import FakeCard, FakeVram

from ...daemon_process import MIB, Daemon, until
from .card import CARD, card_folder, key, watching

SMALL_BYTES = 256 << 10

# Where a put of some bytes is written, and what the daemon is told so that it is.
WAYS: dict[str, tuple[int, dict[str, object]]] = {
    "a small one in the ring": (SMALL_BYTES, {}),
    "in the ring": (9 * MIB, {}),
    "in the inbox": (9 * MIB, {"write_in_place": "off"}),
}


pytestmark = pytest.mark.parametrize("way", WAYS)


class Vram(FakeVram):
    """`fails_at`: a read up to so many bytes of the entry fails, as a card's driver may."""

    def __init__(self, card: FakeCard) -> None:
        super().__init__(card)
        self.fails_at: int | None = None

    def _read(self, source: Any, to: Any, start: int, stop: int) -> None:
        if self.fails_at is not None and stop >= self.fails_at:
            raise RuntimeError("the driver said no")
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


@pytest.mark.parametrize("at", ["first", "last"])
def test_a_card_that_fails_in_the_middle_of_a_copy_shows_nothing_and_the_next_offload_works(
    cache: DeviceCache, vram: Vram, way: str, at: str
) -> None:
    put(cache, vram, way)
    vram.fails_at = 0 if at == "first" else WAYS[way][0]
    assert cache.offload(key(1), wait=True) == 0
    assert "the driver said no" in str(cache.error)
    assert cache.contains(key(1))
    vram.fails_at = None
    other = cache.client
    until(lambda: other.connected, "the client to be connected")
    assert other.get(key(1)) is None
    # One that takes longer than a call waits for it counts in no call.
    until(lambda: cache.offload(key(1), wait=True) == 1 or not cache.contains(key(1)), "the next offload")
    found = other.get(key(1))
    assert found is not None and np.array_equal(found.tree["a"], values(way))
    until(lambda: not other.link.puts.waiting, "the daemon to answer all requests")
