"""Which engines share KV, and what the others say at their start."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from tensord.client.identity.engine import kv_namespace
from tensord.client.vllm.kv.connector import why_not_covered
from tensord.client.vllm.plugin import why_untested

from ..conftest import StartEngine
from ..engine import EngineError
from .conftest import KVStand, asked, fresh_text, with_kv

FULL = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
WINDOW = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64)


@pytest.fixture(scope="module")
def config(kv_model: Path) -> VllmConfig:
    return EngineArgs(str(kv_model), dtype="float32", max_model_len=256, enforce_eager=True).create_engine_config()


def caches(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layers.{number}"], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


MLA = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32)
MAMBA = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0", "dev"])
def test_a_version_of_vllm_that_was_not_tested_shares_nothing(version: str) -> None:
    assert why_untested(version) == f"vLLM {version} is not a tested version: install 0.32, or a newer tensord"
    assert why_untested("0.32.1") is why_untested("0.32.0+cpu") is None


def test_full_attention_and_sliding_windows_are_covered_unless_on_an_amd_gpu(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_not_covered(config, caches(FULL)) is None
    assert why_not_covered(config, caches(FULL, WINDOW)) is None
    monkeypatch.setattr(config.device_config, "device_type", "cuda")
    assert why_not_covered(config, caches(FULL, WINDOW)) is None
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert "KV on an AMD GPU is not supported" in (why_not_covered(config, caches(FULL)) or "")


@pytest.mark.parametrize(
    ("said", "setting", "spec"),
    [
        ("pipeline_parallel_size=2", ("parallel_config", "pipeline_parallel_size", 2), FULL),
        ("decode_context_parallel_size=2", ("parallel_config", "decode_context_parallel_size", 2), FULL),
        ("KV on the device 'xpu' is not supported", ("device_config", "device_type", "xpu"), FULL),
        ("layers.1.*MLAAttentionSpec", None, MLA),
        ("layers.1.*MambaSpec", None, MAMBA),
        ("layers.1.*torch.uint8", None, replace(FULL, dtype=torch.uint8)),
        ("layers.1.*FP8_PER_TENSOR", None, replace(FULL, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)),
    ],
)
def test_what_was_not_tested_ends_sharing_of_the_whole_model(
    config: VllmConfig,
    said: str,
    setting: tuple[str, str, object] | None,
    spec: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if setting is not None:
        part, name, value = setting
        monkeypatch.setattr(getattr(config, part), name, value)
    why = why_not_covered(config, caches(FULL, spec))
    assert why is not None and re.search(said, why)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("model_config", "max_model_len", 128),
        ("model_config", "disable_sliding_window", True),
        ("cache_config", "cache_dtype", "bfloat16"),
        ("parallel_config", "enable_expert_parallel", True),
    ],
)
def test_settings_of_the_language_model_are_in_the_name_of_its_kv(
    config: VllmConfig, part: str, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kv_namespace(config, [1]).tag
    assert kv_namespace(config, [2]).tag != before, "another layout"
    monkeypatch.setattr(config.cache_config, "gpu_memory_utilization", 0.5)
    assert kv_namespace(config, [1]).tag == before, "the size of the cache changes no block"
    monkeypatch.setattr(getattr(config, part), name, value)
    assert kv_namespace(config, [1]).tag != before


def test_hashes_of_blocks_that_differ_from_process_to_process_are_refused_at_the_start(
    kv_model: Path, start_engine: StartEngine, tmp_path: Path
) -> None:
    options = with_kv(tmp_path / "none.sock")
    engine = start_engine(kv_model, **options, prefix_caching_hash_algo="xxhash")
    with pytest.raises(EngineError, match="TensordKVConnector needs sha256 or sha256_cbor"):
        engine.wait_up()
    engine.close()


def test_an_engine_that_is_not_covered_answers_and_says_why_it_shares_nothing(
    kv: KVStand, kv_model: Path, start_engine: StartEngine
) -> None:
    text = fresh_text()
    right, _ = kv.store(kv.first, text=text)
    guesses = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    with start_engine(kv_model, **with_kv(kv.daemon.socket), speculative_config=guesses) as other:
        there = kv.keys()
        answer, computed = asked(other, text=text)
        assert answer.tokens == right.tokens
        assert computed > len(text)
        assert other.log.count("this engine shares no KV: speculative decoding is not supported") == 1
        assert kv.keys() == there
