"""Weights that change behind a name: what was made by the old ones is never found by whoever has the new ones.

A process loads weights 1, another one says that they have changed; whatever happens meanwhile, and whichever way the
daemon is started again, processes that come later find what weights 2 made, or nothing.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.client.core.async_client import AsyncClient
from tensord.errors import LimitReached
from tensord.shm.index.generations import GenerationWriter
from tensord.shm.ring.layout import PAGE_BYTES, Superblock
from tensord.testing.fake_vram import FakeCard, FakeVram

from ..client.device.card import CARD, TOTAL_BYTES, card_folder, filled_until, values, watching
from ..daemon_process import MIB, PATIENCE_S, Daemon, until
from ..processes import Child, Stage

NAMED: dict[str, Any] = {"model": "generations", "revision": "main", "dtype": "int64", "processor": "p"}
OLD = tensord.Namespace(**NAMED)
BLOCK = 16
TOKENS = np.arange(3 * BLOCK, dtype=np.uint32)


def key(namespace: tensord.Namespace, number: int) -> bytes:
    return namespace.key("encoder", "image", number.to_bytes(8, "little"))


def made(number: int, weights: int, count: int = 64) -> np.ndarray[Any, Any]:
    """What `weights` make of content `number`."""
    return np.full(count, number << 8 | weights, np.int64)


def leave(daemon: Daemon) -> None:
    pass


def restart(daemon: Daemon) -> None:
    daemon.restart()


def kill_and_start(daemon: Daemon) -> None:
    daemon.kill()
    daemon.start()


def kill_twice(daemon: Daemon) -> None:
    for _ in range(2):
        kill_and_start(daemon)


DISTURBANCES = [leave, restart, kill_and_start, kill_twice]


# ---- processes that come later


def _holder_of_old_weights(stage: Stage, socket: Path) -> None:
    """Stores under the namespace as it was when it started, each time that it is told a number."""
    client = tensord.Client(socket, timeout_s=PATIENCE_S)
    reserved = client.reserve(tensord.Spec((64,), "int64"))
    stage.tell("ready")
    while True:
        number = stage.hear()
        assert client.wait_connected(PATIENCE_S)
        old = key(OLD, number)
        puts = [client.put(old, made(number, 1, count), wait=True, timeout_s=PATIENCE_S) for count in (64, MIB)]
        if number == 1:
            reserved.tree[:] = made(number, 1)
            puts.append(reserved.commit(old, wait=True))
        value = client.get_or_compute(old, partial(made, number, 1))
        assert (value == made(number, 1)).all()
        stage.tell((client.tally.computed, [(put.state, type(put.error).__name__, str(put.error)) for put in puts]))


def _starts_later(stage: Stage, socket: Path, number: int) -> Any:
    """With the same arguments: what it finds under them, and what it shares under the namespace as it is now."""
    client = tensord.Client(socket, timeout_s=PATIENCE_S)
    found = client.get(key(OLD, number))
    namespace = client.current(tensord.Namespace(**NAMED))
    value = client.get_or_compute(key(namespace, number), lambda: made(number, 2))
    until(lambda: client.contains(key(namespace, number)), "the result to be stored")
    return found is not None, namespace.generation, int(value[0]), client.tally.computed


@pytest.mark.parametrize("disturb", DISTURBANCES)
def test_results_of_old_weights_never_reach_a_later_reader(daemon: Daemon, disturb: Callable[[Daemon], None]) -> None:
    client = daemon.client()
    with Child(_holder_of_old_weights, daemon.socket) as holder:
        assert holder.hear() == "ready"
        assert client.put(key(OLD, 0), made(0, 1), wait=True).state == "stored"
        new = client.invalidate(OLD)
        assert new.generation == 1
        disturb(daemon)
        daemon.attached(client)
        for number in (1, 2):
            holder.tell(number)
            computed, puts = holder.hear()
            assert computed == number
            for state, error, text in puts:
                assert (state, error) == ("refused", "Invalidated")
                assert "generation 1" in text and "Client.current" in text
        for number in (0, 1, 2):
            with Child(_starts_later, daemon.socket, number) as later:
                assert later.hear() == (False, 1, number << 8 | 2, 1)
            with Child(_starts_later, daemon.socket, number) as second:
                assert second.hear() == (False, 1, number << 8 | 2, 0)
        # Who asks with the old generation again gets the same new one, and nothing is lost by it.
        assert client.invalidate(OLD) == new
        assert client.contains(key(new, 0))


def test_the_generation_now_is_known_to_every_client_without_a_daemon(daemon: Daemon) -> None:
    async def invalidated() -> None:
        async with AsyncClient(daemon.socket) as client:
            raised = await client.invalidate(OLD)
            other = daemon.client()
            daemon.kill()
            until(lambda: not client.connected and not other.connected, "the clients to notice")
            assert await client.current(OLD) == other.current(OLD) == raised
            assert other.put(key(OLD, 1), made(1, 1)).state == "lost"

    asyncio.run(invalidated())


# ---- what is under way meanwhile


def test_device_entries_of_old_weights_are_never_offloaded() -> None:
    with card_folder() as folder, FakeCard(folder, CARD, TOTAL_BYTES) as card, watching(card) as daemon:
        client = daemon.start().client()
        vram = FakeVram(FakeCard(folder, CARD))
        with tensord.DeviceCache(client, vram) as cache:
            for number in range(4):
                registered = cache.put(key(OLD, number), {"a": vram.upload(values(number))}, wait=True)
                assert registered.state == "registered"
            daemon.client().invalidate(OLD)
            filled_until(card, 0.94, lambda: cache.size == 0, "all of them to leave the device")
            daemon.until(lambda status: status["governor"]["counters"]["dropped"] == 4, "the daemon to be told")
            assert daemon.status()["governor"]["counters"]["offloaded"] == 0
            card.occupy(0)
            for number in range(4):
                assert not client.contains(key(OLD, number))
                assert cache.get(key(OLD, number), promote=True) is None
            assert daemon.store("entries") == 0


# ---- a daemon that dies in the middle


def _raise_behind_its_back(daemon: Daemon, tag: bytes, generation: int) -> None:
    """Writes what a daemon writes first when it invalidates a namespace: the generation, and no more."""
    name = next(path for path in daemon.segments() if path.name.endswith(".index"))
    with name.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size)
        writer = GenerationWriter(memory, Superblock.unpack(memory[:PAGE_BYTES]).geometry)
        writer.raise_to(tag, generation)


@pytest.mark.parametrize("end", [Daemon.kill, Daemon.terminate])
def test_entries_that_a_dying_daemon_had_yet_to_drop_are_not_found(
    daemon: Daemon, end: Callable[[Daemon], object]
) -> None:
    client = daemon.client()
    layers = [tensord.NormalLayer({"k": np.ones((1, 2, len(TOKENS), 4), np.float32)})]
    sequences = tensord.PrefixCache(client, OLD, block_tokens=BLOCK)
    assert sequences.put(TOKENS, layers).wait(PATIENCE_S).state == "stored"
    others = tensord.Namespace(**NAMED, tenant="other")
    for number in range(300):
        client.put(key(OLD, number), made(number, 1))
        client.put(key(others, number), made(number, 1))
    assert client.put(key(OLD.raised_to(1), 1), made(1, 2), wait=True).state == "stored"
    view = client.get(key(OLD, 7))
    assert view is not None
    kept = view.tree
    end(daemon)
    _raise_behind_its_back(daemon, OLD.tag, 1)
    daemon.start()
    daemon.attached(client)
    assert not any(client.contains(key(OLD, number)) for number in range(300))
    assert sequences.match(TOKENS) is None
    assert all(client.contains(key(others, number)) for number in range(300))
    assert client.contains(key(OLD.raised_to(1), 1))
    # Their place is free again, but for the one that somebody looks at.
    new = client.current(OLD)
    for number in range(300):
        put = client.put(key(new, number), made(number, 2), wait=True)
        assert put.state in ("stored", "existed")
    assert (kept == made(7, 1)).all()
    assert daemon.store("entries") == 600


# ---- limits


def test_the_limit_of_namespaces_is_named_and_outlives_the_daemon() -> None:
    # The app has its own name for it.
    with Daemon({"tensord.daemon.app.NAMESPACES_MAX": 2}) as daemon:
        client = daemon.start().client()
        spaces = [tensord.Namespace(**NAMED, tenant=str(number)) for number in range(3)]
        for namespace in spaces[:2]:
            client.invalidate(namespace)
        for _ in range(2):
            with pytest.raises(LimitReached, match=r"2 namespaces.*purge"):
                client.invalidate(spaces[2])
            assert client.current(spaces[2]) == spaces[2]
            daemon.restart()
            daemon.attached(client)
        assert [client.invalidate(n.raised_to(1)).generation for n in spaces[:2]] == [2, 2]
        # The table does not grow.
        daemon.constants = {}
        daemon.restart()
        daemon.attached(client)
        with pytest.raises(LimitReached, match="2 namespaces"):
            client.invalidate(spaces[2])


def test_the_last_generation_is_refused_and_not_begun_anew(daemon: Daemon) -> None:
    client = daemon.client()
    last = OLD.raised_to(2**32 - 1)
    with pytest.raises(LimitReached, match=r"4294967295.*another revision"):
        client.invalidate(last)
    assert client.put(key(last, 1), made(1, 1), wait=True).state == "stored"
