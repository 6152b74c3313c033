"""Which engines share KV, and the parts of a KV layout that two engines must have in common.

Owns: the list of what is covered. Does not own: the configuration's part of the name (identity.engine).

Invariants: an engine that is not covered shares nothing. What is covered is tested with a real engine on a CPU. On a
GPU only the worker's copies were run, without an engine.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from packaging.version import InvalidVersion, Version
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, SlidingWindowSpec

VERSION_LEAST: Final = Version("0.32")
VERSION_END: Final = Version("0.33")
"""vLLM's versions from VERSION_LEAST on and before VERSION_END are tested."""
GROUPS: Final = (FullAttentionSpec, SlidingWindowSpec)
"""Kinds of KV cache groups. Subclasses, as for latent attention, are not among them."""
DEVICES: Final = ("cpu", "cuda")
"""Engines were run on "cpu" only."""
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
FORM: Final = 1
"""Version of the stored form. Raise it whenever a block with the same name is stored in another form."""


def why_not_covered(vllm_config: Any, kv_cache_config: Any, version: str) -> str | None:
    """Why the engine shares no KV, and what to do; None if it is covered. `version`: vLLM's."""
    if not _is_tested(version):
        return (
            f"vLLM {version} is not among the tested versions, from {VERSION_LEAST} to before {VERSION_END}: install "
            "one of these, or a newer tensord"
        )
    parallel = vllm_config.parallel_config
    device = vllm_config.device_config.device_type
    if device not in DEVICES or (device == "cuda" and torch.version.hip):
        kind = "an AMD GPU" if torch.version.hip else f"the device {device!r}"
        return f"KV on {kind} is not supported, only on CPUs and NVIDIA GPUs: leave --kv-transfer-config out"
    for name in ("pipeline", "prefill_context", "decode_context"):
        size = getattr(parallel, f"{name}_parallel_size")
        if size > 1:
            return f"{name}_parallel_size={size} is not supported: set it to 1"
    if vllm_config.speculative_config is not None:
        return "speculative decoding is not supported: leave --speculative-config out"
    if not kv_cache_config.kv_cache_groups:
        return "the model has no KV cache"
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        wrong = _why_not(group.kv_cache_spec)
        if wrong is None and number not in kv_cache_config.prefix_cacheable_group_ids:
            wrong = "its blocks have no names in vLLM's prefix cache"
        if wrong is not None:
            return f"the KV cache group {number} ({', '.join(group.layer_names[:2])}, …) is not supported: {wrong}"
    return None


def layout_of(config: Any, kv_cache_config: Any) -> list[Any]:
    """What a stored block depends on beside the engine's configuration, as a value for `kv_namespace`.

    Args:
        config: vLLM's OffloadingConfig.
        kv_cache_config: vLLM's KVCacheConfig. Its number of blocks is left out.
    """
    return [
        FORM,
        config.cache.blocks_per_chunk,
        config.cache.tokens_per_hash,
        config.kv_cache_layout,
        config.parallel.world_size,
        [[group.kv_cache_spec, list(group.layer_names)] for group in kv_cache_config.kv_cache_groups],
    ]


def _is_tested(version: str) -> bool:
    try:
        return VERSION_LEAST <= Version(Version(version).public) < VERSION_END
    except InvalidVersion:
        return False


def _why_not(spec: Any) -> str | None:
    if type(spec) not in GROUPS:
        return f"{type(spec).__name__} is none of {', '.join(kind.__name__ for kind in GROUPS)}"
    if spec.dtype not in DTYPES or spec.kv_quant_mode != KVQuantMode.NONE:
        return f"kv_cache_dtype {spec.dtype}, quantized as {spec.kv_quant_mode.name}; set --kv-cache-dtype auto"
    return None
