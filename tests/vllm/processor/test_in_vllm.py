"""The processor cache in vLLM's place: which of vLLM's caches it replaces, and what vLLM's own renderer makes of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vllm.config import VllmConfig
from vllm.multimodal.cache import MultiModalProcessorOnlyCache

from tensord.client.vllm import plugin
from tensord.client.vllm.processor.caches import TensordReceiverCache, TensordSenderCache
from tensord.errors import BadConfiguration

from ...daemon_process import PATIENCE_S
from ..tiny_llava import IMAGE, PICTURE_TOKENS
from .stand import UPDATES, an_item, feature, fresh, is_whole


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
    sender.cache._sender.wait_s = PATIENCE_S
    sent, _ = sender.get_and_update_item((item, UPDATES), hash)
    assert not is_whole(sent) and receiver.get_and_update_item(sent, hash) == item
    sender.close()


def test_a_processor_cache_switched_off_in_vllm_stays_off_and_engines_on_other_hosts_have_vllms_own(
    installed: None, config: VllmConfig
) -> None:
    from vllm.multimodal import cache
    from vllm.renderers import base

    elsewhere = changed(config, data_parallel_size=4, data_parallel_size_local=2)
    assert isinstance(base.processor_cache_from_config(elsewhere), MultiModalProcessorOnlyCache)
    off = copy.deepcopy(config)
    off.model_config.multimodal_config.mm_processor_cache_gb = 0
    assert cache.processor_cache_from_config(off) is None
    assert cache.engine_receiver_cache_from_config(off) is None


@pytest.mark.parametrize("value", ["0", "", "yes", "1"])
def test_vllms_own_stays_unless_it_is_switched_on_in_a_tested_version_and_a_switch_that_is_none_is_named(
    vllm_as_it_was: None, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    from vllm.multimodal.cache import factories

    before = factories.processor_cache_from_config
    monkeypatch.setenv(plugin.PROCESSOR_CACHE, value)
    monkeypatch.setattr("vllm.__version__", "0.33.0")
    refuses = pytest.raises(BadConfiguration, match="TENSORD_VLLM_PROCESSOR_CACHE='yes' must be 0 or 1")
    with refuses if value == "yes" else nullcontext():
        plugin.register()
    assert factories.processor_cache_from_config is before


def a_picture(number: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (70, 90, 3), np.uint8))


@pytest.fixture
def renderers(installed: None) -> Iterator[Callable[..., list[Any]]]:
    """Makes vLLM's renderers of these configurations: frontends, each with a processor cache."""
    from vllm.renderers import renderer_from_config

    made: list[Any] = []

    def make(*configs: VllmConfig) -> list[Any]:
        made.extend(renderer_from_config(each) for each in configs)
        for renderer in made:
            renderer.mm_processor_cache.cache._sender.wait_s = PATIENCE_S
        return made

    yield make
    for renderer in made:
        renderer.shutdown()


def rendered(renderer: Any, pictures: list[Any], uuids: list[str | None] | None = None) -> Any:
    """What vLLM makes of a prompt with these pictures, the way every request goes."""
    prompt = [5, *[IMAGE] * len(pictures), 6]
    return renderer._process_multimodal(
        prompt, {"image": pictures}, {"image": uuids} if uuids is not None else None, mm_processor_kwargs=None
    )


def test_a_picture_is_processed_by_one_frontend_for_all(
    renderers: Callable[..., list[Any]], config: VllmConfig
) -> None:
    *frontends, plain = renderers(config, config, config)
    engine = TensordReceiverCache(config)
    first = rendered(frontends[0], [a_picture(1), a_picture(2)])
    second = rendered(frontends[1], [a_picture(3), a_picture(2), a_picture(1)])
    assert frontends[1].mm_processor_cache.make_stats() == (2, 3)
    assert second["prompt_token_ids"] == [5, *[IMAGE] * PICTURE_TOKENS * 3, 6]
    plain._mm_processor_cache = None
    expected = rendered(plain, [a_picture(3), a_picture(2), a_picture(1)])
    assert second["mm_placeholders"] == expected["mm_placeholders"]
    for made, wanted in ((first, rendered(plain, [a_picture(1), a_picture(2)])), (second, expected)):
        hashes = made["mm_hashes"]["image"]
        filled = engine.get_and_update_features(list(map(feature, hashes, made["mm_kwargs"]["image"])))
        assert [f.data for f in filled] == list(wanted["mm_kwargs"]["image"])
