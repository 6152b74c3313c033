"""Weights that change behind a name: what was made by the old ones is never found by whoever has the new ones.

A process loads weights 1, another one says that they have changed; whatever happens meanwhile, and whichever way the
daemon is started again, processes that come later find what weights 2 made, or nothing.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.client.core.aio import AsyncClient
from tensord.errors import Invalidated, LimitReached
from tensord.ipc import messages
from tensord.shm.generations import GenerationWriter
from tensord.shm.layout import PAGE_BYTES, Superblock
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


@pytest.mark.parametrize("disturb", DISTURBANCES[1:])
def test_generations_go_on_rising_across_restarts(daemon: Daemon, disturb: Callable[[Daemon], None]) -> None:
    client = daemon.client()
    namespace = OLD
    for generation in range(1, 4):
        namespace = client.invalidate(namespace)
        assert namespace.generation == generation
        disturb(daemon)
        daemon.attached(client)
        assert client.current(OLD) == client.current(namespace) == namespace
        assert client.invalidate(OLD) == namespace
        assert client.put(key(namespace, 1), made(1, generation), wait=True).state == "stored"


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


def test_a_namespace_that_was_never_invalidated_stays_as_it_is_given(daemon: Daemon) -> None:
    client = daemon.client()
    for generation in (0, 7, 2**32 - 1):
        given = OLD.raised_to(generation)
        assert client.current(given) == given
        assert client.put(key(given, 1), made(1, 1), wait=True).state == "stored"
    own = bytes(range(32))
    assert client.put(own, made(1, 1), wait=True).state == "stored"


def test_a_refused_put_of_a_past_generation_is_logged_once_a_namespace(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    client = daemon.client()
    others = tensord.Namespace(**NAMED, tenant="other")
    for namespace in (OLD, others):
        client.invalidate(namespace)
    with caplog.at_level(logging.WARNING, "tensord"):
        for namespace in (OLD, others, OLD):
            for number in range(3):
                assert client.put(key(namespace, number), made(number, 1), wait=True).state == "refused"
    said = [record.getMessage() for record in caplog.records if "generation" in record.getMessage()]
    assert len(said) == 2
    assert all("generation 0" in text and "generation 1" in text for text in said)


# ---- what is under way meanwhile


def _puts_without_end(stage: Stage, socket: Path) -> int:
    """Stores content 0, 1, … by the old weights until one is refused; tells what it stored last."""
    client = tensord.Client(socket, timeout_s=PATIENCE_S)
    for number in range(100_000):
        put = client.put(key(OLD, number), made(number, 1, 64 + number % 5000), wait=True, timeout_s=PATIENCE_S)
        if number == 10:
            stage.tell("under way")
        if put.state == "refused":
            assert isinstance(put.error, Invalidated)
            return number
    raise AssertionError("it was never refused")


@pytest.mark.parametrize("disturb", [leave, kill_and_start])
def test_puts_under_way_when_the_weights_change(daemon: Daemon, disturb: Callable[[Daemon], None]) -> None:
    client = daemon.client()
    with Child(_puts_without_end, daemon.socket) as holder, Child(_puts_without_end, daemon.socket) as other:
        for child in (holder, other):
            assert child.hear() == "under way"
        client.invalidate(OLD)
        disturb(daemon)
        daemon.attached(client)
        stored = max(holder.hear(), other.hear())
    assert not any(client.contains(key(OLD, number)) for number in range(stored + 1))
    assert daemon.store("entries") == 0


@pytest.mark.parametrize("write_in_place", ["owner", "off"])
def test_puts_that_the_daemon_has_yet_to_read_are_refused(write_in_place: str) -> None:
    with Daemon(write_in_place=write_in_place) as daemon, daemon.start().client() as client:
        for number in range(100, 110):
            assert client.put(key(OLD, number), made(number, 1, 10_000), wait=True).state == "stored"
        daemon.pause()
        try:
            asked = client.link.ask(lambda number: messages.Invalidate(number, OLD.tag, 0), PATIENCE_S)
            puts = [client.put(key(OLD, 1), made(1, 1, 10_000))]
            waiting = threading.Thread(target=lambda: puts.append(client.put(key(OLD, 2), made(2, 1, 100_000))))
            waiting.start()
            assert puts[0].state == "sent" and client.current(OLD) == OLD
        finally:
            daemon.resume()
        waiting.join(PATIENCE_S)
        assert asked.result(PATIENCE_S).generation == client.current(OLD).generation == 1
        # What was written before the daemon had read the request may be stored before it, and ends with the others.
        for each in puts:
            assert each.wait(PATIENCE_S).state in ("refused", "stored")
            assert each.error is None or isinstance(each.error, Invalidated)
            assert not client.contains(each.key)
        assert client.put(key(OLD, 3), made(3, 1), wait=True).state == "refused"
        assert client.put(key(client.current(OLD), 9), made(9, 2, 100_000), wait=True).state == "stored"


def _waits_for_another(stage: Stage, socket: Path) -> tuple[int, int]:
    client = tensord.Client(socket, timeout_s=PATIENCE_S)
    stage.tell("asking")
    value = client.get_or_compute(key(OLD, 1), lambda: made(1, 1), timeout_s=2 * PATIENCE_S)
    return int(value[0]), client.tally.computed


def test_a_claim_waited_for_ends_when_the_weights_change(daemon: Daemon) -> None:
    client, other = daemon.client(), daemon.client()
    claim = client.claim(key(OLD, 1))
    until(lambda: claim.state == "compute", "the claim")
    with Child(_waits_for_another, daemon.socket) as waiting:
        assert waiting.hear() == "asking"
        daemon.until(lambda status: status["store"]["claims_waiting"] == 1, "it to wait")
        other.invalidate(OLD)
        assert waiting.hear() == (1 << 8 | 1, 1)
    assert client.put(key(OLD, 1), made(1, 1), wait=True).state == "refused"
    claim.abandon()
    late = client.claim(key(OLD, 1))
    until(lambda: late.state != "asked", "an answer")
    assert late.state == "alone"
    assert client.get(key(OLD, 1)) is None


@pytest.mark.parametrize("disturb", DISTURBANCES)
def test_sequences_of_old_weights_are_neither_stored_nor_matched(
    daemon: Daemon, disturb: Callable[[Daemon], None]
) -> None:
    client, other = daemon.client(), daemon.client()
    layers = [tensord.NormalLayer({"k": np.ones((1, 2, len(TOKENS), 4), np.float32)})]
    old = tensord.PrefixCache(client, OLD, block_tokens=BLOCK)
    assert old.put(TOKENS, layers).wait(PATIENCE_S).state == "stored"
    new = other.invalidate(OLD)
    disturb(daemon)
    daemon.attached(client, other)
    assert old.match(TOKENS) is None
    put = old.put(TOKENS, layers).wait(PATIENCE_S)
    assert put.state == "refused" and isinstance(put.error, Invalidated)
    assert old.match(TOKENS) is None
    after = tensord.PrefixCache(other, other.current(OLD), block_tokens=BLOCK)
    assert after.match(TOKENS) is None
    assert after.put(TOKENS, layers).wait(PATIENCE_S).state == "stored"
    match = tensord.PrefixCache(client, new, block_tokens=BLOCK).match(TOKENS)
    assert match is not None and match.offset == len(TOKENS) - 1


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
    with Daemon(limits_namespaces_max=2) as daemon:
        client = daemon.start().client()
        spaces = [tensord.Namespace(**NAMED, tenant=str(number)) for number in range(3)]
        for namespace in spaces[:2]:
            client.invalidate(namespace)
        for _ in range(2):
            with pytest.raises(LimitReached, match=r"namespaces_max.* 2.*purge"):
                client.invalidate(spaces[2])
            assert client.current(spaces[2]) == spaces[2]
            daemon.restart()
            daemon.attached(client)
        assert [client.invalidate(n.raised_to(1)).generation for n in spaces[:2]] == [2, 2]
        # The table does not grow; whoever asked for more is told.
        assert "namespaces_max" not in daemon.log
        daemon.flags["limits_namespaces_max"] = 3
        daemon.restart()
        (told,) = [line for line in daemon.log.splitlines() if "namespaces_max" in line]
        assert "purge" in told and "2" in told and "3" in told
        daemon.attached(client)
        with pytest.raises(LimitReached, match="namespaces_max was 2"):
            client.invalidate(spaces[2])


def test_the_last_generation_is_refused_and_not_begun_anew(daemon: Daemon) -> None:
    client = daemon.client()
    last = OLD.raised_to(2**32 - 1)
    with pytest.raises(LimitReached, match=r"4294967295.*another revision"):
        client.invalidate(last)
    assert client.put(key(last, 1), made(1, 1), wait=True).state == "stored"
