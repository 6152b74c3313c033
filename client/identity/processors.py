"""What makes two processors' outputs differ, as a namespace.

Owns: which settings and files count. The weights do not: no processor reads them. What counts is all that it may read:
every setting of vLLM about media but those of its caches, the model's configuration as overridden, the small files that
stand beside the weights and the tokenizer, and the versions of the programs.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import vllm

from ..namespace import Namespace

# The form in which items are stored: raised whenever items.py changes what it writes.
_FORM: Final = 1
_FILES: Final = frozenset({".jinja", ".json", ".model", ".py", ".tiktoken", ".txt", ".vocab", ".yaml"})
# Of vLLM's settings about media, those that change no output.
_OF_CACHES: Final = frozenset(
    {
        "mm_encoder_attn_backend",
        "mm_encoder_attn_dtype",
        "mm_encoder_fp8_scale_path",
        "mm_encoder_fp8_scale_save_margin",
        "mm_encoder_fp8_scale_save_path",
        "mm_encoder_only",
        "mm_encoder_tp_mode",
        "mm_ipc_gpu_memory_gb",
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "mm_shm_cache_max_object_size_mb",
        "mm_tensor_ipc",
        "skip_mm_profiling",
    }
)


def processor_namespace(model_config: Any) -> Namespace:
    """The namespace of what vLLM's processor of a model makes.

    Where the model's files are not to be found, its outputs are shared with no other process: a name alone tells no two
    processors apart.
    """
    digest = hashlib.sha256()
    model = _folder(model_config.model, model_config.revision)
    if model is None:
        digest.update(os.urandom(32))
    for folder in (model, _folder(model_config.tokenizer, model_config.tokenizer_revision)):
        for path in _small_files(folder) if folder is not None else ():
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)} ".encode())
            digest.update(content)
    described = [_FORM, _settings(model_config.get_multimodal_config()), _configuration(model_config.hf_config)]
    digest.update(json.dumps(described, sort_keys=True, default=str).encode())
    return Namespace(
        model=str(model_config.model),
        revision=str(model_config.revision or "none"),
        dtype=str(model_config.dtype),
        processor=f"vllm {vllm.__version__}, transformers {version('transformers')}, {digest.hexdigest()}",
    )


def _folder(name: str, revision: str | None) -> Path | None:
    """Where the files of a model stand on this host."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:
        # No name that a hub could have, as of a folder that is not there.
        return None
    return Path(found).parent if isinstance(found, str) else None


def _small_files(folder: Path) -> list[Path]:
    """What stands beside the weights, in an order that is the same everywhere."""
    return sorted(path for path in folder.iterdir() if path.suffix in _FILES and path.is_file())


def _settings(multimodal: Any) -> dict[str, Any]:
    return {field.name: getattr(multimodal, field.name) for field in fields(multimodal) if field.name not in _OF_CACHES}


def _configuration(hf_config: Any) -> str:
    """The model's configuration with what was overridden in it."""
    try:
        return str(hf_config.to_json_string(use_diff=False))
    except (AttributeError, TypeError, ValueError):
        return repr(type(hf_config))
