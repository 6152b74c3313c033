"""What engines that share KV promise: the answers of an engine that shares none; no shared prefix is computed twice."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import tensord

from ...daemon_process import MIB, RING_BYTES, Daemon, until
from ..conftest import StartEngine, fresh
from ..engine import Answer
from ..tiny_llava import write_tiny_llava
from .conftest import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    KVStand,
    StartEngines,
    asked,
    fresh_text,
    replace_all,
    with_kv,
)

ANSWER_TOKENS = 8


def test_a_second_engine_computes_only_its_own_suffix_of_a_shared_system_prompt(kv: KVStand) -> None:
    system = fresh_text()
    kv.store(kv.first, text=system + "first question")
    before = kv.second.ask("metrics", label="source")
    answer, computed = asked(kv.second, text=system + "second question")
    assert answer == kv.plain.generate(text=system + "second question")
    counted = kv.second.ask("metrics", label="source")
    loaded = counted["external_kv_transfer"] - before["external_kv_transfer"]
    alone = counted["local_compute"] - before["local_compute"]
    assert loaded >= len(system) - BLOCK_TOKENS
    assert computed == alone + ANSWER_TOKENS - 1
    assert alone <= 2 * BLOCK_TOKENS


def test_an_answer_is_made_of_the_loaded_blocks(kv: KVStand, client: tensord.Client) -> None:
    text = fresh_text()
    right, keys = kv.store(kv.first, text=text)
    replace_all(client, keys, np.zeros_like)
    answer, computed = asked(kv.second, text=text)
    assert answer != right
    assert computed <= 2 * BLOCK_TOKENS


def test_a_new_engine_finds_what_was_stored_before_a_kill_and_a_restart_of_the_daemon(
    kv: KVStand, kv_model: Path, engines: StartEngines
) -> None:
    text = fresh_text()
    right, _ = kv.store(kv.first, text=text)
    kv.daemon.kill()
    kv.daemon.start()
    with engines(kv_model, **with_kv(kv.daemon.socket)) as (new,):
        answer, computed = asked(new, text=text)
        assert answer == right
        assert computed <= 2 * BLOCK_TOKENS


def test_one_uuid_for_two_pictures_gives_each_engine_its_own_pictures_answer(kv: KVStand) -> None:
    one, another, text = fresh(), fresh(), fresh_text()
    name = [f"clients-{one}"]
    kv.store(kv.first, one, text=text, uuids=name)
    answer, computed = asked(kv.second, another, text=text, uuids=name)
    assert answer == kv.plain.generate(another, text=text)
    assert computed > len(text)


def test_blocks_leave_the_ring_last_first_so_what_is_left_of_a_prefix_is_of_use(
    kv: KVStand, client: tensord.Client
) -> None:
    text = fresh_text()
    right, keys = kv.store(kv.first, text=text)
    namespace = tensord.Namespace(model="noise", revision="1", dtype="uint8", processor="none")
    noise = np.full(MIB // 8, 0xA5, np.uint8)
    left, held = keys, []
    for number in range(2 * RING_BYTES // len(noise)):
        name = namespace.key("encoder", "image", number.to_bytes(4))
        client.put(name, noise, wait=True)
        # Held, so that the policy cannot evict it instead of blocks.
        held.append(client.get(name))
        left = {key for key in keys if client.contains(key)}
        if len(left) < len(keys):
            break
    # Room for the next puts is made after a put: until no block leaves between two answers of the daemon.
    before: set[bytes] = set()
    while before != left:
        client.status()
        before, left = left, {key for key in keys if client.contains(key)}
    assert 0 < len(left) < len(keys)
    held.clear()
    prompt_tokens = len(keys) * BLOCK_TOKENS
    answer, computed = asked(kv.second, text=text)
    assert answer == right
    assert computed <= prompt_tokens - len(left) * BLOCK_TOKENS + BLOCK_TOKENS + ANSWER_TOKENS
    client.clear(namespace)


def test_engines_share_chunks_of_several_blocks(kv: KVStand, kv_model: Path, engines: StartEngines) -> None:
    text, chunk = fresh_text(), 5
    options = with_kv(kv.daemon.socket, blocks_per_chunk=chunk)
    with engines(kv_model, 2, **options) as (one, other):
        right, _ = kv.store(one, text=text)
        # The last question's first block is in the engine's own cache, so a load begins in the middle of a chunk.
        other.generate(text=text[: BLOCK_TOKENS + 8])
        answer, computed = asked(other, text=text)
        assert answer == right == kv.plain.generate(text=text)
        assert computed <= (chunk + 1) * BLOCK_TOKENS
        assert asked(kv.second, text=text)[1] > len(text), "chunks of another size have other names"


def test_engines_of_other_weights_or_block_sizes_share_nothing(
    kv: KVStand, tmp_path: Path, kv_model: Path, engines: StartEngines
) -> None:
    text = fresh_text()
    kv.store(kv.first, text=text)
    other_model = write_tiny_llava(tmp_path, seed=1, positions=1024)
    options = with_kv(kv.daemon.socket)
    for model, block_tokens in ((other_model, BLOCK_TOKENS), (kv_model, 2 * BLOCK_TOKENS)):
        with engines(model, **{**options, "block_size": block_tokens}) as (other,):
            answer, computed = asked(other, text=text)
            assert computed > len(text)
            assert (answer == kv.plain.generate(text=text)) == (model == kv_model)
            ((size, tag),) = re.findall(r"in chunks of (\d+) tokens, .* in namespace (\w+):", other.log)
            assert int(size) == block_tokens
            assert tag not in kv.first.log, "the log tells why nothing is shared"


def test_preempted_requests_answer_as_others(kv: KVStand, kv_model: Path, engines: StartEngines) -> None:
    texts = [fresh_text() for _ in range(2)]
    options = {**with_kv(kv.daemon.socket), "kv_cache_memory_bytes": 44 * BLOCK_BYTES, "max_num_batched_tokens": 256}
    with engines(kv_model, **options) as (small,):
        for text in texts:
            kv.store(small, text=text, tokens=1)
        names = [small.add(text=text, tokens=64) for text in texts]
        answers: dict[str, Answer] = {}
        while len(answers) < len(texts):
            answers |= small.step()
        assert small.ask("metrics")["vllm:num_preemptions"] > 0
        for name, text in zip(names, texts, strict=True):
            assert answers[name] == kv.plain.generate(text=text, tokens=64)
        kv.settled(small)


def test_each_of_an_engines_ranks_loads_what_another_engine_of_as_many_stored(
    kv: KVStand, kv_model: Path, engines: StartEngines
) -> None:
    text = fresh_text()
    options = {**with_kv(kv.daemon.socket), "separate": True, "tensor_parallel_size": 2}
    with engines(kv_model, clients=3, **options) as (one,):
        there = kv.keys()
        right = one.generate(text=text)
        blocks = len(text) // BLOCK_TOKENS
        until(lambda: len(kv.keys() - there) >= 2 * blocks and one.ask("step") is not None, "both ranks' blocks")
    with engines(kv_model, clients=3, **options) as (other,):
        assert other.generate(text=text) == right
        tokens = other.ask("metrics", label="source")
        assert tokens["external_kv_transfer"] >= len(text) - BLOCK_TOKENS
        assert tokens["local_compute"] <= 2 * BLOCK_TOKENS
    # Half of each sum was made on each rank, and half of each block is of each rank.
    assert asked(kv.second, text=text)[1] > len(text)


def test_a_model_with_sliding_windows_loads_the_windows_end(
    kv: KVStand, kv_model: Path, start_engine: StartEngine, engines: StartEngines
) -> None:
    text = fresh_text()
    windows = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
    options = {**with_kv(kv.daemon.socket), "hf_overrides": {"text_config": windows}}
    alone = {name: value for name, value in options.items() if name != "kv_transfer_config"}
    with engines(kv_model, 2, **options) as (one, other):
        kv.store(one, text=text + "first")
        answer, computed = asked(other, text=text + "second")
        assert computed <= 3 * BLOCK_TOKENS
    with start_engine(kv_model, **alone) as plain:
        assert answer == plain.generate(text=text + "second")
    assert answer != kv.plain.generate(text=text + "second"), "the window changes the answer"


def test_a_reset_of_the_cache_with_its_connector_drops_stored_blocks_for_all_engines(kv: KVStand) -> None:
    text = fresh_text()
    right, keys = kv.store(kv.first, text=text)
    assert kv.first.ask("reset_kv")
    until(lambda: not keys & kv.keys(), "the blocks are dropped")
    answer, computed = asked(kv.second, text=text)
    assert answer == right
    assert computed > len(text)
    # Both engines share again.
    new = fresh_text()
    kv.store(kv.first, text=new)
    assert asked(kv.second, text=new)[1] <= 2 * BLOCK_TOKENS


@pytest.mark.parametrize("calls", [["reset_encoder_cache"], ["sleep", "wake_up"]])
def test_sharing_goes_on_after_a_reset_and_a_sleep_that_keep_the_weights_and_no_block_is_dropped(
    kv: KVStand, calls: list[str]
) -> None:
    text, new = fresh_text(), fresh_text()
    right, keys = kv.store(kv.first, text=text)
    for call in calls:
        kv.second.ask("engine", method=call)
    answer, computed = asked(kv.second, text=text)
    assert answer == right
    assert computed <= 2 * BLOCK_TOKENS
    assert keys <= kv.keys()
    kv.store(kv.second, text=new)
    assert asked(kv.first, text=new)[1] <= 2 * BLOCK_TOKENS


def test_blocks_that_a_sleep_loses_are_stored_before_it_as_they_were(kv: KVStand) -> None:
    text = fresh_text()
    there = kv.keys()
    # One step, whose blocks vLLM hands over in the next one.
    right = kv.first.generate(text=text, tokens=1)
    kv.first.ask("sleep_and_lose_kv")
    kv.first.ask("step")
    until(lambda: kv.keys() - there, "blocks are stored")
    kv.settled(kv.first)
    answer, computed = asked(kv.second, text=text, tokens=1)
    assert computed <= 2 * BLOCK_TOKENS
    assert answer == right


def test_a_reset_after_a_change_of_weights_around_vllms_methods_ends_sharing(
    kv: KVStand, kv_model: Path, engines: StartEngines
) -> None:
    text = fresh_text()
    with engines(kv_model, **with_kv(kv.daemon.socket)) as (one,):
        kv.store(kv.first, text=text)
        one.ask("double_weights")
        one.ask("engine", method="reset_encoder_cache")
        assert asked(one, text=text)[1] > len(text)
        assert one.log.count("From now on it shares no KV") == 1


def test_an_engine_with_both_connectors_neither_encodes_nor_computes_what_another_one_did(
    kv: KVStand, kv_model: Path, engines: StartEngines
) -> None:
    picture, text, later = fresh(), fresh_text(), "another question about the picture"
    options = {**with_kv(kv.daemon.socket), "socket": kv.daemon.socket}
    with engines(kv_model, 2, **options) as (one, other):
        right, _ = kv.store(one, picture, text=text)
        answer, computed = asked(other, picture, text=text)
        assert answer == right == kv.plain.generate(picture, text=text)
        assert computed <= 2 * BLOCK_TOKENS
        assert other.generate(picture, text=later) == kv.plain.generate(picture, text=later)
        assert other.encoded() == 0


def test_an_engine_computes_only_its_own_suffix_of_a_prompt_that_another_host_has_computed(
    kv_model: Path, start_engine: StartEngine, tmp_path: Path
) -> None:
    """Two hosts with one remote store: each a daemon of its own here, and a directory for the store."""
    (tmp_path / "store").mkdir()
    url = f"dir://{tmp_path / 'store'}"
    with Daemon(remote_url=url) as daemon, Daemon(remote_url=url) as other_daemon:
        daemon.start()
        other_daemon.start()
        with (
            start_engine(kv_model, **with_kv(daemon.socket)) as engine,
            start_engine(kv_model, **with_kv(other_daemon.socket)) as other,
            tensord.Client(daemon.socket) as client,
        ):
            engine.wait_up()
            other.wait_up()
            stand = KVStand(daemon, engine, other, engine)
            text = fresh_text()
            right, keys = stand.store(engine, text=text)
            # A second use has them written: computing them took a time that nobody knows.
            assert all(client.get(each) is not None for each in keys)
            daemon.until(lambda status: status["store"]["remote"].get("written") == len(keys), "blocks are written")
            answer, computed = asked(other, text=text)
            assert answer == right
            assert computed <= 2 * BLOCK_TOKENS
            assert other_daemon.status()["store"]["remote"]["fetched"] == len(keys)
            # Of what no host has computed, the store finds nothing, and no answer waits for it for long.
            new = fresh_text()
            assert other.generate(text=new) == engine.generate(text=new)
