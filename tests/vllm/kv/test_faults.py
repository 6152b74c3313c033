"""An engine never dies of shared KV, and never hangs: whatever becomes of daemon and entries, answers are right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensord
from tensord.client.reading.ring_mapping import Handle
from tensord.errors import Corrupt
from tensord.shm.ring.layout import SPAN_HEADER_BYTES

from ...daemon_process import MIB, RING_BYTES, until
from ..engine import Answer, Engine
from .conftest import BLOCK_BYTES, BLOCK_TOKENS, KVStand, StartEngines, asked, fresh_text, replace_all, with_kv


@pytest.fixture(autouse=True)
def sharing_goes_on(kv: KVStand) -> Iterator[None]:
    """After each test, and with the daemon back, the second engine loads what the first has stored."""
    yield
    kv.mended()
    until(lambda: stores(kv), "the first engine's client is attached again, and stores")
    until(lambda: loads(kv), "the second engine's client is attached again, and loads")
    kv.settled(kv.first, kv.second)


def stores(kv: KVStand) -> bool:
    """Whether blocks of the first engine's next prompt are stored. Puts are lost until its client is attached."""
    there = kv.keys()
    kv.first.generate(text=fresh_text())
    kv.settled(kv.first)
    return bool(kv.keys() - there)


def loads(kv: KVStand) -> bool:
    """Whether the second engine loads what the first has stored. It misses until its client is attached."""
    text = fresh_text()
    right, _ = kv.store(kv.first, text=text)
    answer, computed = asked(kv.second, text=text)
    assert answer == right == kv.plain.generate(text=text)
    return computed <= 2 * BLOCK_TOKENS


def test_a_daemon_that_does_not_move_delays_no_request(kv: KVStand) -> None:
    stored, new = fresh_text(), fresh_text()
    kv.store(kv.first, text=stored)
    kv.daemon.pause()
    answer, computed = asked(kv.second, text=stored)
    assert answer == kv.plain.generate(text=stored)
    assert computed <= 2 * BLOCK_TOKENS, "a load needs no daemon"
    for _ in range(3):
        assert kv.second.generate(text=new) == kv.plain.generate(text=new)


@pytest.mark.parametrize("place", ["matched", "loading"])
@pytest.mark.parametrize("how", ["killed", "replaced"])
def test_a_daemon_killed_or_replaced_after_blocks_were_promised_changes_no_answer(
    kv: KVStand, how: str, place: str
) -> None:
    text = fresh_text()
    right, _ = kv.store(kv.first, text=text)
    _begin_and_stop(kv.second, text, place)
    if how == "killed":
        kv.daemon.kill()
    else:
        kv.daemon.interrupt()  # takes its memory with it
        kv.daemon.start()
    kv.second.go()
    assert kv.second.result() == right


@pytest.mark.parametrize("place", ["matched", "loading"])
def test_promised_blocks_are_loaded_though_they_were_evicted_and_the_ring_overwritten(
    kv: KVStand, client: tensord.Client, place: str
) -> None:
    text = fresh_text()
    right, keys = kv.store(kv.first, text=text)
    before = kv.second.ask("computed")
    _begin_and_stop(kv.second, text, place)
    assert client.evict(*keys) == len(keys)
    _overwrite(client)
    kv.second.go()
    assert kv.second.result() == right
    assert kv.second.ask("computed") - before <= 2 * BLOCK_TOKENS


def test_engines_share_in_a_new_ring_although_one_of_them_has_reset_the_cache_before(kv: KVStand) -> None:
    """Generations live as long as the ring. The fixture has the engines share afterwards."""
    _, keys = kv.store(kv.first, text=fresh_text())
    assert kv.first.ask("reset_kv")
    until(lambda: not keys & kv.keys(), "the blocks are dropped")
    kv.daemon.interrupt()
    kv.daemon.start()


def test_a_block_whose_bytes_changed_is_computed_and_replaced(kv: KVStand, client: tensord.Client) -> None:
    text = fresh_text()
    right, keys = kv.store(kv.first, text=text)
    damaged = _damage(kv, client, keys)
    answer, computed = asked(kv.second, text=text)
    assert answer == right
    assert computed > 2 * BLOCK_TOKENS
    # Requests later do not meet it again. If it is the first block, vLLM offers none of them to be stored before then.
    assert asked(kv.second, text=text + ".")[0] == kv.plain.generate(text=text + ".")
    until(lambda: _is_whole(client, damaged), "the block is evicted, and stored again by the engine that computed it")


@pytest.mark.parametrize(
    "make",
    [lambda chunk: chunk[:, :-64].copy(), lambda chunk: chunk.astype(np.int16), lambda chunk: {"kv": chunk}],
    ids=["another shape", "another dtype", "another tree"],
)
def test_a_block_of_another_form_is_computed(kv: KVStand, client: tensord.Client, make: Any) -> None:
    text = fresh_text()
    right, keys = kv.store(kv.first, text=text)
    replace_all(client, keys, make)
    answer, computed = asked(kv.second, text=text)
    assert answer == right
    assert computed > len(text)


def test_a_block_whose_load_failed_is_computed_by_that_request_and_loaded_by_the_next_one(kv: KVStand) -> None:
    text, sound = fresh_text(), 3
    right, keys = kv.store(kv.first, text=text)
    before, damaged = kv.second.ask("computed"), kv.second.log.count("blocks are damaged")
    begun_loads = kv.second.ask("passed")["loading"]
    kv.second.ask("lose_block", after=sound)
    try:
        assert kv.second.generate(text=text) == right
        loads = kv.second.ask("passed")["loading"] - begun_loads
        assert loads == 2, "one of all blocks, and one of those before the lost block"
    finally:
        kv.second.ask("lose_block", after=None)
    missing_tokens = (len(keys) - sound) * BLOCK_TOKENS
    assert missing_tokens <= kv.second.ask("computed") - before <= missing_tokens + BLOCK_TOKENS
    kv.settled(kv.second)
    assert kv.second.log.count("blocks are damaged") == damaged
    assert kv.second.ask("engine", method="reset_prefix_cache")
    answer, computed = asked(kv.second, text=text)
    assert answer == right
    assert computed <= BLOCK_TOKENS


def test_a_block_of_which_one_ranks_part_is_damaged_or_gone_is_computed(
    kv: KVStand, client: tensord.Client, kv_model: Path, engines: StartEngines
) -> None:
    options = {**with_kv(kv.daemon.socket), "separate": True, "tensor_parallel_size": 2}
    with engines(kv_model, clients=3, **options) as (engine,):
        for harm in ("none", "damaged", "gone"):
            text = fresh_text()
            right, keys = _store_on_two_ranks(kv, engine, text)
            assert right == kv.plain.generate(text=text)
            if harm == "damaged":
                _damage(kv, client, keys)
            elif harm == "gone":
                assert client.evict(min(keys)) == 1
            assert engine.ask("engine", method="reset_prefix_cache")
            before = engine.ask("metrics", label="source")["local_compute"]
            assert engine.generate(text=text) == right
            computed = engine.ask("metrics", label="source")["local_compute"] - before
            assert (computed > BLOCK_TOKENS) == (harm != "none")
            until(lambda: _goes_on(engine) and not kv.daemon.status()["pins"], "both ranks' pins end")


def test_a_ring_full_of_what_others_hold_changes_no_answer(kv: KVStand, client: tensord.Client) -> None:
    namespace = tensord.Namespace(model="held", revision="1", dtype="uint8", processor="none")
    held: list[tensord.Lease | None] = []
    # Down to holes that a block does not fit in; and no engine has a place from before.
    for size_bytes in (MIB // 2, BLOCK_BYTES // 2, BLOCK_BYTES // 2):
        noise = np.full(size_bytes, 0xA5, np.uint8)
        while (key := namespace.key("encoder", "image", len(held).to_bytes(4))) and (
            client.put(key, noise, wait=True, timeout_s=30).state == "stored"
        ):
            held.append(client.get(key))
        kv.daemon.until(lambda status: not status["store"]["lent_bytes"], "all places to be given back")
    text = fresh_text()
    right = kv.plain.generate(text=text)
    assert kv.first.generate(text=text) == right
    kv.first.ask("settle")
    answer, computed = asked(kv.second, text=text)
    assert answer == right
    assert computed > len(text), "there was room after all"
    held.clear()
    client.clear()


@pytest.mark.parametrize("place", ["matched", "loading"])
def test_a_request_aborted_before_its_load_is_done_leaves_nothing_held(kv: KVStand, place: str) -> None:
    text = fresh_text()
    right, _ = kv.store(kv.first, text=text)
    promised = kv.second.ask("passed")[place]
    name = kv.second.add(text=text)
    while kv.second.ask("passed")[place] == promised:
        kv.second.step()
    kv.second.ask("abort", name=name)
    kv.settled(kv.second)
    assert kv.second.generate(text=text) == right


def _begin_and_stop(engine: Engine, text: str, place: str) -> None:
    engine.stop_at(place)
    engine.begin(text=text)
    assert engine.stopped() == place


def _store_on_two_ranks(kv: KVStand, engine: Engine, text: str) -> tuple[Answer, set[bytes]]:
    """As `KVStand.store`, for an engine in processes of its own."""
    there = kv.keys()
    answer = engine.generate(text=text)
    parts = 2 * (len(text) // BLOCK_TOKENS)
    until(lambda: _goes_on(engine) and len(kv.keys() - there) >= parts, "both ranks' parts are stored")
    return answer, kv.keys() - there


def _goes_on(engine: Engine) -> bool:
    """Has the engine make steps, for a request too short for a block. In processes of its own, `step` waits for ever
    when it has none."""
    return bool(engine.generate(text="hi", tokens=1).tokens)


def _overwrite(client: tensord.Client) -> None:
    """Writes the whole ring over, but for what is pinned."""
    namespace = tensord.Namespace(model="noise", revision="1", dtype="uint8", processor="none")
    noise = np.full(MIB // 2, 0xA5, np.uint8)
    for number in range(2 * RING_BYTES // len(noise)):
        client.put(namespace.key("encoder", "image", number.to_bytes(4)), noise, wait=True, timeout_s=30)


def _is_whole(client: tensord.Client, key: bytes) -> bool:
    try:
        return client.get(key, verify=True) is not None
    except Corrupt:
        return False


def _damage(kv: KVStand, client: tensord.Client, keys: set[bytes]) -> bytes:
    """Changes a byte of one of the entries, in the ring's own memory. Gives its key."""
    key = min(keys)
    lease = client.get(key)
    assert lease is not None
    named = Handle.unpack(lease.handle() or b"")
    assert named is not None
    (ring,) = [path for path in kv.daemon.segments() if path.name.endswith(".ring")]
    with ring.open("r+b") as memory:
        memory.seek(named.offset + SPAN_HEADER_BYTES + named.payload_bytes - 100)
        memory.write(b"\xff" * 8)
    return key
