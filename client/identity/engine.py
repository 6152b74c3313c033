"""Names the outputs of a vLLM engine's encoder and processor, and its KV: their namespaces.

Owns: the parts of these names apart from vLLM's configuration fields (vllm_fields), and the cases without a name. Does
not own: the digests of files (checkpoints).

Invariants: engines whose outputs may differ have different namespaces.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, Literal

from ...errors import TensordError
from ..arguments.namespace import Namespace
from ..checkpoints.fingerprint import files_digest, model_folder, vllm_version, weights_changed, weights_fingerprint
from ..checkpoints.folders import processor_files
from ..checkpoints.remote_code import remote_code
from .content import dtype_name
from .described import described, digest_of
from .surroundings import surroundings
from .vllm_fields import READS_LENGTH, TABLE, Side

# Version of the stored form of items. Raise it whenever client/vllm/processor/items.py changes its output.
_FORM: Final = 2
_TOWERS_ELSEWHERE: Final = {"UltravoxModel": ("audio_model_id",)}
"""By architecture: settings that name another model, whose weights the encoder uses. vLLM calls them secondary weights.
Secondary weights of other architectures are in the model's own folder, or belong to the language model."""
_READ_ELSEWHERE: Final = frozenset({"tensorizer"})
"""Load formats whose weights are not those in the model's folder."""


class Nameless(TensordError):
    """The engine's encoder outputs, or its KV, have no name. The message says why, and what to do."""


def encoder_namespace(vllm_config: Any, *, revision: str = "", tenant: str = "") -> Namespace:
    """The namespace of an engine's encoder outputs.

    Args:
        revision: a name for the weights, instead of a fingerprint of their files.
        tenant: a salt.

    Raises:
        Nameless: the weights are not on this host, or outputs depend on more than input and weights.
        OSError: a file of the model cannot be read.
    """
    settings = _described(vllm_config, "encoder")
    lora = vllm_config.lora_config
    if lora is None or not lora.enable_tower_connector_lora:
        # Adapters affect only the language model, not the encoder.
        settings["VllmConfig"]["lora_config"] = None
    return _model_namespace(vllm_config, "encoder", settings, revision=revision, tenant=tenant)


def kv_namespace(vllm_config: Any, layout: Any, *, revision: str = "", tenant: str = "") -> Namespace:
    """The namespace of an engine's KV.

    Args:
        layout: what a stored block depends on beside the configuration: block sizes, groups, the number of ranks.
        revision, tenant: as for `encoder_namespace`.

    Raises:
        Nameless, OSError: as for `encoder_namespace`.
    """
    settings = [_described(vllm_config, "kv"), described(layout)]
    return _model_namespace(vllm_config, "kv", settings, revision=revision, tenant=tenant)


def _model_namespace(
    vllm_config: Any, side: Literal["encoder", "kv"], settings: Any, *, revision: str, tenant: str
) -> Namespace:
    """The namespace of what the engine's model computes with its weights."""
    model, load = vllm_config.model_config, vllm_config.load_config
    multimodal = model.multimodal_config
    # The loaded commit, in case the branch has moved since.
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision
    weights = revision or weights_fingerprint(
        model.model,
        commit,
        str(load.load_format),
        seed=model.seed or 0,
        download_folder=load.download_dir,
    )
    if weights is None or (not revision and str(load.load_format) in _READ_ELSEWHERE):
        raise Nameless(f"the weights of {model.model} are not in files on this host; set tensord.revision")
    for place in [] if revision else [model.model, *_elsewhere(model)]:
        changed = weights_changed(place)
        if changed is not None:
            raise Nameless(f"{changed} has changed since the engine began to load it; start the engine again")
    scales = getattr(multimodal, "mm_encoder_fp8_scale_path", None)
    if getattr(multimodal, "mm_encoder_attn_dtype", None) == "fp8" and scales is None:
        raise Nameless(
            "with mm_encoder_attn_dtype=fp8 and without mm_encoder_fp8_scale_path an output depends on the inputs "
            "encoded before it; save the scales, and set mm_encoder_fp8_scale_path"
        )
    return _namespace(
        model,
        side,
        revision=weights,
        tenant=tenant,
        settings=[
            settings,
            hashlib.sha256(Path(scales).read_bytes()).hexdigest() if scales is not None else None,
            [] if revision else _towers(model, str(load.load_format), load.download_dir),
            _remote_code(model),
            _length(model),
        ],
    )


def processor_namespace(model_config: Any) -> Namespace:
    """The namespace of the outputs of vLLM's processor for a model.

    If the files of the model or of its tokenizer are not found, the outputs are shared with no other process, since a
    name alone does not tell two processors apart.

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


def _namespace(model: Any, side: Side, *, revision: str, settings: list[Any], tenant: str = "") -> Namespace:
    """A namespace that depends on content only, not on the model's path or name."""
    return Namespace(
        model="+".join(model.architectures),
        revision=f"{revision} {digest_of(settings)}",
        dtype=dtype_name(model.dtype),
        processor=f"vllm {vllm_version()}, {digest_of(surroundings(side))}",
        tenant=tenant,
    )


def _described(config: Any, side: Side) -> Any:
    def chosen(value: Any) -> list[str]:
        table = TABLE.get(type(value).__name__)
        left_out = table.of(side) if table is not None else frozenset()
        return [field.name for field in fields(value) if field.name not in left_out]

    return described(config, chosen)


def _length(model: Any) -> int | None:
    return model.max_model_len if READS_LENGTH.intersection(model.architectures) else None


def _folders(model: Any) -> list[Path | None]:
    """Folders with the files of the model, of its tokenizer, and of other models that it refers to. None if not
    found."""
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision
    return [
        Path(model.model).parent if Path(model.model).is_file() else model_folder(model.model, commit),
        model_folder(model.tokenizer, model.tokenizer_revision),
        *map(model_folder, _elsewhere(model)),
    ]


def _elsewhere(model: Any) -> list[str]:
    """Other models, as folders or ids, whose encoder this model uses."""
    names = [name for architecture in model.architectures for name in _TOWERS_ELSEWHERE.get(architecture, ())]
    return [each for name in names if (each := getattr(model.hf_config, name, None)) is not None]


def _towers(model: Any, load_format: str, download_folder: str | None) -> list[str]:
    found = []
    for elsewhere in _elsewhere(model):
        tower = weights_fingerprint(elsewhere, None, load_format, seed=model.seed or 0, download_folder=download_folder)
        if tower is None:
            raise Nameless(f"the encoder's weights {elsewhere} are not in files on this host; set tensord.revision")
        found.append(tower)
    return found


def _remote_code(model: Any) -> list[str] | None:
    if not model.trust_remote_code:
        return None
    folders = [folder for folder in _folders(model) if folder is not None]
    return remote_code(folders, model.code_revision) if folders else [secrets.token_hex(16)]


def _small_files(model: Any) -> list[str]:
    """A digest of the files beside the weights of each folder, and beside the tokenizer."""
    # A single file of weights may lie among other models, so subfolders of its folder are not read.
    deep = not Path(model.model).is_file()
    return [
        secrets.token_hex(16) if folder is None else files_digest(processor_files(folder, deep=deep), folder)
        for folder in _folders(model)
    ]
