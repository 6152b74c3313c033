"""Sequences that stay on a card which is a folder, beside a real daemon: matched there, and offloaded as blocks."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.client.prefix.cache import PrefixCache
from tensord.client.prefix.device import DeviceSequences
from tensord.client.prefix.layers import NormalLayer, PrefixLayer, RecurrentLayer, RotatingLayer, SharedLayer
from tensord.errors import UnderPressure, UsageError
from tensord.shm.payloads.prefix import block_key
from tensord.testing.fake_vram import FakeCard, FakeTensor, FakeVram

from ...daemon_process import PATIENCE_S, Daemon, until
from ..device.card import CARD, card_folder, filled, filled_until, watching
from .device_cases import CASES, row

_numbers = count()
CARD_BYTES = 4 << 20
BLOCK = 16
HEADS, DIM = 2, 64


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Daemon, FakeCard]]:
    """A daemon and a card that stays nearly empty."""
    with card_folder() as folder, FakeCard(folder, CARD, CARD_BYTES) as card, watching(card) as daemon:
        yield daemon.start(), card


@pytest.fixture
def vram(shared: tuple[Daemon, FakeCard]) -> Iterator[FakeVram]:
    made = FakeVram(shared[1])
    yield made
    gc.collect()
    made.give_back()


@pytest.fixture
def held(shared: tuple[Daemon, FakeCard], vram: FakeVram) -> Iterator[tensord.DeviceCache]:
    with shared[0].client() as client, tensord.DeviceCache(client, vram, uses_every_s=0.02) as opened:
        yield opened
        assert opened.error is None


@pytest.fixture
def card() -> Iterator[FakeCard]:
    """One that a test may fill, with a daemon of its own."""
    with card_folder() as folder, FakeCard(folder, CARD, CARD_BYTES) as opened:
        yield opened


@pytest.fixture
def namespace() -> tensord.Namespace:
    return tensord.Namespace(model=f"model-{next(_numbers)}", revision="1", dtype="float32", processor="none")


def made(held: tensord.DeviceCache, namespace: tensord.Namespace, n_on_device: int) -> PrefixCache:
    return PrefixCache(held.client, namespace, block_tokens=BLOCK, n_on_device=n_on_device, device=held)


def tokens(number: int, length: int = 40) -> Any:
    """Of which no two sequences have a token in common."""
    return np.arange(length, dtype=np.uint32) + 1000 * number


def values(number: int, layer: int, length: int = 40) -> Any:
    """What a layer keeps of a sequence, (1, HEADS, length, DIM) float32."""
    made = np.random.default_rng((number, layer)).standard_normal((1, HEADS, length, DIM))
    return made.astype(np.float32)


def on_device(vram: FakeVram, number: int, length: int = 40) -> list[PrefixLayer]:
    return [NormalLayer({"k": vram.upload(values(number, layer, length))}) for layer in (0, 1)]


def put(cache: PrefixCache, vram: FakeVram, *numbers: int) -> None:
    for number in numbers:
        assert cache.put(tokens(number), on_device(vram, number), wait=True).state == "stored"


def key_of(namespace: tensord.Namespace, cache: PrefixCache, number: int) -> list[bytes]:
    """The keys of a sequence's blocks in the host tier."""
    layers: Any = [NormalLayer({"k": values(number, layer)}) for layer in (0, 1)]
    sequence = cache._sequence(tokens(number), layers, (), {}, "", 0.0, None)
    return [keyed.key for keyed in sequence.chain(namespace, BLOCK)]


def blocks_of(client: tensord.Client, keys: list[bytes]) -> list[Any] | None:
    """What the host tier has of a sequence: for each layer its values; None if a block is missing."""
    leases = [client.get(key) for key in keys]
    if not all(leases):
        return None
    trees = [lease.tree for lease in leases if lease is not None]
    assert [block_key(key[:8], tree["prefix"].data) for key, tree in zip(keys, trees, strict=True)] == keys
    parts = [tree["layers"] for tree in trees]
    return [np.concatenate([part[layer]["k"] for part in parts], axis=-2) for layer in (0, 1)]


def sequences(cache: PrefixCache) -> DeviceSequences:
    found = cache._on_device
    assert found is not None
    return found


def matched(cache: PrefixCache, number: int) -> tensord.PrefixMatch | None:
    """A query that goes on from a whole sequence: asks nobody where that is on the device."""
    return cache.match(np.append(tokens(number), np.uint32(7)))


def on_card(cache: PrefixCache, numbers: range) -> list[int]:
    """Which sequences are there, without using them."""
    sequences(cache).match(row(0, 0), ())  # what has left is noticed by whoever looks
    there = {int(resident.sequence.tokens[0]) // 1000 for resident in sequences(cache)._residents.values()}
    return [number for number in numbers if number in there]


# ---- matching


def test_a_sequence_on_the_device_is_matched_as_the_tensors_that_were_put(
    held: tensord.DeviceCache, namespace: tensord.Namespace, vram: FakeVram
) -> None:
    cache = made(held, namespace, 2)
    layers = on_device(vram, 1)
    assert cache.put(tokens(1), layers, agent="planner", wait=True).state == "stored"
    query = np.concatenate([tokens(1)[:30], tokens(2)])
    found = sequences(cache).match(query, ())
    assert found is not None and found[0] == 30
    for number, layer in enumerate(layers):
        assert isinstance(layer, NormalLayer)
        (part,) = found[1].layers[number]
        assert np.shares_memory(part["k"]._array, layer.tree["k"]._array)
        assert np.array_equal(part["k"].numpy(), values(1, number)[:, :, :30])
        assert np.array_equal(found[1].joined(number)["k"], values(1, number)[:, :, :30])
        own = found[1].torch(number)["k"]
        assert isinstance(own, FakeTensor) and np.array_equal(own.numpy(), values(1, number)[:, :, :30])
        assert not np.shares_memory(own._array, layer.tree["k"]._array)
    assert found[1].snapshot is None
    for wrong in (-1, 2):
        with pytest.raises(UsageError, match="2"):
            found[1].joined(wrong)
    assert sequences(cache).match(tokens(2), ()) is None
    assert held.total_tokens == 40


@pytest.mark.parametrize("case", CASES)
def test_a_match_finds_the_longest_cached_prefix(case: str, vram: FakeVram, namespace: tensord.Namespace) -> None:
    stored, query, asked, offset = CASES[case]
    with tensord.Client("/nonexistent/control.sock") as client, tensord.DeviceCache(client, vram) as held:
        cache = made(held, namespace, len(stored))
        for given, layers, snapshots, items in stored:
            uploaded = [_uploaded(vram, layer) for layer in layers]
            states = {at: [vram.upload(state) for state in kept] for at, kept in snapshots.items()}
            put = cache.put(given, uploaded, snapshots=states, media=items, wait=True)
            assert put.state == "sent", put
        match = cache.match(query, media=asked)
        assert (match.offset if match is not None else 0) == offset
        if match is not None:
            exact = any(isinstance(layer, RecurrentLayer) for layer in stored[0][1]) and offset != 3
            assert (match.snapshot is not None) == (exact or offset == 10)
            assert match.remaining.tolist() == query[offset:].tolist()
            assert match.keep["image"] == sum(item.modality == "image" and item.end > offset for item in asked)


def _uploaded(vram: FakeVram, layer: PrefixLayer) -> PrefixLayer:
    match layer:
        case NormalLayer(tree):
            return NormalLayer(vram.upload(tree))
        case RotatingLayer(tree, window):
            return RotatingLayer(vram.upload(tree), window)
        case RecurrentLayer(state):
            return RecurrentLayer(vram.upload(state))
        case _:
            return layer


# ---- offloading


def test_above_n_on_device_the_oldest_is_in_the_host_tier_bit_for_bit(
    held: tensord.DeviceCache, namespace: tensord.Namespace, vram: FakeVram, shared: tuple[Daemon, FakeCard]
) -> None:
    cache = made(held, namespace, 2)
    put(cache, vram, 1, 2, 3)
    other = shared[0].client()
    until(lambda: on_card(cache, range(5)) == [2, 3], "the oldest to leave the card")
    found = blocks_of(other, key_of(namespace, cache, 1))
    assert found is not None
    for layer in (0, 1):
        assert found[layer].tobytes() == values(1, layer).tobytes()
    assert blocks_of(other, key_of(namespace, cache, 2)) is None
    assert held.tally.dropped == 0
    match = matched(cache, 3)
    assert match is not None and match.offset == 40


def test_the_longer_of_device_and_host_is_given_and_of_equal_ones_the_device(
    held: tensord.DeviceCache, namespace: tensord.Namespace, vram: FakeVram
) -> None:
    cache = made(held, namespace, 4)
    host = PrefixCache(held.client, namespace, block_tokens=BLOCK)

    def stored(number: int, on_host: int, on_card: int) -> None:
        layers = [NormalLayer({"k": values(number, layer)[:, :, :on_host]}) for layer in (0, 1)]
        assert host.put(tokens(number, on_host), layers, wait=True).state == "stored"
        uploaded = [NormalLayer({"k": vram.upload(values(number, layer)[:, :, :on_card])}) for layer in (0, 1)]
        assert cache.put(tokens(number, on_card), uploaded, wait=True).state == "stored"

    for number, (on_host, on_card) in enumerate([(40, 20), (20, 40), (30, 30)], start=1):
        stored(number, on_host, on_card)
        match = cache.match(np.append(tokens(number), row(1, 2)))
        assert match is not None and match.offset == max(on_host, on_card)
        part = match.layers[1][0]["k"]
        assert isinstance(part, np.ndarray if on_host > on_card else FakeTensor)
        assert np.array_equal(match.joined(1)["k"], values(number, 1)[:, :, : match.offset])


def test_evict_all_counts_what_is_on_the_device_and_in_the_host_tier(
    held: tensord.DeviceCache, namespace: tensord.Namespace, vram: FakeVram
) -> None:
    cache = made(held, namespace, 1)
    put(cache, vram, 1, 2)
    assert cache.evict_caches() == 1
    cache.put_snapshot([b"block"], {"state": np.zeros(3)}, wait=True)
    assert cache.evict_all() == 1 + 3 + 1
    assert [matched(cache, number) for number in (1, 2)] == [None, None]
    assert cache.snapshot([b"block"]) is None
    assert held.size == 0 and cache.evict_all() == 0


def test_states_and_windows_that_rolled_over_go_along(
    held: tensord.DeviceCache, namespace: tensord.Namespace, vram: FakeVram
) -> None:
    """What stands at the end is the layers' own, and is copied once."""
    cache = made(held, namespace, 1)
    window, states = values(1, 0, 8), [values(1, at, 5) for at in (2, 3)]
    layers: list[PrefixLayer] = [
        RotatingLayer(vram.upload(window), 8),
        SharedLayer(),
        RecurrentLayer({"ssm": vram.upload(states[0]), "step": 40}),
        NormalLayer(vram.upload(values(1, 4))),
    ]
    early = [vram.upload(values(1, 5, 8)), {"ssm": vram.upload(states[1]), "step": 20}]
    given = tokens(1)
    cache.put(given, layers, snapshots={20: early}, wait=True)
    given[:] = 0
    entry = held._entries.find(*held._entries.keys())
    assert entry is not None and list(entry.tree["snapshots"]) == [20]
    match = matched(cache, 1)
    assert match is not None and match.offset == 40
    assert match.snapshot is not None and match.snapshot[2]["step"] == 40
    assert [len(parts) for parts in match.layers] == [0, 0, 0, 1]
    assert np.array_equal(match.joined(0), window)
    assert match.joined(1) is None
    match.release()
    resident = next(iter(sequences(cache)._residents.values()))
    put(cache, vram, 2)
    until(lambda: on_card(cache, range(5)) == [2], "it to leave the card")
    assert resident.copy is not None and (resident.copy.blocks, resident.copy.snapshots) == (3, 2)
    trees = [lease.tree for put in resident.copy._puts if (lease := held.client.get(put[1].key)) is not None]
    assert len(trees) == 5
    first, last = (tree["layers"] for tree in trees if tree["layers"][2] is not None)
    assert (first[2]["step"], last[2]["step"]) == (20, 40)
    assert np.array_equal(first[2]["ssm"], states[1]) and np.array_equal(last[2]["ssm"], states[0])
    assert np.array_equal(last[0], window) and first[1] is None and first[3] is None
    whole = np.concatenate([tree["layers"][3] for tree in trees if tree["layers"][3] is not None], axis=-2)
    assert np.array_equal(whole, values(1, 4))


def test_a_block_that_the_host_refuses_stays_and_is_tried_again(card: FakeCard, namespace: tensord.Namespace) -> None:
    vram = FakeVram(card)
    with watching(card, limits_object_bytes_max=4096) as daemon:
        held = tensord.DeviceCache(daemon.start().client(), vram)
        cache = made(held, namespace, 1)
        put(cache, vram, 1, 2, 3)
        assert cache.evict_caches() == 0
        assert on_card(cache, range(5)) == [1, 2, 3]
        assert held.tally.stayed >= 2 and held.tally.dropped == 0
        for number in (1, 2, 3):
            match = matched(cache, number)
            assert match is not None and np.array_equal(match.joined(1)["k"], values(number, 1))
        held.close()


def test_orders_and_emergencies_of_the_governor_and_a_daemon_that_is_away(
    card: FakeCard, namespace: tensord.Namespace
) -> None:
    """One after the other, with one daemon."""
    vram = FakeVram(card)
    with watching(card) as daemon, tensord.DeviceCache(daemon.start().client(), vram) as held:
        cache = made(held, namespace, 8)
        put(cache, vram, 1, 2)
        filled_until(card, 0.93, lambda: held.size == 0, "the card to be emptied")
        for number in (1, 2):
            found = blocks_of(held.client, key_of(namespace, cache, number))
            assert found is not None and np.array_equal(found[0], values(number, 0))
        assert len(sequences(cache)) == 0 and cache.evict_caches() == 0

        layers = on_device(vram, 3)
        filled(card, 0.99)
        until(lambda: held.is_blocked, "the emergency")
        refused = cache.put(tokens(3), layers, wait=True)
        assert refused.state == "refused" and isinstance(refused.error, UnderPressure)
        assert len(sequences(cache)) == 0
        card.occupy(0)
        until(lambda: not held.is_blocked, "the emergency to end")

        cache = made(held, namespace, 1)
        put(cache, vram, 4)
        daemon.kill()
        until(lambda: not held.client.connected, "the client to notice")
        late = cache.put(tokens(5), on_device(vram, 5), wait=True)
        assert late.state == "sent"
        assert cache.evict_caches() == 0 and on_card(cache, range(6)) == [4, 5]
        daemon.start()
        assert held.client.wait_connected(PATIENCE_S)
        assert late.wait(PATIENCE_S).state == "stored"
        assert cache.evict_caches() == 1 and on_card(cache, range(6)) == [5]


def test_the_blocks_of_a_match_leave_after_its_release(
    held: tensord.DeviceCache, namespace: tensord.Namespace, vram: FakeVram
) -> None:
    cache = made(held, namespace, 1)
    put(cache, vram, 1)
    match = matched(cache, 1)
    assert match is not None
    put(cache, vram, 2)
    assert cache.evict_caches() == 0 and on_card(cache, range(5)) == [1, 2]
    tensor = match.layers[0][0]["k"]
    match.release()
    until(lambda: on_card(cache, range(5)) == [2], "it to go")
    assert np.array_equal(tensor.numpy(), values(1, 0))
    assert cache.evict_caches() == 1


# ---- counts, and what does not happen


def test_an_expired_block_is_a_miss(held: tensord.DeviceCache, namespace: tensord.Namespace, vram: FakeVram) -> None:
    cache = made(held, namespace, 4)
    cache.put(tokens(1), on_device(vram, 1), ttl_s=0.05)
    until(lambda: len(sequences(cache)) == 0, "it to expire")
    assert held.size == 0


def test_arrays_of_the_host_go_to_the_host_and_a_count_needs_a_device(
    held: tensord.DeviceCache, namespace: tensord.Namespace
) -> None:
    cache = made(held, namespace, 4)
    layers = [NormalLayer({"k": values(1, layer)}) for layer in (0, 1)]
    assert cache.put(tokens(1), layers, wait=True).state == "stored"
    assert held.size == 0 and blocks_of(held.client, key_of(namespace, cache, 1)) is not None
    with pytest.raises(UsageError, match="n_on_device"):
        PrefixCache(held.client, namespace, n_on_device=1)


def test_the_child_of_a_fork_has_none(held: tensord.DeviceCache, namespace: tensord.Namespace, vram: FakeVram) -> None:
    cache = made(held, namespace, 4)
    put(cache, vram, 1)
    with sequences(cache)._lock:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            os._exit(0 if len(sequences(cache)) == 0 and sequences(cache).evict_all() == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert on_card(cache, range(5)) == [1]
