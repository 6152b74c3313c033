"""An offload shows whole or not at all, wherever its put is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tensord import DeviceCache
from tensord.testing.fake_vram import FakeCard, FakeVram

from ...daemon_process import MIB, until
from .card import CARD, card_folder, key, watching

SMALL_BYTES = 256 << 10

# Where a put of some bytes is written, and what the daemon is told so that it is.
WAYS: dict[str, tuple[int, dict[str, object]]] = {
    "a small one in the ring": (SMALL_BYTES, {}),
    "in the ring": (9 * MIB, {}),
    "in the inbox": (9 * MIB, {"write_in_place": "off"}),
}


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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", ["first", "last"])
def test_a_card_that_fails_in_the_middle_of_a_copy_shows_nothing_and_the_next_offload_works(
    card: FakeCard, way: str, at: str
) -> None:
    (size_bytes, flags), vram = WAYS[way], Vram(card)
    values = np.random.default_rng(1).integers(0, 256, size_bytes, np.uint8)
    with (
        watching(card, ring_bytes=64 * MIB, **flags) as daemon,
        daemon.start().client() as client,
        DeviceCache(client, vram) as cache,
    ):
        assert cache.put(key(1), {"a": vram.upload(values), "n": 1}, wait=True).state == "registered"
        vram.fails_at = 0 if at == "first" else size_bytes
        assert cache.offload(key(1), wait=True) == 0
        assert "the driver said no" in str(cache.error)
        assert cache.contains(key(1))
        vram.fails_at = None
        until(lambda: client.connected, "the client to be connected")
        assert client.get(key(1)) is None
        # One that takes longer than a call waits for it counts in no call.
        until(lambda: cache.offload(key(1), wait=True) == 1 or not cache.contains(key(1)), "the next offload")
        found = client.get(key(1))
        assert found is not None and np.array_equal(found.tree["a"], values)
        until(lambda: not client.link.puts.waiting, "the daemon to answer all requests")
