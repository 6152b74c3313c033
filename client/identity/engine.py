"""Names what a vLLM engine's encoder makes: the engine's namespace."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..namespace import Namespace
from .checkpoints import package_version, vllm_version, weights_fingerprint
from .content import dtype_name


def encoder_namespace(vllm_config: Any, *, revision: str = "", tenant: str = "") -> Namespace | None:
    """The namespace of an engine's encoder outputs; None if its weights have no name.

    Args:
        revision: names the weights, in place of a fingerprint of their files.
        tenant: a salt.

    Raises:
        OSError: a file of the model cannot be read.
    """
    model = vllm_config.model_config
    load = getattr(vllm_config.load_config, "load_format", "auto")
    weights_name = revision or weights_fingerprint(
        model.model,
        # What was loaded, should the branch lead to something else by now.
        getattr(model.hf_config, "_commit_hash", None) or model.revision,
        str(load),
        seed=model.seed or 0,
        download_folder=getattr(vllm_config.load_config, "download_dir", None),
    )
    if weights_name is None:
        return None
    # What was made of the configuration is what counts, wherever it came from: files, overrides, functions.
    config = _config_digest(model.hf_config)
    multimodal = getattr(model, "multimodal_config", None)
    processor = {
        "transformers": package_version("transformers"),
        "vllm": vllm_version(),
        "processor_kwargs": getattr(multimodal, "mm_processor_kwargs", None),
        "pruning": getattr(multimodal, "video_pruning_rate", None),
    }
    weights = {
        "quantization": getattr(model, "quantization", None),
        "config": config,
        "attention": getattr(multimodal, "mm_encoder_attn_dtype", None),
        "scales": getattr(multimodal, "mm_encoder_fp8_scale_path", None),
    }
    return Namespace(
        # Named by content: wherever it lies, and whatever it is called there.
        model="+".join(model.architectures),
        revision=_described(weights_name, weights),
        dtype=dtype_name(model.dtype),
        processor=_described("vllm", processor),
        tenant=tenant,
    )


def with_adapter(namespace: Namespace, adapter: str) -> Namespace:
    """The namespace of the same encoder with an adapter."""
    return replace(namespace, lora=adapter)


def _config_digest(config: Any) -> str:
    """SHA-256 over a configuration, but for where it was read from."""

    def placeless(given: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in given.items() if name != "_name_or_path"}

    resolved = json.loads(config.to_json_string(use_diff=False), object_hook=placeless)
    return hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()


def _described(name: str, properties: Mapping[str, object]) -> str:
    return " ".join([name, *(f"{key}={value!r}" for key, value in properties.items() if value is not None)])
