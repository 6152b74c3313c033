"""While a device is paused, as for the capture of a CUDA graph, orders wait, calls return, and nothing is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensord import DeviceCache
from tensord.testing.fake_vram import FakeCard, FakeVram

from ...daemon_process import until
from .card import filled, filled_until, held, host_values, key, put_some, values, watching


class Counting(FakeVram):
    """Counts copies between the card and the host."""

    copied = 0

    def _read(self, *arguments: Any) -> None:
        super()._read(*arguments)
        self.copied += 1

    def to_device(self, tree: Any) -> Any:
        self.copied += 1
        return super().to_device(tree)


def tier_of(cache: DeviceCache, wanted: bytes, *, promote: bool = False) -> str:
    with held(cache, wanted, promote=promote) as lease:
        return lease.tier


@pytest.mark.parametrize("is_killed", [False, True], ids=["the daemon stays", "the daemon is killed"])
def test_nothing_is_copied_and_nobody_waits_until_the_pause_ends(card: FakeCard, is_killed: bool) -> None:
    vram = Counting(card)
    with watching(card) as daemon, DeviceCache(daemon.start().client(), vram) as cache:
        put_some(cache, vram, range(3))
        assert cache.offload(key(1), wait=True) == 1
        before = vram.copied
        with vram.pause():
            assert {tier_of(cache, key(0)) for _ in range(20)} == {"device"}
            assert tier_of(cache, key(1), promote=True) == "host"
            assert cache.offload(key(2)) == 1
            assert cache.offload(key(2), wait=True, timeout_s=0.05) == 0
            # The offload waits, and the rest of the cache's business does not.
            assert put_some(cache, vram, range(3, 4))[0].state == "registered"
            assert cache.delete(key(3)) == 1
            filled(card, 0.93)
            daemon.until(lambda status: status["governor"]["counters"]["ordered"] >= 1, "the order")
            if is_killed:
                daemon.kill()
                daemon.start()
                until(lambda: cache.client.connected, "the client to be connected")
            assert vram.copied == before and cache.contains(key(0)) and cache.contains(key(2))
        # What waited is carried out: the order, or the next daemon's.
        filled_until(card, 0.93, lambda: len(cache) == 0, "the order to be carried out")
        for number in range(3):
            with held(cache, key(number)) as lease:
                assert lease.tier == "host" and np.array_equal(host_values(lease.tree), values(number))
        card.occupy(0)
        until(lambda: tier_of(cache, key(1), promote=True) == "device", "the card to be below pressure")
        assert cache.error is None
