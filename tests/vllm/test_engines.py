"""What engines that share a daemon promise: the answers of an engine without one, and no picture encoded twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest

import tensord

from ..daemon_process import until
from .conftest import MANAGER, Stand, encoding, fresh, teach_patience
from .engine import Engine
from .tiny_llava import WIDTH

StartEngine = Callable[..., Engine]

# vLLM's, for this model: 128 tokens of two layers' keys and values, each of 64 float32.
KV_BLOCK_BYTES: Final = 128 * 2 * 2 * WIDTH * 4


@pytest.fixture(scope="module")
def others(session_stand: Stand, other_model: Path, start_engine: StartEngine) -> Iterator[tuple[Engine, Engine]]:
    """Two engines of another model, whose weights change."""
    one, another = (
        start_engine(other_model, socket=session_stand.daemon.socket, ec_manager_config=MANAGER) for _ in range(2)
    )
    for engine in (one, another):
        engine.wait_up()
    session_stand.mended()
    session_stand.attached(one, another)
    with one, another:
        yield one, another


@pytest.fixture(scope="module")
def roles(session_stand: Stand, model: Path, start_engine: StartEngine) -> Iterator[tuple[Engine, Engine]]:
    """A producer, which in vLLM encodes and answers nothing, and a consumer with room for one long request."""
    socket = session_stand.daemon.socket
    producer = start_engine(model, socket=socket, connector={"ec_role": "ec_producer"})
    consumer = start_engine(
        model, socket=socket, connector={"ec_role": "ec_consumer"}, kv_cache_memory_bytes=3 * KV_BLOCK_BYTES
    )
    for engine in (producer, consumer):
        engine.wait_up()
    session_stand.mended()
    session_stand.attached(producer, consumer)
    with producer, consumer:
        yield producer, consumer


def test_answers_are_those_of_an_engine_without_the_connector(stand: Stand) -> None:
    picture = fresh()
    right = stand.plain.generate(picture)
    encoded, _ = stand.encode(stand.first, picture)
    assert encoded == right
    assert stand.second.generate(picture) == right
    assert stand.first.generate() == stand.plain.generate()


def test_a_picture_encoded_by_one_engine_is_not_encoded_by_a_concurrent_one(stand: Stand) -> None:
    picture = fresh()
    with encoding(stand.first) as by_first, encoding(stand.second) as by_second:
        stand.encode(stand.first, picture)
        stand.second.generate(picture)
        assert (by_first(), by_second()) == (1, 0)
    stand.unpinned()


def test_an_engine_asked_for_a_picture_that_another_encodes_waits_for_it(stand: Stand) -> None:
    picture = fresh()
    right = stand.plain.generate(picture)
    teach_patience(stand.second)
    with encoding(stand.first) as by_first, encoding(stand.second) as by_second:
        stand.first.stop_at("encode")
        stand.first.begin(picture)
        assert stand.first.stopped() == "encode"
        stand.second.begin(picture)
        stand.daemon.until(lambda status: status["store"]["claims_waiting"], "the second engine waits for the first")
        stand.first.go()
        assert stand.first.result() == stand.second.result() == right
        assert (by_first(), by_second()) == (1, 0)


def test_two_engines_asked_at_once_for_a_new_picture_encode_it_once(stand: Stand) -> None:
    picture = fresh()
    teach_patience(stand.first, stand.second)
    with encoding(stand.first) as by_first, encoding(stand.second) as by_second:
        stand.first.begin(picture)
        stand.second.begin(picture)
        assert stand.first.result() == stand.second.result()
        assert by_first() + by_second() == 1


def test_only_the_new_one_of_two_pictures_in_a_request_is_encoded(stand: Stand) -> None:
    there, new = fresh(), fresh()
    right = stand.plain.generate(there, new)
    stand.encode(stand.first, there)
    with encoding(stand.second) as by_second:
        assert stand.second.generate(there, new) == right
        assert by_second() == 1


def test_a_clients_name_for_one_picture_in_an_engine_and_another_in_the_next_gives_right_answers(stand: Stand) -> None:
    one, another = fresh(), fresh()
    name = [f"clients-{one}"]
    answered, _ = stand.encode(stand.first, one, uuids=name)
    assert answered == stand.plain.generate(one)
    assert stand.second.generate(another, uuids=name) == stand.plain.generate(another)


def test_a_picture_is_shared_whatever_clients_call_it(stand: Stand) -> None:
    picture = fresh()
    stand.encode(stand.first, picture, uuids=[f"one-{picture}"])
    with encoding(stand.second) as by_second:
        assert stand.second.generate(picture, uuids=[f"another-{picture}"]) == stand.plain.generate(picture)
        assert by_second() == 0


def test_engines_with_other_weights_share_nothing_even_under_a_clients_name(
    stand: Stand, others: tuple[Engine, Engine]
) -> None:
    picture = fresh()
    name = [f"clients-{picture}"]
    _, key = stand.encode(stand.first, picture, uuids=name)
    with encoding(others[0]) as by_other:
        _, other_key = stand.encode(others[0], picture, uuids=name)
        assert by_other() == 1
    assert other_key[:8] != key[:8], "one namespace for two models"


def test_an_answer_is_made_of_what_is_stored(stand: Stand, client: tensord.Client) -> None:
    picture = fresh()
    right, key = stand.encode(stand.first, picture)
    lease = client.get(key)
    assert lease is not None
    tree = lease.tree
    tokens = 0 if (entry := client.peek(key)) is None else entry.tokens
    del lease
    client.evict(key)
    client.put(key, _reversed(tree), tokens=tokens, wait=True)
    with encoding(stand.second) as by_second:
        assert stand.second.generate(picture) != right
        assert by_second() == 0


def test_an_entry_of_another_shape_is_a_miss(stand: Stand, client: tensord.Client) -> None:
    picture = fresh()
    right, key = stand.encode(stand.first, picture)
    lease = client.get(key)
    assert lease is not None
    tree = lease.tree
    client.evict(key)
    client.put(key, _halved(tree), tokens=8, wait=True)
    with encoding(stand.second) as by_second:
        assert stand.second.generate(picture) == right
        assert by_second() == 1


def test_a_call_that_only_reads_the_model_ends_no_sharing(stand: Stand) -> None:
    picture = fresh()
    stand.encode(stand.first, picture)
    stand.second.ask("apply_model", factor=1)
    with encoding(stand.second) as by_second:
        assert stand.second.generate(picture) == stand.plain.generate(picture)
        assert by_second() == 0


def test_a_call_that_changes_the_model_ends_sharing_and_says_so_once_and_how_to_resume(
    stand: Stand, others: tuple[Engine, Engine]
) -> None:
    one, another = others
    # Doubled and halved: the weights are what they were at last.
    for factor in (2, 0.5):
        picture = fresh()
        right, _ = stand.encode(another, picture)
        one.ask("apply_model", factor=factor)
        with encoding(one) as by_one:
            assert (one.generate(picture) == right) == (factor == 0.5)
            assert by_one() == 1
        stand.quiet()
    assert one.log.count("it shares encoder outputs with no other engine") == 1
    assert "To share again, restart it from files" in one.log


@pytest.mark.parametrize("calls", [["reset_encoder_cache"], ["reset_mm_cache"], ["sleep", "wake_up"]])
def test_sharing_goes_on_after_resets_and_a_sleep_that_keep_the_weights(stand: Stand, calls: list[str]) -> None:
    for _ in range(2):
        old, new = fresh(), fresh()
        stand.encode(stand.first, old)
        for call in calls:
            stand.second.ask("engine", method=call)
        with encoding(stand.second) as by_second:
            assert stand.second.generate(old) == stand.plain.generate(old)
            assert by_second() == 0
        stand.encode(stand.second, new)
        with encoding(stand.first) as by_first:
            assert stand.first.generate(new) == stand.plain.generate(new)
            assert by_first() == 0
        # Its own cache was emptied: the connector finds the output again.
        stand.second.ask("engine", method=calls[0])
        with encoding(stand.second) as by_second:
            if "sleep" in calls:
                stand.second.ask("engine", method="wake_up")
            stand.second.generate(new)
            assert by_second() == 0


def test_after_a_sleep_that_discards_the_weights_nothing_is_shared(
    stand: Stand, model: Path, start_engine: StartEngine
) -> None:
    """vLLM's CPU build ignores the sleep, and keeps the weights."""
    pictures = [fresh(), fresh()]
    for picture in pictures:
        stand.encode(stand.first, picture)
    with start_engine(model, socket=stand.daemon.socket, ec_manager_config=MANAGER) as one:
        one.wait_up()
        stand.attached(one)
        one.generate(pictures[0])
        assert one.encoded() == 0
        one.ask("engine", method="sleep", level=2)
        one.ask("engine", method="wake_up")
        assert one.generate(pictures[1]) == stand.plain.generate(pictures[1])
        assert one.encoded() == 1


def test_after_new_weights_nothing_that_the_old_ones_made_is_used(stand: Stand, others: tuple[Engine, Engine]) -> None:
    one, another = others
    old, new = fresh(), fresh()
    right, _ = stand.encode(one, old)
    # Twice: the weights are what they were, but have been others meanwhile.
    for factor in (2, 0.5):
        another.ask("apply_model", factor=factor, around=True)
        another.ask("engine", method="reset_encoder_cache")
    with encoding(another) as by_another:
        assert another.generate(old) == right
        assert by_another() == 1
        # Whose weights are still the old ones shares nothing with who has new ones.
        stand.encode(one, new)
        another.generate(new)
        assert by_another() == 2
        one.ask("apply_model", factor=2, around=True)
        one.ask("engine", method="reset_encoder_cache")
        newest = fresh()
        stand.encode(one, newest)
        another.generate(newest)
        assert by_another() == 3, "nothing says that both have the same new weights"


def test_a_request_aborted_in_the_midst_of_its_answer_leaves_nothing_held(stand: Stand) -> None:
    picture = fresh()
    stand.encode(stand.first, picture)
    name = stand.second.add(picture, tokens=64)
    _step_until_hit(stand.second)
    stand.second.ask("abort", name=name)
    stand.second.generate()
    stand.unpinned()
    assert stand.second.generate(picture) == stand.plain.generate(picture)


def test_a_hit_whose_request_never_gets_room_is_given_back(stand: Stand, roles: tuple[Engine, Engine]) -> None:
    _, consumer = roles
    picture = fresh()
    stand.encode(stand.first, picture)
    consumer.add(text="a long text " * 16, tokens=32)
    consumer.step()
    name = consumer.add(picture, text="another one " * 12)
    _step_until_hit(consumer)
    assert stand.daemon.status()["pins"] == 1
    consumer.ask("abort", name=name)
    consumer.generate()
    stand.unpinned()
    with encoding(consumer) as by_consumer:
        assert consumer.generate(picture) == stand.plain.generate(picture)
        assert by_consumer() == 0


def test_a_producer_stores_for_a_consumer_which_stores_nothing(stand: Stand, roles: tuple[Engine, Engine]) -> None:
    producer, consumer = roles
    produced, consumed = fresh(), fresh()
    stand.encode(producer, produced)
    with encoding(consumer) as by_consumer:
        assert consumer.generate(produced) == stand.plain.generate(produced)
        assert by_consumer() == 0
        there = stand.keys()
        assert consumer.generate(consumed) == stand.plain.generate(consumed)
        assert by_consumer() == 1
    stand.quiet()
    assert stand.keys() == there


def test_vllms_metrics_show_the_shared_items(stand: Stand) -> None:
    picture = fresh()
    before = stand.second.ask("metrics")
    stand.encode(stand.first, picture)
    stand.second.generate(picture)
    after = stand.second.ask("metrics")
    assert after["vllm:ec_tensord_hits"] - before["vllm:ec_tensord_hits"] == 1


def test_engines_take_the_configured_cache_manager(stand: Stand) -> None:
    parts = stand.first.ask("scheduler")
    assert parts["manager"] == "tensord.client.vllm.encoder_cache.TensordEncoderCacheManager"
    assert parts["connector"] == "tensord.client.vllm.connector.TensordECConnector"


def test_an_engine_in_processes_of_its_own_shares_with_one_in_a_single_process(
    stand: Stand, model: Path, start_engine: StartEngine
) -> None:
    mine, theirs = fresh(), fresh()
    with start_engine(model, socket=stand.daemon.socket, separate=True) as apart:
        apart.wait_up()
        stand.attached(apart, clients=2)
        stand.encode(stand.first, mine)
        assert apart.generate(mine) == stand.plain.generate(mine)
        assert apart.encoded() == 0
        answered, _ = stand.encode(apart, theirs)
        assert answered == stand.plain.generate(theirs)
        with encoding(stand.second) as by_second:
            assert stand.second.generate(theirs) == answered
            assert by_second() == 0
        stand.daemon.kill()
        unseen = fresh()
        assert apart.generate(unseen) == stand.plain.generate(unseen)
        assert apart.finish() == 0


def test_each_of_an_engines_ranks_has_what_another_engine_of_as_many_encoded(
    stand: Stand, model: Path, start_engine: StartEngine
) -> None:
    pictures = [fresh() for _ in range(3)]
    options = {"separate": True, "tensor_parallel_size": 2, "ec_manager_config": MANAGER}
    with start_engine(model, socket=stand.daemon.socket, **options) as one:
        one.wait_up()
        stand.attached(one, clients=3)
        right = {picture: stand.encode(one, picture)[0] for picture in pictures}
    # Entries outlive engines.
    with start_engine(model, socket=stand.daemon.socket, **options) as other:
        other.wait_up()
        stand.attached(other, clients=3)
        for picture in pictures:
            assert other.generate(picture) == right[picture]
        assert other.encoded() == 0
        with encoding(stand.first) as by_first:
            # Half of each sum was made on each rank: the last bits differ.
            narrow = stand.first.generate(pictures[0])
            assert by_first() == 1
        assert narrow == stand.plain.generate(pictures[0])
        stand.unpinned()


def _step_until_hit(engine: Engine) -> None:
    """Steps until the connector has promised the scheduler another hit."""
    promised = engine.ask("passed")["hit"]
    until(lambda: engine.step() == {} and engine.ask("passed")["hit"] > promised, "a hit is promised")


def _reversed(tree: object) -> object:
    """The tree with its arrays' numbers in reverse order."""
    match tree:
        case np.ndarray():
            return np.ascontiguousarray(tree[::-1])
        case dict():
            return {name: _reversed(part) for name, part in tree.items()}
        case list() | tuple():
            return type(tree)(_reversed(part) for part in tree)
    return tree


def _halved(tree: object) -> object:
    """The tree with half of its arrays' rows."""
    match tree:
        case np.ndarray():
            return np.ascontiguousarray(tree[: len(tree) // 2])
        case dict():
            return {name: _halved(part) for name, part in tree.items()}
        case list() | tuple():
            return type(tree)(_halved(part) for part in tree)
    return tree
