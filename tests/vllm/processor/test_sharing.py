"""vLLM's processor cache on tensord, with vLLM's own classes on both sides and no engine."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY
from vllm.multimodal.cache import MultiModalCacheMissError
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
)

from tensord.client.caches.processor.loans import LOAN_BYTES
from tensord.client.identity import content
from tensord.client.vllm.processor import caches
from tensord.client.vllm.processor.hashes import note
from tensord.client.vllm.processor.items import Forms
from tensord.errors import UsageError

from ...daemon_process import PATIENCE_S, Daemon
from .stand import UPDATES, Pair, an_item, feature, fresh, is_whole


def test_an_item_goes_once_and_then_by_reference_from_any_frontend(pair: Pair) -> None:
    hash, item = fresh(), an_item()
    other = pair.more()
    assert pair.p0.is_cached([hash]) == other.is_cached([hash]) == [False]
    sent, updates = pair.p0.get_and_update_item((item, UPDATES), hash)
    assert not is_whole(sent) and updates is UPDATES
    assert other.is_cached([hash]) == [True]
    again, stored = other.get_and_update_item(None, hash)
    assert list(stored) == UPDATES
    for data in (sent, again):
        (filled,) = pair.p1.get_and_update_features([feature(hash, data)])
        assert filled.data == item
        assert filled.data["grid"].field == item["grid"].field
    assert other.make_stats(delta=True) == (1, 1) and other.make_stats(delta=True) == (0, 0)


def test_an_item_comes_with_its_digest_for_any_lora_and_changes_of_it_or_a_clear_of_a_cache_change_nothing_stored(
    pair: Pair,
) -> None:
    hash, item = fresh(), an_item(5)
    sent, _ = pair.p0.get_and_update_item((item, UPDATES), hash)
    (filled,) = pair.p1.get_and_update_features([feature(hash, sent, f"12345:{hash}")])
    found = filled.data
    assert found is not None and found == item
    assert getattr(found, content.DIGEST_ATTRIBUTE) == content.content_digest(item) == content.content_digest(found)
    found["pixel_values"].data.mul_(2)
    (other,) = pair.p1.get_and_update_features([feature(hash, None, f"67890:{hash}")])
    assert other.data == item
    pair.p0.clear_cache()
    pair.p1.clear_cache()
    assert pair.p0.make_stats() == (0, 0)
    assert pair.p0.is_cached([hash]) == pair.more().is_cached([hash]) == [True]


def cleared(daemon: Daemon) -> None:
    """`tensorctl clear`, after which others store what overwrites all that nobody holds."""
    client = daemon.client()
    client.clear()
    for _ in range(64):
        client.put(os.urandom(32), np.full(512 << 10, 77, np.uint8), wait=True, timeout_s=PATIENCE_S)


def test_the_engine_asks_no_other_process_than_its_frontend_for_an_item(pair: Pair) -> None:
    hash, other = fresh(), pair.more()
    sent, _ = other.get_and_update_item((an_item(), UPDATES), hash)
    assert sent is not None
    _, ours = pair.p0.get_and_update_item((an_item(), UPDATES), hash), copy.deepcopy(sent)
    other.validate_input_item(ours, hash)
    assert ours == sent, "its own"
    pair.p0.validate_input_item(sent, hash)
    assert bytes(sent["tensord_reference"].data[-LOAN_BYTES:]) == bytes(LOAN_BYTES)
    assert pair.p1.get_and_update_item(sent, hash) == an_item()


def test_all_that_the_engine_misses_is_named_at_once_and_mended_by_one_retry(pair: Pair, running: Daemon) -> None:
    hashes = [fresh() for _ in range(4)]
    items = [an_item(number) for number in range(4)]
    ended = pair.more()
    sent: list[MultiModalKwargsItem | None] = [None] * 4
    for number in (1, 3):
        sent[number], _ = ended.get_and_update_item((items[number], UPDATES), hashes[number])
    ended.close()
    cleared(running)
    for number in (0, 2):
        sent[number], _ = pair.p0.get_and_update_item((items[number], UPDATES), hashes[number])
    never = fresh()
    with pytest.raises(MultiModalCacheMissError) as raised:
        pair.p1.get_and_update_features([*map(feature, hashes, sent), feature(never, None)])
    assert raised.value.mm_hashes == [hashes[1], hashes[3], never]
    for hash in raised.value.mm_hashes:
        pair.p0.invalidate(hash)
    assert pair.p0.is_cached(hashes) == [True, False, True, False]
    again = [
        pair.p0.get_and_update_item(None if known else (item, UPDATES), hash)[0]
        for known, item, hash in zip(pair.p0.is_cached(hashes), items, hashes, strict=True)
    ]
    filled = pair.p1.get_and_update_features(list(map(feature, hashes, again)))
    assert [f.data for f in filled] == items


def elem(data: Any, field: Any = None) -> MultiModalFieldElem:
    return MultiModalFieldElem(data=data, field=field or MultiModalBatchedField())


GRID, PIXELS = an_item()["grid"], an_item()["pixel_values"]
OF_ANOTHER_PROCESSOR: dict[str, dict[str, Any]] = {
    "a field less": {"pixel_values": PIXELS},
    "a field more": {**an_item(), "num_image_patches": GRID},
    "another dtype": {"pixel_values": elem(PIXELS.data.double()), "grid": GRID},
    "another field": {"pixel_values": elem(PIXELS.data, MultiModalSharedField(batch_size=1)), "grid": GRID},
}


@pytest.mark.parametrize("name", OF_ANOTHER_PROCESSOR)
def test_an_item_that_this_processor_does_not_make_is_a_miss_and_counted(
    pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = MultiModalKwargsItem(OF_ANOTHER_PROCESSOR[name])
    with monkeypatch.context() as elsewhere:
        # As in another process, with another processor.
        elsewhere.setattr(caches, "forms_of", lambda tag: Forms())
        another = pair.more()
    hash, item = fresh(), an_item()
    assert not is_whole(another.get_and_update_item((other, UPDATES), hash)[0])
    pair.p0.get_and_update_item((item, UPDATES), fresh())
    assert another.is_cached([hash]) == [True] and pair.p0.is_cached([hash]) == [False]
    assert pair.p0.get_and_update_item((item, UPDATES), hash)[0] is item
    assert pair.p0.cache.make_stats().passed_through == {"mismatch": 1}
    counted = partial(REGISTRY.get_sample_value, "tensord_processor_passed_through_total", {"reason": "mismatch"})
    before = counted() or 0
    for _ in range(2):
        pair.p0.make_stats(delta=True)
    assert counted() == before + 1


def test_a_frontend_takes_no_item_from_others_before_it_knows_what_its_own_are(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    hash, item = fresh(), an_item()
    pair.p0.get_and_update_item((item, UPDATES), hash)
    monkeypatch.setattr("tensord.client.vllm.processor.items._by_namespace", {})
    new = pair.more()
    assert new.is_cached([hash]) == [False]
    new.get_and_update_item((an_item(), UPDATES), fresh())
    assert new.is_cached([hash]) == [True]


@pytest.mark.parametrize(
    "tree",
    [7, [], {}, {"fields": {"x": 1}, "updates": []}, {"fields": {"x": [torch.ones(1), ["odd", True]]}, "updates": []}],
    ids=repr,
)
def test_an_entry_that_is_not_an_item_is_a_miss_on_both_sides(pair: Pair, running: Daemon, tree: Any) -> None:
    hash = fresh()
    key, named = pair.p0.cache.key(hash.encode()), np.frombuffer(hash.encode(), np.uint8)
    running.client().put(key, {"hash": named, "tree": tree}, wait=True, timeout_s=PATIENCE_S)
    assert pair.p0.is_cached([hash]) == [False]
    with pytest.raises(MultiModalCacheMissError):
        pair.p1.get_and_update_features([feature(hash, None)])
    with pytest.raises(MultiModalCacheMissError):
        pair.p1.get_and_update_item(None, hash)
    assert pair.p1.cache.make_stats().passed_through == {"malformed": 2}


def forged(item: MultiModalKwargsItem) -> Iterator[MultiModalKwargsItem]:
    data: list[int] = item["tensord_reference"].data
    others = [[*data[:-1], wrong] for wrong in (256, -1, True, 0.5)]
    for wrong in (data[:-1], [data], torch.tensor(data), data * 2, *others):
        yield MultiModalKwargsItem({"tensord_reference": elem(wrong)})
    yield MultiModalKwargsItem({"tensord_reference": item["tensord_reference"], **an_item()})


def test_a_reference_to_another_item_or_that_is_no_whole_one_is_refused_on_both_sides(pair: Pair) -> None:
    sent, _ = pair.p0.get_and_update_item((an_item(), UPDATES), hash := fresh())
    assert sent is not None
    pair.p0.validate_input_item(sent, hash)
    pair.p0.validate_input_item(an_item(), hash)
    with pytest.raises(ValueError, match="another item"):
        pair.p0.validate_input_item(sent, fresh())
    with pytest.raises(ValueError, match="not stored under that hash"):
        pair.p1.get_and_update_features([feature(fresh(), sent)])
    for wrong in forged(sent):
        for refuses in (
            partial(pair.p0.validate_input_item, wrong, hash),
            partial(pair.p1.get_and_update_features, [feature(hash, wrong)]),
            partial(pair.p1.touch_receiver_cache_item, hash, wrong),
        ):
            with pytest.raises(ValueError, match="not a complete reference"):
                refuses()


def test_a_client_s_uuid_is_private_to_its_frontend_and_ends_with_a_clear(pair: Pair) -> None:
    other = pair.more()
    item = an_item(1)
    name = "the client's picture"
    sent, _ = pair.p0.get_and_update_item((item, UPDATES), name)
    assert (pair.p0.is_cached_item(name), other.is_cached_item(name)) == (True, False)
    assert sent is not None
    pair.p0.validate_input_item(sent, name)
    with pytest.raises(UsageError, match="another item"):
        other.validate_input_item(sent, name)
    assert pair.p1.get_and_update_item(sent, name) == item
    pair.p0.clear_cache()
    assert not pair.p0.is_cached_item(name)
    assert pair.p1.get_and_update_item(sent, name) == item, "a request on its way ends well"


def test_a_name_that_looks_like_a_content_hash_never_stands_for_content(pair: Pair) -> None:
    hash = fresh()
    note(hash, follows=False)
    pair.p0.get_and_update_item((an_item(1), UPDATES), hash)
    note(hash, follows=True)
    assert pair.p0.is_cached([hash]) == pair.more().is_cached([hash]) == [False]
