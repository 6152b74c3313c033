"""vLLM's processor cache on tensord, with vLLM's own classes on both sides and no engine.

What vLLM's tests ask of its caches is asked here of ours: an item's size, the same items with and without a cache,
items too large, misses that are named together and mended, references that cannot be forged, what LoRAs share.
"""

from __future__ import annotations

import copy
import hashlib
import os
import random
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from prometheus_client import REGISTRY
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.cache import MultiModalCacheMissError, MultiModalProcessorOnlyCache
from vllm.multimodal.cache.base import MultiModalCache
from vllm.multimodal.inputs import (
    BaseMultiModalField,
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.processing import PromptIndexTargets, PromptInsertion, PromptReplacement, PromptUpdateDetails
from vllm.multimodal.processing.processor import PromptIndex, ResolvedPromptUpdate
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tensord.client.caches.measures import item_bytes, leaf_count
from tensord.client.caches.processor.loans import LOAN_BYTES
from tensord.client.identity import content
from tensord.client.identity.engine import processor_namespace
from tensord.client.vllm import plugin
from tensord.client.vllm.processor import caches as processor
from tensord.client.vllm.processor import factories as processor_factories
from tensord.client.vllm.processor import forms
from tensord.client.vllm.processor.caches import TensordReceiverCache, TensordSenderCache
from tensord.client.vllm.processor.forms import Forms
from tensord.client.vllm.processor.hashes import note
from tensord.client.vllm.processor.items import StoredMask, item_tree, tree_item, tree_updates
from tensord.errors import BadConfiguration, UnsupportedLeaf, UsageError
from tensord.shm.ring.layout import KEY_BYTES

from ..daemon_process import PATIENCE_S, Daemon, until
from .tiny_llava import IMAGE, PICTURE_TOKENS, write_tiny_llava

UPDATES: Final = [PromptReplacement("image", [IMAGE], [IMAGE] * 4).resolve(0)]
_numbers = count(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llava(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def config(model: Path) -> VllmConfig:
    return EngineArgs(model=str(model), dtype="float32", max_model_len=256, enforce_eager=True).create_engine_config()


@pytest.fixture(scope="module")
def running() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon.start()


class Pair:
    """One frontend and one engine core, as vLLM makes them; `more()` are further frontends."""

    def __init__(self, config: VllmConfig, daemon: Daemon, **limits: Any) -> None:
        self._config, self._daemon = config, daemon
        self._senders: list[TensordSenderCache] = []
        self.p0 = self.more(**limits)
        self.p1 = TensordReceiverCache(config, daemon.socket)
        assert self.p1.cache._client.wait_connected(PATIENCE_S)

    def more(self, **limits: Any) -> TensordSenderCache:
        sender = TensordSenderCache(self._config, self._daemon.socket, **{"put_wait_s": PATIENCE_S, **limits})
        assert sender.cache._client.wait_connected(PATIENCE_S)
        self._senders.append(sender)
        return sender

    def close(self) -> None:
        for sender in self._senders:
            sender.close()
        self.p1.cache._client.close()


@pytest.fixture
def pair(config: VllmConfig, running: Daemon) -> Iterator[Pair]:
    made = Pair(config, running)
    yield made
    made.close()


def fresh() -> str:
    """A hash as vLLM takes it of content, that no test has used."""
    made = hashlib.sha256(f"{next(_numbers)}".encode()).hexdigest()
    note(made, follows=True)
    return made


def an_item(number: int = 1, size_bytes: int = 64 << 10) -> MultiModalKwargsItem:
    return MultiModalKwargsItem(
        {
            "pixel_values": MultiModalFieldElem(
                data=torch.full((size_bytes // 4,), float(number)), field=MultiModalBatchedField()
            ),
            "grid": MultiModalFieldElem(
                data=torch.tensor([[1, 2, number]]),
                field=MultiModalFlatField(slices=[slice(0, 1), slice(1, None, 1)], keep_on_cpu=True),
            ),
        }
    )


def is_whole(item: MultiModalKwargsItem | None) -> bool:
    return item is not None and "pixel_values" in item


def feature(hash: str, data: MultiModalKwargsItem | None, identifier: str | None = None) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=data, modality="image", identifier=identifier or hash, mm_position=PlaceholderRange(0, 4), mm_hash=hash
    )


def stored_by(sender: TensordSenderCache, hash: str, number: int) -> None:
    assert not is_whole(sender.get_and_update_item((an_item(number), UPDATES), hash)[0])


# ---- from the frontend to the engine


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


def test_a_reference_survives_vllms_own_serialization(pair: Pair) -> None:
    hash, item = fresh(), an_item()
    sent, _ = pair.p0.get_and_update_item((item, UPDATES), hash)
    packed = MsgpackEncoder().encode(sent)
    assert sum(map(len, packed)) < 512
    assert pair.p1.get_and_update_item(MsgpackDecoder(MultiModalKwargsItem).decode(packed), hash) == item


def test_items_are_the_same_with_and_without_the_cache_while_it_is_too_small(config: VllmConfig) -> None:
    chance = random.Random(0)
    items = {fresh(): an_item(number, 512 << 10) for number in range(40)}
    with Daemon(ring_bytes=8 << 20, policy="lru") as daemon:
        pair = Pair(config, daemon.start(), seconds=0.02)
        for _ in range(100):
            hashes = chance.sample(sorted(items), chance.randrange(4))
            for _ in range(chance.randrange(1, 4)):
                there = pair.p0.is_cached(hashes)
            for hash in hashes:
                pair.p0.touch_sender_cache_item(hash)
            given = [None if known else (items[hash], UPDATES) for known, hash in zip(there, hashes, strict=True)]
            sent = [item for item, _ in pair.p0.get_and_update(given, hashes)]
            pair.p0.release_sender_touches()
            for filled in pair.p1.get_and_update_features(list(map(feature, hashes, sent))):
                assert filled.data == items[filled.identifier]
        stats = pair.p0.cache.make_stats()
        assert 0 < stats.hits < stats.total
        pair.close()


def test_an_in_place_operation_of_a_model_changes_nothing_that_is_stored(pair: Pair) -> None:
    hash, item = fresh(), an_item(5)
    sent, _ = pair.p0.get_and_update_item((item, UPDATES), hash)
    pair.p1.get_and_update_item(sent, hash)["pixel_values"].data.mul_(2)
    assert pair.p1.get_and_update_item(sent, hash) == item


def test_views_are_the_ring_itself_but_for_what_stays_on_the_cpu(config: VllmConfig, pair: Pair) -> None:
    hash, item = fresh(), an_item(5)
    sent, _ = pair.p0.get_and_update_item((item, UPDATES), hash)
    engine = TensordReceiverCache(config, pair.p1.cache._client.link.path, copy=False)
    one, other = engine.get_and_update_item(sent, hash), engine.get_and_update_item(sent, hash)
    assert one["pixel_values"].data.data_ptr() == other["pixel_values"].data.data_ptr()
    one["grid"].data.add_(1)
    assert other == item


def test_an_item_cleared_during_a_request_is_sent_complete_or_asked_for_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    hash, item = fresh(), an_item(7)
    cache = pair.p0.cache
    plain = cache.get_and_update

    def cleared_first(*given: Any) -> list[Any]:
        cache.clear()
        return plain(*given)

    def asked(given: Any) -> Any:
        pair.p0.get_and_update_item((item, UPDATES), hash)
        assert pair.p0.is_cached_item(hash)
        with monkeypatch.context() as patched:
            patched.setattr(cache, "get_and_update", cleared_first)
            return pair.p0.get_and_update_item(given, hash)

    assert asked((item, UPDATES)) == (item, UPDATES)
    with pytest.raises(MultiModalCacheMissError):
        asked(None)


def test_the_content_digest_comes_with_the_item(pair: Pair) -> None:
    hash, item = fresh(), an_item(6)
    sent, _ = pair.p0.get_and_update_item((item, UPDATES), hash)
    found = pair.p1.get_and_update_item(sent, hash)
    assert getattr(found, content.DIGEST_ATTRIBUTE) == content.content_digest(item) == content.content_digest(found)


def test_loras_share_what_the_processor_made(pair: Pair) -> None:
    hash, item = fresh(), an_item()
    sent, _ = pair.p0.get_and_update_item((item, UPDATES), hash)
    (filled,) = pair.p1.get_and_update_features([feature(hash, sent, f"12345:{hash}")])
    assert filled.data == item
    (other,) = pair.p1.get_and_update_features([feature(hash, None, f"67890:{hash}")])
    assert other.data == item


def test_the_engine_takes_what_is_sent_whole_as_it_is(pair: Pair) -> None:
    hash, small, large = fresh(), an_item(1), an_item(2)
    pair.p0.get_and_update_item((small, UPDATES), hash)
    (filled,) = pair.p1.get_and_update_features([feature(hash, large)])
    assert filled.data is large


# ---- what becomes of the ring between frontend and engine


def cleared(daemon: Daemon) -> None:
    """`tensorctl clear`, after which others store what overwrites all that nobody holds."""
    client = daemon.client()
    client.clear()
    for _ in range(64):
        client.put(os.urandom(32), np.full(512 << 10, 77, np.uint8), wait=True, timeout_s=PATIENCE_S)


def replaced(daemon: Daemon) -> None:
    daemon.interrupt()
    daemon.start()


@pytest.mark.parametrize("what", [cleared, replaced], ids=lambda what: what.__name__)
def test_a_request_on_its_way_ends_well_whatever_becomes_of_the_ring(
    config: VllmConfig, what: Callable[[Daemon], None]
) -> None:
    with Daemon() as daemon:
        pair = Pair(config, daemon.start())
        hash, item = fresh(), an_item(3)
        sent, _ = pair.p0.get_and_update_item((item, UPDATES), hash)
        assert sent is not None and not is_whole(sent)
        packed = MsgpackEncoder().encode(sent)
        ring = pair.p1.cache._client.ring()
        what(daemon)
        pair.p0.clear_cache()
        if what is replaced:
            until(lambda: pair.p1.cache._client.ring() is not ring, "the engine to see the new ring")
        assert pair.p1.get_and_update_item(MsgpackDecoder(MultiModalKwargsItem).decode(packed), hash) == item
        until(lambda: pair.p0.cache.lent_bytes == 0, "the frontend to keep it no longer")
        pair.close()


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


# ---- misses


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


def test_nothing_given_for_what_is_not_there_is_a_miss_by_name(pair: Pair) -> None:
    with pytest.raises(MultiModalCacheMissError) as raised:
        pair.p0.get_and_update_item(None, hash := fresh())
    assert raised.value.mm_hashes == [hash]


def test_an_item_reported_as_cached_is_available_although_it_is_evicted(pair: Pair, running: Daemon) -> None:
    hash, item = fresh(), an_item(3)
    sent, _ = pair.more().get_and_update_item((item, UPDATES), hash)
    assert sent is not None and pair.p0.is_cached([hash]) == [True]
    running.client().evict(bytes(sent["tensord_reference"].data[:KEY_BYTES]))
    whole, updates = pair.p0.get_and_update_item(None, hash)
    assert whole == item and list(updates) == UPDATES


# ---- items that are not what this processor makes


def of_another_processor() -> Iterator[tuple[str, MultiModalKwargsItem]]:
    item = an_item()
    pixels, grid = item["pixel_values"], item["grid"]
    batched = MultiModalBatchedField()
    yield "a field less", MultiModalKwargsItem({"pixel_values": pixels})
    yield "a field more", MultiModalKwargsItem({**item, "num_image_patches": grid})
    for name, elem in (
        ("another dtype", MultiModalFieldElem(data=pixels.data.double(), field=batched)),
        ("more dimensions", MultiModalFieldElem(data=pixels.data[None], field=batched)),
        ("a list for a tensor", MultiModalFieldElem(data=[pixels.data], field=batched)),
        ("a number for a tensor", MultiModalFieldElem(data=3, field=batched)),
        ("another field", MultiModalFieldElem(data=pixels.data, field=MultiModalSharedField(batch_size=1))),
        ("elsewhere", MultiModalFieldElem(data=pixels.data, field=MultiModalBatchedField(keep_on_cpu=True))),
    ):
        yield name, MultiModalKwargsItem({"pixel_values": elem, "grid": grid})


@pytest.mark.parametrize("other", [pytest.param(item, id=name) for name, item in of_another_processor()])
def test_an_item_that_this_processor_does_not_make_is_a_miss_and_counted(
    pair: Pair, other: MultiModalKwargsItem, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        # As in another process, with another processor.
        elsewhere.setattr(processor, "forms_of", lambda tag: Forms())
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
    monkeypatch.setattr(forms, "_by_namespace", {})
    new = pair.more()
    assert new.is_cached([hash]) == [False]
    new.get_and_update_item((an_item(), UPDATES), fresh())
    assert new.is_cached([hash]) == [True]


def test_the_warm_ups_outputs_define_the_forms(
    installed: None, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.renderers import renderer_from_config

    monkeypatch.setattr(forms, "_by_namespace", {})
    frontends = [renderer_from_config(config), renderer_from_config(config)]
    assert not forms.forms_of(processor_namespace(config.model_config).tag)._known
    frontends[0].warmup_mm()
    (known,) = forms.forms_of(processor_namespace(config.model_config).tag)._known
    rendered(frontends[1], [a_picture(21)])
    assert forms.forms_of(processor_namespace(config.model_config).tag)._known == {known}
    for frontend in frontends:
        frontend.shutdown()


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


# ---- items that go as they are


def test_an_item_too_large_goes_as_it_is(pair: Pair) -> None:
    hash, item = fresh(), an_item(1, 17 << 20)
    assert pair.p0.get_and_update_item((item, UPDATES), hash)[0] is item
    assert pair.p0.cache.make_stats().passed_through == {"too_large": 1}
    assert pair.p0.is_cached([hash]) == [False]
    assert pair.p1.get_and_update_item(item, hash) is item


class OneOfItsOwn(MultiModalBatchedField):
    """A field class that vLLM may have some day."""


class Words(torch.Tensor):
    """A tensor that would come back as a plain one."""


def unholdable() -> Iterator[tuple[str, MultiModalKwargsItem, list[ResolvedPromptUpdate]]]:
    def item(data: Any, field: BaseMultiModalField | None = None) -> MultiModalKwargsItem:
        return MultiModalKwargsItem({"x": MultiModalFieldElem(data=data, field=field or MultiModalBatchedField())})

    def update(**changed: Any) -> list[ResolvedPromptUpdate]:
        return [PromptInsertion("image", changed.get("target", [1]), changed.get("content", [1, 2])).resolve(0)]

    yield "a field class of its own", item(torch.ones(2), OneOfItsOwn()), UPDATES
    yield "a tensor on a device", item(torch.empty(2, device="meta")), UPDATES
    yield "a tensor of a class of its own", item(torch.ones(2).as_subclass(Words)), UPDATES
    yield "a tensor with gradients", item(torch.ones(2, requires_grad=True)), UPDATES
    yield "a sparse tensor", item(torch.eye(2).to_sparse()), UPDATES
    yield "an object", item([torch.ones(2), object()]), UPDATES
    somewhere = PromptIndex(lambda prompt, start_idx=0: 3, lambda tokenizer, prompt, start_idx=0: 3)
    yield "a target that is no known index", item(torch.ones(2)), update(target=somewhere)
    whole = PromptUpdateDetails(full=[1, 2], is_embed=lambda full: torch.ones(1, dtype=torch.bool))
    yield "a mask of another length", item(torch.ones(2)), update(content=whole)


@pytest.mark.parametrize(("item", "updates"), [pytest.param(*rest, id=name) for name, *rest in unholdable()])
def test_an_unknown_object_is_passed_through_and_counted(
    pair: Pair, item: MultiModalKwargsItem, updates: list[ResolvedPromptUpdate]
) -> None:
    hash = fresh()
    sent, their_updates = pair.p0.get_and_update_item((item, updates), hash)
    assert sent is item and their_updates is updates
    assert pair.p0.cache.make_stats().passed_through == {"unsupported": 1}
    assert pair.p0.is_cached([hash]) == [False]


def test_without_a_daemon_items_go_as_they_are(config: VllmConfig, tmp_path: Path) -> None:
    sender = TensordSenderCache(config, tmp_path / "nobody.sock")
    receiver = TensordReceiverCache(config, tmp_path / "nobody.sock")
    hash, item = fresh(), an_item()
    assert sender.is_cached([hash]) == [False]
    assert sender.get_and_update_item((item, UPDATES), hash) == (item, UPDATES)
    sender.release_sender_touches()
    assert receiver.get_and_update_features([feature(hash, item)])[0].data is item
    assert sender.make_stats() == (0, 1)
    sender.close()


def test_a_touched_item_is_not_evicted_by_the_items_of_its_request(config: VllmConfig) -> None:
    with Daemon(ring_bytes=8 << 20) as daemon:
        pair = Pair(config, daemon.start(), bytes_max=6 << 20)
        first, *others = [fresh() for _ in range(12)]
        item = an_item(1, 1 << 20)
        pair.more(seconds=0.01).get_and_update_item((item, UPDATES), first)
        for hash in (first, *others):
            pair.p0.touch_sender_cache_item(hash)
        for hash in others:
            other, _ = pair.p0.get_and_update_item((an_item(2, 1 << 20), UPDATES), hash)
            pair.p1.get_and_update_item(other, hash)
        until(lambda: pair.p0.cache.lent_bytes == 0, "the frontend to hear that all is read")
        sent, _ = pair.p0.get_and_update_item(None, first)
        pair.p0.release_sender_touches()
        assert not is_whole(sent)
        assert pair.p1.get_and_update_item(sent, first) == item
        pair.close()


# ---- references that are not what they say


def forged(item: MultiModalKwargsItem) -> Iterator[MultiModalKwargsItem]:
    data: list[int] = item["tensord_reference"].data
    others = [[*data[:-1], wrong] for wrong in (256, -1, True, 0.5)]
    for wrong in (data[:-1], [data], torch.tensor(data), data * 2, *others):
        elem = MultiModalFieldElem(data=wrong, field=MultiModalBatchedField())
        yield MultiModalKwargsItem({"tensord_reference": elem})
    yield MultiModalKwargsItem({"tensord_reference": item["tensord_reference"], **an_item()})


def test_a_reference_that_is_no_whole_one_is_refused_on_both_sides(pair: Pair) -> None:
    sent, _ = pair.p0.get_and_update_item((an_item(), UPDATES), hash := fresh())
    assert sent is not None
    for wrong in forged(sent):
        with pytest.raises(ValueError, match="not a complete reference"):
            pair.p0.validate_input_item(wrong, hash)
        with pytest.raises(ValueError, match="not a complete reference"):
            pair.p1.get_and_update_features([feature(hash, wrong)])
        with pytest.raises(ValueError, match="not a complete reference"):
            pair.p1.touch_receiver_cache_item(hash, wrong)


def test_a_reference_to_another_item_is_refused_on_both_sides(pair: Pair) -> None:
    sent, _ = pair.p0.get_and_update_item((an_item(), UPDATES), hash := fresh())
    assert sent is not None
    pair.p0.validate_input_item(sent, hash)
    pair.p0.validate_input_item(an_item(), hash)
    with pytest.raises(ValueError, match="another item"):
        pair.p0.validate_input_item(sent, fresh())
    with pytest.raises(ValueError, match="not stored under that hash"):
        pair.p1.get_and_update_features([feature(fresh(), sent)])


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


def test_a_hash_that_looks_like_content_but_was_made_elsewhere_is_for_this_frontend_alone(pair: Pair) -> None:
    hash = hashlib.sha256(b"by a processor's own rule").hexdigest()
    stored_by(pair.p0, hash, 1)
    assert (pair.p0.is_cached([hash]), pair.more().is_cached([hash])) == ([True], [False])


def test_an_item_without_prompt_updates_is_for_this_frontend_alone(pair: Pair) -> None:
    hash, item = fresh(), an_item()
    sent, _ = pair.p0.get_and_update_item((item, []), hash)
    assert pair.p1.get_and_update_item(sent, hash) == item
    assert pair.p0.is_cached([hash]) == [True]
    assert pair.more().is_cached([hash]) == [False]
    assert list(pair.p0.get_and_update_item(None, hash)[1]) == []


def test_clearing_keeps_what_other_engines_use(pair: Pair) -> None:
    hash = fresh()
    pair.p0.get_and_update_item((an_item(), UPDATES), hash)
    pair.p0.clear_cache()
    pair.p1.clear_cache()
    assert pair.p0.make_stats() == (0, 0)
    assert pair.p0.is_cached([hash]) == pair.more().is_cached([hash]) == [True]


# ---- items and prompt updates as trees


@pytest.mark.parametrize(
    "field",
    [
        MultiModalBatchedField(),
        MultiModalBatchedField(keep_on_cpu=True),
        MultiModalSharedField(batch_size=3),
        MultiModalFlatField(slices=[slice(0, 3), slice(3, 5)]),
        MultiModalFlatField(slices=[[slice(None), slice(0, 2)], [slice(None, None, 2), slice(2, 4)]], dim=1),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "data",
    [torch.ones(2, 3, dtype=torch.bfloat16), [torch.ones(2), [torch.zeros(0, 3)]], (torch.tensor(1), 2, 0.5), 7, None],
    ids=["tensor", "nested", "tuple", "number", "nothing"],
)
def test_every_field_and_every_kind_of_data_comes_back(field: BaseMultiModalField, data: Any) -> None:
    item = MultiModalKwargsItem({"x": MultiModalFieldElem(data=data, field=field)})
    back = tree_item(item_tree(item, []))
    assert back == item
    assert back["x"].field == field and type(back["x"].data) is type(data)


FULL: Final = [3, 7, 7, 9]
EVERY_OTHER: Final = torch.tensor([True, False, True, False])


@pytest.mark.parametrize(
    "content",
    [
        PromptUpdateDetails(full=FULL),
        PromptUpdateDetails(full=[]),
        PromptUpdateDetails.select_token_id(FULL, 7),
        PromptUpdateDetails.select_token_ids(FULL, [3, 9]),
        PromptUpdateDetails(full=FULL, is_embed=lambda _: EVERY_OTHER),
    ],
    ids=["all", "none", "one token", "some tokens", "a mask"],
)
def test_contents_and_their_masks_come_back(content: PromptUpdateDetails) -> None:
    update = PromptReplacement("image", [5, 6], content).resolve(2)
    (back,) = tree_updates(item_tree(an_item(), [update]))
    assert (back.modality, back.item_idx, back.mode, back.target) == ("image", 2, update.mode, [5, 6])
    assert back.content.full == content.full
    if content.is_embed is None:
        assert back.content.is_embed is None
    else:
        assert back.content.is_embed is not None
        assert torch.equal(back.content.is_embed(content.full), content.is_embed(content.full))


def test_vllms_own_masks_go_on_to_work_for_other_tokens_and_stored_ones_refuse() -> None:
    update = PromptReplacement("image", [5], PromptUpdateDetails.select_token_id(FULL, 7)).resolve(0)
    (back,) = tree_updates(item_tree(an_item(), [update]))
    assert back.content.is_embed is not None
    assert back.content.is_embed([7, 0]).tolist() == [True, False]
    mask = StoredMask(FULL, EVERY_OTHER)
    mask(FULL).fill_(False)
    assert torch.equal(mask(list(FULL)), EVERY_OTHER)
    with pytest.raises(UsageError, match="asked for 1 others"):
        mask([3])


@pytest.mark.parametrize(
    ("target", "prompt"),
    [
        (PromptIndexTargets.start(), [4, 5]),
        (PromptIndexTargets.end(), [4, 5]),
        (PromptIndexTargets.prefix([4]), [4, 5]),
        (PromptIndexTargets.prefix([4]), [5, 4]),
        ([5], [4, 5, 5]),
    ],
    ids=["start", "end", "prefix", "another prefix", "tokens"],
)
def test_targets_come_back_and_match_where_they_did(target: Any, prompt: list[int]) -> None:
    update = PromptInsertion("image", target, [1]).resolve(0)
    (back,) = tree_updates(item_tree(an_item(), [update]))
    assert list(back.iter_token_matches(prompt)) == list(update.iter_token_matches(prompt))


def test_prompt_updates_may_be_changed_by_whoever_gets_them(pair: Pair) -> None:
    hash = fresh()
    pair.p0.get_and_update_item((an_item(), UPDATES), hash)
    _, updates = pair.p0.get_and_update_item(None, hash)
    updates[0].content.full.append(1)
    assert list(pair.p0.get_and_update_item(None, hash)[1]) == UPDATES


def test_a_class_that_has_grown_a_field_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensord.client.vllm.processor import items

    monkeypatch.setattr(items, "_CHANGED", frozenset({MultiModalBatchedField}))
    with pytest.raises(UnsupportedLeaf, match="MultiModalBatchedField has other fields"):
        item_tree(an_item(), UPDATES)


def test_sizes_and_leaves_are_as_vllm_counts_them() -> None:
    for sizes in ({"a": 100}, {"a": 100, "b": 110}):
        data = {key: torch.empty(size, dtype=torch.int8) for key, size in sizes.items()}
        assert item_bytes(data) == MultiModalCache.get_item_size(data) == sum(sizes.values())
        assert leaf_count([data, data]) == MultiModalCache.get_item_complexity([data, data])


# ---- in vLLM's place

FACTORIES: Final = (
    "processor_cache_from_config",
    "engine_receiver_cache_from_config",
    "worker_receiver_cache_from_config",
)


@pytest.fixture
def vllm_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes, afterwards, what `install` replaces."""
    import vllm.renderers.base
    import vllm.v1.engine.core
    import vllm.v1.worker.worker_base  # noqa: F401
    from vllm.multimodal.hasher import MultiModalHasher
    from vllm.multimodal.processing.inputs import ProcessorInputs

    for module_name, module in list(sys.modules.items()):
        for name in FACTORIES:
            if module_name.startswith("vllm.") and name in vars(module):
                monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(ProcessorInputs, "get_mm_hashes", ProcessorInputs.get_mm_hashes)
    monkeypatch.setattr(MultiModalHasher, "hash_kwargs", MultiModalHasher.hash_kwargs)


@pytest.fixture
def installed(vllm_as_it_was: None, monkeypatch: pytest.MonkeyPatch, running: Daemon) -> None:
    monkeypatch.setenv(plugin.PROCESSOR_CACHE, "1")
    monkeypatch.setenv("TENSORD_SOCKET", str(running.socket))
    plugin.register()
    plugin.register()


def changed(config: VllmConfig, **parallel: Any) -> VllmConfig:
    """The same engine in another place among others."""
    made = copy.copy(config)
    made.parallel_config = copy.copy(config.parallel_config)
    for name, value in parallel.items():
        setattr(made.parallel_config, name, value)
    return made


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"_api_process_count": 4},
        {"data_parallel_size": 2, "data_parallel_size_local": 2},
        {"data_parallel_size": 4, "data_parallel_size_local": 1, "data_parallel_hybrid_lb": True},
    ],
    ids=["alone", "api processes", "data parallel", "a host's share of data parallel"],
)
def test_frontends_and_engine_cores_of_a_host_share_and_workers_have_none(
    installed: None, config: VllmConfig, parallel: dict[str, Any]
) -> None:
    from vllm.renderers import base
    from vllm.v1.engine import core
    from vllm.v1.worker import worker_base

    placed = changed(config, **parallel)
    sender = base.processor_cache_from_config(placed)
    receiver = core.engine_receiver_cache_from_config(placed)
    assert isinstance(sender, TensordSenderCache) and isinstance(receiver, TensordReceiverCache)
    assert worker_base.worker_receiver_cache_from_config(placed, None) is None
    hash, item = fresh(), an_item()
    sender.cache._puts.wait_s = PATIENCE_S
    sent, _ = sender.get_and_update_item((item, UPDATES), hash)
    assert not is_whole(sent) and receiver.get_and_update_item(sent, hash) == item
    sender.close()


def test_engines_on_other_hosts_get_items_as_without_tensord(installed: None, config: VllmConfig) -> None:
    from vllm.renderers import base

    placed = changed(config, data_parallel_size=4, data_parallel_size_local=2)
    assert isinstance(base.processor_cache_from_config(placed), MultiModalProcessorOnlyCache)


def test_a_processor_cache_switched_off_in_vllm_stays_off(installed: None, config: VllmConfig) -> None:
    from vllm.multimodal import cache

    off = copy.copy(config)
    off.model_config = copy.copy(config.model_config)
    off.model_config.multimodal_config = copy.copy(config.model_config.multimodal_config)
    off.model_config.multimodal_config.mm_processor_cache_gb = 0
    assert cache.processor_cache_from_config(off) is None
    assert cache.engine_receiver_cache_from_config(off) is None


@pytest.mark.parametrize("value", [None, "0", ""])
def test_vllms_own_stays_unless_it_is_switched_on(
    vllm_as_it_was: None, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    from vllm.multimodal.cache import factories

    before = factories.processor_cache_from_config
    if value is None:
        monkeypatch.delenv(plugin.PROCESSOR_CACHE, raising=False)
    else:
        monkeypatch.setenv(plugin.PROCESSOR_CACHE, value)
    plugin.register()
    assert factories.processor_cache_from_config is before


def test_a_switch_or_a_way_of_copying_that_is_none_is_named(
    installed: None, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.multimodal import cache

    monkeypatch.setenv(processor_factories.COPY, "sometimes")
    with pytest.raises(BadConfiguration, match="TENSORD_VLLM_PROCESSOR_COPY='sometimes' must be one of auto, never"):
        cache.engine_receiver_cache_from_config(config)
    monkeypatch.setenv(plugin.PROCESSOR_CACHE, "yes")
    with pytest.raises(BadConfiguration, match="TENSORD_VLLM_PROCESSOR_CACHE='yes' must be 0 or 1"):
        plugin.register()


def a_picture(number: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (70, 90, 3), np.uint8))


def rendered(renderer: Any, pictures: list[Any], uuids: list[str | None] | None = None) -> Any:
    """What vLLM makes of a prompt with these pictures, the way every request goes."""
    prompt = [5, *[IMAGE] * len(pictures), 6]
    return renderer._process_multimodal(
        prompt, {"image": pictures}, {"image": uuids} if uuids is not None else None, mm_processor_kwargs=None
    )


def test_a_picture_is_processed_by_one_frontend_for_all(installed: None, config: VllmConfig) -> None:
    from vllm.renderers import renderer_from_config

    frontends = [renderer_from_config(config), renderer_from_config(config)]
    for frontend in frontends:
        frontend.mm_processor_cache.cache._puts.wait_s = PATIENCE_S
    engine = TensordReceiverCache(config)
    first = rendered(frontends[0], [a_picture(1), a_picture(2)])
    second = rendered(frontends[1], [a_picture(3), a_picture(2), a_picture(1)])
    assert frontends[1].mm_processor_cache.make_stats() == (2, 3)
    assert second["prompt_token_ids"] == [5, *[IMAGE] * PICTURE_TOKENS * 3, 6]
    plain = renderer_from_config(config)
    plain._mm_processor_cache = None
    expected = rendered(plain, [a_picture(3), a_picture(2), a_picture(1)])
    assert second["mm_placeholders"] == expected["mm_placeholders"]
    for made, wanted in ((first, rendered(plain, [a_picture(1), a_picture(2)])), (second, expected)):
        hashes = made["mm_hashes"]["image"]
        filled = engine.get_and_update_features(list(map(feature, hashes, made["mm_kwargs"]["image"])))
        assert [f.data for f in filled] == list(wanted["mm_kwargs"]["image"])
    for frontend in (*frontends, plain):
        frontend.shutdown()


def test_frontends_of_one_model_in_two_folders_share_what_was_processed(
    installed: None, config: VllmConfig, tmp_path: Path
) -> None:
    from vllm.renderers import renderer_from_config

    folder = write_tiny_llava(tmp_path / "elsewhere")
    moved = EngineArgs(model=str(folder), dtype="float32", max_model_len=256, enforce_eager=True)
    frontends = [renderer_from_config(config), renderer_from_config(moved.create_engine_config())]
    for frontend in frontends:
        frontend.mm_processor_cache.cache._puts.wait_s = PATIENCE_S
        # Each has made an item of this form.
        rendered(frontend, [a_picture(970 + frontends.index(frontend))])
    first, second = (rendered(frontend, [a_picture(972)]) for frontend in frontends)
    assert first["mm_hashes"] == second["mm_hashes"]
    assert frontends[1].mm_processor_cache.make_stats() == (1, 2)
    for frontend in frontends:
        frontend.shutdown()


def test_a_clients_name_for_a_picture_says_nothing_to_other_frontends(installed: None, config: VllmConfig) -> None:
    from vllm.renderers import renderer_from_config

    frontends = [renderer_from_config(config), renderer_from_config(config)]
    for frontend in frontends:
        frontend.mm_processor_cache.cache._puts.wait_s = PATIENCE_S
    hash = fresh()
    rendered(frontends[0], [a_picture(11)], [hash])
    rendered(frontends[1], [a_picture(12)], [hash])
    assert frontends[1].mm_processor_cache.make_stats() == (0, 1)
    rendered(frontends[0], [None], [hash])
    assert frontends[0].mm_processor_cache.make_stats() == (1, 2), "to the one that it was given to, it does"
    for frontend in frontends:
        frontend.shutdown()


def video_hashes(
    config: VllmConfig,
    sender: TensordSenderCache,
    videos: list[Any],
    names: list[str | None],
    fps: list[float],
    *,
    configured: bool = False,
) -> list[str]:
    """What Qwen3-VL's processor calls videos, each of which has a sampling rate of its own.

    Args:
        configured: the rates are the engine's, and the request has none.
    """
    from vllm.model_executor.models.qwen3_vl import Qwen3VLMultiModalProcessor
    from vllm.multimodal.parse import MultiModalDataItems, VideoProcessorItems
    from vllm.multimodal.processing.inputs import ProcessorInputs

    qwen: Any = object.__new__(Qwen3VLMultiModalProcessor)
    qwen.info = SimpleNamespace(
        model_id=config.model_config.model,
        ctx=SimpleNamespace(get_mm_config=config.model_config.get_multimodal_config),
        _merge_and_resolve_mm_processor_kwargs=lambda asked: {"videos_kwargs": {"fps": fps}, **asked},
    )
    items = MultiModalDataItems({"video": VideoProcessorItems(videos)})
    asked = {} if configured else {"videos_kwargs": {"fps": fps}}
    inputs = ProcessorInputs([], items, {"video": names}, hf_processor_mm_kwargs=asked, cache=sender)
    return list(qwen._get_mm_hashes(inputs)["video"])


def a_video(number: int) -> Any:
    return np.full((2, 8, 8, 3), number, np.uint8)


def test_a_clients_name_that_a_model_hashes_again_says_nothing_to_other_frontends(
    installed: None, config: VllmConfig, pair: Pair
) -> None:
    other, name = pair.more(), f"video-{fresh()}"
    (hash,) = video_hashes(config, pair.p0, [a_video(1)], [name], [2.0])
    stored_by(pair.p0, hash, 1)
    assert video_hashes(config, other, [a_video(2)], [name], [2.0]) == [hash]
    assert (pair.p0.is_cached([hash]), other.is_cached([hash])) == ([True], [False])


def test_content_that_a_model_hashes_again_is_shared(installed: None, config: VllmConfig, pair: Pair) -> None:
    other, video = pair.more(), a_video(3)
    made = video_hashes(config, pair.p0, [video, video], [None, None], [2.0, 4.0])
    assert len(set(made)) == 2
    stored_by(pair.p0, made[0], 1)
    assert video_hashes(config, other, [video, video], [None, None], [2.0, 4.0]) == made
    assert other.is_cached(made) == [True, False]


def test_a_clients_name_that_is_a_hash_of_content_stands_for_none_when_hashed_again(
    installed: None, config: VllmConfig, pair: Pair
) -> None:
    from vllm.multimodal.hasher import MultiModalHasher

    other, video = pair.more(), a_video(4)
    (hash,) = video_hashes(config, pair.p0, [video], [None], [2.0], configured=True)
    name = MultiModalHasher.hash_kwargs("blake3", model_id=pair.p0.model_name, video=video)
    assert video_hashes(config, pair.p0, [a_video(5)], [name], [2.0], configured=True) == [hash]
    stored_by(pair.p0, hash, 5)
    assert video_hashes(config, other, [video], [None], [2.0], configured=True) == [hash]
    assert other.is_cached([hash]) == [False]


def with_id(picture: Any, id: uuid.UUID) -> Any:
    """As a program gives it that has opened a file, and has given it an id of its own."""
    picture.getexif()[ExifTags.Base.ImageID] = id
    return MediaWithBytes(picture, picture.tobytes())


def test_a_pictures_own_id_says_nothing_to_other_frontends(installed: None, config: VllmConfig) -> None:
    from vllm.renderers import renderer_from_config

    frontends = [renderer_from_config(config), renderer_from_config(config)]
    for frontend in frontends:
        frontend.mm_processor_cache.cache._puts.wait_s = PATIENCE_S
    id = uuid.uuid4()
    first = rendered(frontends[0], [with_id(a_picture(31), id)])
    second = rendered(frontends[1], [with_id(a_picture(32), id)])
    assert first["mm_hashes"] == second["mm_hashes"], "vLLM names them by the id alone"
    assert frontends[1].mm_processor_cache.make_stats() == (0, 1)
    rendered(frontends[0], [with_id(a_picture(31), id)])
    assert frontends[0].mm_processor_cache.make_stats() == (1, 2), "to the one that it was given to, it does"
    for frontend in frontends:
        frontend.shutdown()


# ---- what makes two processors' outputs differ


def test_the_namespace_is_the_same_in_all_processes_of_an_engine(config: VllmConfig, model: Path) -> None:
    again = EngineArgs(model=str(model), dtype="float32", max_model_len=128).create_engine_config()
    assert processor_namespace(config.model_config) == processor_namespace(again.model_config)


def test_the_namespace_differs_with_settings_of_media_and_with_files(config: VllmConfig, model: Path) -> None:
    known = {processor_namespace(config.model_config).tag}
    for options in ({"mm_processor_kwargs": {"do_rescale": False}}, {"dtype": "bfloat16"}):
        made = EngineArgs(**{"model": str(model), "dtype": "float32", **options}).create_engine_config()  # type: ignore[arg-type]
        known.add(processor_namespace(made.model_config).tag)
    file = model / "preprocessor_config.json"
    before = file.read_bytes()
    file.write_bytes(before + b"\n")
    known.add(processor_namespace(config.model_config).tag)
    file.write_bytes(before)
    assert len(known) == 4


def test_a_model_whose_files_are_not_to_be_found_is_shared_with_nobody(config: VllmConfig, tmp_path: Path) -> None:
    elsewhere = copy.copy(config.model_config)
    elsewhere.model = str(tmp_path / "gone")
    assert processor_namespace(elsewhere).tag != processor_namespace(elsewhere).tag
