"""While a device is paused, as for the capture of a CUDA graph, orders wait, calls return, and nothing is lost.

Each cell is one thing that comes during the pause, crossed with an end of the daemon before the pause ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tensord import DeviceCache
from tensord.ipc.messages.modes import Mode
from tensord.testing.fake_vram import FakeCard, FakeVram

from ...daemon_process import PATIENCE_S, Daemon, until
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


class Scene:
    """A cache with entries 0 and 2 on the card, in use, and entry 1 in the host tier."""

    def __init__(self, daemon: Daemon, card: FakeCard) -> None:
        self.daemon, self.card, self.vram = daemon, card, Counting(card)
        self.cache = DeviceCache(daemon.client(), self.vram)
        put_some(self.cache, self.vram, range(3))
        assert self.cache.offload(key(1), wait=True) == 1
        self.lease = held(self.cache, key(0))
        self.lease_of_two = held(self.cache, key(2))


@pytest.fixture
def scene(card: FakeCard) -> Iterator[Scene]:
    with watching(card) as daemon:
        made = Scene(daemon.start(), card)
        yield made
        assert made.cache.error is None
        made.cache.close()


def an_order(scene: Scene) -> None:
    scene.lease.release()
    filled(scene.card, 0.93)
    until(lambda: scene.cache.mode is Mode.CRITICAL, "the card to fill")
    scene.daemon.until(lambda status: status["governor"]["counters"]["ordered"] >= 1, "the order")
    # The order waits, and the rest of the cache's business does not.
    tensor = scene.lease_of_two.tree["a"]
    assert scene.cache.put(key(3), {"a": tensor}, wait=True).state == "registered"


def an_offload_of_its_owner(scene: Scene) -> None:
    scene.lease.release()
    assert scene.cache.offload(key(0)) == 1
    assert scene.cache.offload(key(0), wait=True, timeout_s=0.05) == 0


def a_promotion(scene: Scene) -> None:
    with held(scene.cache, key(1), promote=True) as lease:
        assert lease.tier == "host"
    scene.lease.release()


def a_put(scene: Scene) -> None:
    assert put_some(scene.cache, scene.vram, range(4, 5))[0].state == "registered"
    scene.lease.release()


def a_hit_and_a_delete(scene: Scene) -> None:
    for _ in range(20):
        with held(scene.cache, key(0)) as lease:
            assert lease.tier == "device"
    scene.lease.release()
    assert scene.cache.delete(key(1)) == 0


STATES = [an_order, an_offload_of_its_owner, a_promotion, a_put, a_hit_and_a_delete]


@pytest.mark.parametrize("is_killed", [False, True], ids=["the daemon stays", "the daemon is killed"])
@pytest.mark.parametrize("state", STATES, ids=lambda each: each.__name__)
def test_nothing_is_copied_and_nobody_waits_until_the_pause_ends(
    scene: Scene, state: Callable[[Scene], None], is_killed: bool
) -> None:
    before = scene.vram.copied
    with scene.vram.pause():
        state(scene)
        if is_killed:
            scene.daemon.kill()
            scene.daemon.start()
            until(lambda: scene.cache.client.connected, "the client to be connected")
        assert scene.vram.copied == before
    scene.card.occupy(0)
    for number in range(2):
        with held(scene.cache, key(number)) as lease:
            assert np.array_equal(host_values(lease.tree), values(number))
    assert scene.cache.offload(key(0), wait=True, timeout_s=PATIENCE_S) in (0, 1)
    until(lambda: promoted_tier(scene, key(1)) == "device", "the card to be below pressure, and the entry on it")


def promoted_tier(scene: Scene, wanted: bytes) -> str:
    with held(scene.cache, wanted, promote=True) as lease:
        return lease.tier


def test_an_order_that_came_during_a_pause_is_carried_out_after_it(scene: Scene) -> None:
    with scene.vram.pause():
        an_order(scene)
        assert scene.cache.contains(key(0))
    filled_until(scene.card, 0.93, lambda: not scene.cache.contains(key(0)), "the order to be carried out")
    with held(scene.cache, key(0)) as lease:
        assert lease.tier == "host" and np.array_equal(host_values(lease.tree), values(0))
