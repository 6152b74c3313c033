"""Names what a vLLM engine's encoder and its processor make: their namespaces.

Owns: what of vLLM's configuration, beside its fields (vllm_fields), is in those names, and when there is no name.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from ...errors import TensordError
from ..namespace import Namespace
from .checkpoints import model_folder, vllm_version, weights_fingerprint
from .content import dtype_name
from .described import described
from .remote_code import remote_code
from .surroundings import surroundings
from .vllm_fields import READS_LENGTH, TABLE, Side

# The form in which items are stored: raised whenever vllm/items.py changes what it writes.
_FORM: Final = 2
_BESIDE_WEIGHTS: Final = frozenset(
    {".jinja", ".json", ".model", ".py", ".tiktoken", ".txt", ".vocab", ".yaml"},
)
"""What a processor may read of a model's folder: no processor reads weights."""


class Nameless(TensordError):
    """What the engine's encoder makes cannot be named; the text says why, and what to do."""


def encoder_namespace(vllm_config: Any, *, revision: str = "", tenant: str = "") -> Namespace:
    """The namespace of an engine's encoder outputs.

    Args:
        revision: names the weights, in place of a fingerprint of their files.
        tenant: a salt.

    Raises:
        Nameless: the weights are not here, or outputs do not follow from input and weights alone.
        OSError: a file of the model cannot be read.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    multimodal = model.multimodal_config
    # What was loaded, should the branch lead to something else by now.
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision
    weights = revision or weights_fingerprint(
        model.model, commit, str(load.load_format), seed=model.seed or 0, download_folder=load.download_dir
    )
    if weights is None:
        raise Nameless(f"the weights of {model.model} are not among files here; give tensord.revision")
    scales = getattr(multimodal, "mm_encoder_fp8_scale_path", None)
    if getattr(multimodal, "mm_encoder_attn_dtype", None) == "fp8" and scales is None:
        raise Nameless(
            "with mm_encoder_attn_dtype=fp8 and without mm_encoder_fp8_scale_path an output follows from what was "
            "encoded before it; save the scales, and give them"
        )
    settings = _described(vllm_config, "encoder")
    lora = vllm_config.lora_config
    if lora is None or not lora.enable_tower_connector_lora:
        # Adapters of the language model alone: no encoder has any.
        settings["VllmConfig"]["lora_config"] = None
    return _namespace(
        model,
        "encoder",
        revision=weights,
        tenant=tenant,
        settings=[
            settings,
            hashlib.sha256(Path(scales).read_bytes()).hexdigest() if scales is not None else None,
            _remote_code(model),
            _length(model),
        ],
    )


def processor_namespace(model_config: Any) -> Namespace:
    """The namespace of what vLLM's processor of a model makes.

    Where the files of the model or its tokenizer are not to be found, its outputs are shared with no other process: a
    name alone tells no two processors apart.

    Raises:
        OSError: a file cannot be read.
    """
    return _namespace(
        model_config,
        "processor",
        revision="files",
        settings=[
            _FORM,
            _described(model_config, "processor"),
            _small_files(model_config),
            _remote_code(model_config),
            _length(model_config),
        ],
    )


def with_adapter(namespace: Namespace, adapter: str) -> Namespace:
    """The namespace of the same encoder with an adapter."""
    return replace(namespace, lora=adapter)


def _namespace(model: Any, side: Side, *, revision: str, settings: list[Any], tenant: str = "") -> Namespace:
    """By content: wherever the model lies, and whatever it is called there."""
    return Namespace(
        model="+".join(model.architectures),
        revision=f"{revision} {_digest(settings)}",
        dtype=dtype_name(model.dtype),
        processor=f"vllm {vllm_version()}, {_digest(surroundings(side))}",
        tenant=tenant,
    )


def _described(config: Any, side: Side) -> Any:
    def chosen(value: Any) -> list[str]:
        table = TABLE.get(type(value).__name__)
        ignored = table.ignored(side) if table is not None else frozenset()
        return [field.name for field in fields(value) if field.name not in ignored]

    return described(config, chosen)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _length(model: Any) -> int | None:
    return model.max_model_len if READS_LENGTH.intersection(model.architectures) else None


def _folders(model: Any) -> list[Path | None]:
    """Where the files of the model and those of its tokenizer stand, but for weights in a folder of their own."""
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision
    return [
        Path(model.model).parent if Path(model.model).is_file() else model_folder(model.model, commit),
        model_folder(model.tokenizer, model.tokenizer_revision),
    ]


def _remote_code(model: Any) -> list[str] | None:
    if not model.trust_remote_code:
        return None
    folders = [folder for folder in _folders(model) if folder is not None]
    return remote_code(folders, model.code_revision) if folders else [secrets.token_hex(16)]


def _small_files(model: Any) -> list[list[str]]:
    """Names and digests of what stands beside the weights, and beside the tokenizer."""
    found = []
    for folder in _folders(model):
        if folder is None:
            found.append([secrets.token_hex(16)])
            continue
        paths = sorted(path for path in folder.iterdir() if path.suffix in _BESIDE_WEIGHTS and path.is_file())
        found.append([f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in paths])
    return found
