"""What engines that share KV promise: the answers of an engine that shares none; no shared prefix is computed twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import tensord

from ..conftest import fresh
from .conftest import BLOCK_TOKENS, KVStand, StartEngine, asked, fresh_text, replace_all, with_kv

ANSWER_TOKENS = 8


def test_a_second_engine_computes_only_its_own_suffix_of_a_shared_system_prompt(kv: KVStand) -> None:
    system = fresh_text()
    kv.store(kv.first, text=system + "first question")
    before = kv.second.ask("prompt_tokens")
    answer, computed = asked(kv.second, text=system + "second question")
    assert answer == kv.plain.generate(text=system + "second question")
    counted = kv.second.ask("prompt_tokens")
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
    kv: KVStand, kv_model: Path, start_engine: StartEngine
) -> None:
    text = fresh_text()
    right, _ = kv.store(kv.first, text=text)
    kv.daemon.kill()
    kv.daemon.start()
    with start_engine(kv_model, **with_kv(kv.daemon.socket)) as new:
        new.wait_up()
        kv.attached(new)
        answer, computed = asked(new, text=text)
        assert answer == right
        assert computed <= 2 * BLOCK_TOKENS


def test_requests_with_different_salts_share_no_blocks(kv: KVStand) -> None:
    text = fresh_text()
    right, _ = kv.store(kv.first, text=text, salt="one")
    answer, computed = asked(kv.second, text=text, salt="two")
    assert answer == right
    assert computed > len(text)
    answer, computed = asked(kv.second, text=text, salt="one")
    assert answer == right
    assert computed <= 2 * BLOCK_TOKENS


def test_one_uuid_for_two_pictures_gives_each_engine_its_own_pictures_answer(kv: KVStand) -> None:
    one, another, text = fresh(), fresh(), fresh_text()
    name = [f"clients-{one}"]
    kv.store(kv.first, one, text=text, uuids=name)
    answer, computed = asked(kv.second, another, text=text, uuids=name)
    assert answer == kv.plain.generate(another, text=text)
    assert computed > len(text)


def test_blocks_behind_a_picture_are_shared_whatever_clients_call_it(kv: KVStand) -> None:
    picture, text = fresh(), fresh_text()
    right, _ = kv.store(kv.first, picture, text=text)
    answer, computed = asked(kv.second, picture, text=text)
    assert answer == right == kv.plain.generate(picture, text=text)
    assert computed <= 2 * BLOCK_TOKENS
