"""Names the outputs of a vLLM engine's encoder and processor, and its KV: their namespaces.

Owns: the parts of these names apart from vLLM's configuration fields and environment (vllm_fields), and the cases
without a name. Does not own: the digests of files (checkpoints).

Invariants: engines whose outputs may differ have different namespaces.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, Final

from ...errors import TensordError
from ..arguments.namespace import Namespace
from ..checkpoints import fingerprint as files
from .content import dtype_name
from .described import described_config, digest_of
from .vllm_fields import READS_LENGTH, TABLE, LeftOut, Side, surroundings

# Version of the stored form of items. Raise it whenever client/vllm/processor/items.py changes its output.
_FORM: Final = 2
_TOWERS_ELSEWHERE: Final = {"UltravoxModel": ("audio_model_id",)}
"""By architecture: settings that name another model, whose weights the encoder uses. vLLM calls them secondary weights.
Secondary weights of other architectures are in the model's own folder, or belong to the language model."""
_READ_ELSEWHERE: Final = frozenset({"tensorizer", "dummy"})
"""Load formats whose weights are not those in the model's folder."""


class Nameless(TensordError):
    """The engine's encoder outputs, or its KV, have no name. The message says why, and what to do."""


def encoder_namespace(vllm_config: Any, *, revision: str = "", tenant: str = "") -> Namespace:
    """The namespace of an engine's encoder outputs. `revision`: a name for the weights, instead of a fingerprint of
    their files. `tenant`: a salt.

    Raises:
        Nameless: the weights are not on this host, or outputs depend on more than input and weights.
        OSError: a file of the model cannot be read.
    """
    settings = _described(vllm_config, "encoder")
    lora = vllm_config.lora_config
    if lora is None or not lora.enable_tower_connector_lora:
        # Adapters affect only the language model, not the encoder.
        settings["VllmConfig"]["lora_config"] = None
    return _model_namespace(vllm_config, "encoder", settings, revision, tenant)


def kv_namespace(vllm_config: Any, layout: Any, *, revision: str = "", tenant: str = "") -> Namespace:
    """As `encoder_namespace`, of an engine's KV. `layout`: what a stored block depends on beside the configuration:
    block sizes, groups, the number of ranks."""
    settings = [_described(vllm_config, "kv"), described_config(layout)]
    return _model_namespace(vllm_config, "kv", settings, revision, tenant)


def processor_namespace(model_config: Any) -> Namespace:
    """The namespace of the outputs of vLLM's processor for a model. Raises OSError if a file cannot be read.

    If the files of the model or of its tokenizer are not found, the outputs are shared with no other process, since a
    name alone does not tell two processors apart.
    """
    # A single file of weights may lie among other models, so subfolders of its folder are not read.
    deep = not Path(model_config.model).is_file()
    small_files = [
        secrets.token_hex(16)
        if folder is None
        else files.files_digest(files.processor_files(folder, deep=deep), folder)
        for folder in _folders(model_config)
    ]
    settings = [_FORM, _described(model_config, "processor"), small_files]
    return _namespace(model_config, "processor", settings, "files")


def _model_namespace(vllm_config: Any, side: Side, settings: Any, revision: str, tenant: str) -> Namespace:
    """The namespace of what the engine's model computes with its weights."""
    model, load = vllm_config.model_config, vllm_config.load_config
    weights = [revision] if revision else [_weights(place, commit, load) for place, commit in _places(model)]
    if getattr(model.multimodal_config, "mm_encoder_attn_dtype", None) == "fp8":
        raise Nameless("with mm_encoder_attn_dtype=fp8 an output depends on the inputs encoded before it")
    return _namespace(model, side, [settings], "+".join(weights), tenant)


def _weights(place: str, commit: str | None, load: Any) -> str:
    """The name of the weights in one place. Raises Nameless: they are not in files on this host, or have changed."""
    found = files.weights_fingerprint(place, commit, download_folder=load.download_dir)
    if found is None or str(load.load_format) in _READ_ELSEWHERE:
        raise Nameless(f"the weights of {place} are not in files on this host; set tensord.revision")
    if (changed := files.weights_changed(place)) is not None:
        raise Nameless(f"{changed} has changed since the engine began to load it; start the engine again")
    return found


def _namespace(model: Any, side: Side, settings: list[Any], revision: str, tenant: str = "") -> Namespace:
    """A namespace that depends on content only, not on the model's path or name."""
    length = model.max_model_len if READS_LENGTH.intersection(model.architectures) else None
    return Namespace(
        model="+".join(model.architectures),
        revision=f"{revision} {digest_of([*settings, _remote_code(model), length])}",
        dtype=dtype_name(model.dtype),
        processor=f"vllm {files.vllm_version()}, {digest_of(surroundings(side))}",
        tenant=tenant,
    )


def _described(config: Any, side: Side) -> Any:
    return described_config(config, lambda name: TABLE.get(name, LeftOut()).of(side))


def _places(model: Any) -> list[tuple[str, str | None]]:
    """The folders or ids, with the revisions, of the model and of other models whose encoder it uses."""
    # The loaded commit, in case the branch has moved since.
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision
    names = [name for architecture in model.architectures for name in _TOWERS_ELSEWHERE.get(architecture, ())]
    elsewhere = [getattr(model.hf_config, name, None) for name in names]
    return [(model.model, commit), *((each, None) for each in elsewhere if each is not None)]


def _folders(model: Any) -> list[Path | None]:
    """Folders with the files of the model, of its tokenizer, and of other models that it refers to. None if not
    found."""
    (_, commit), *others = _places(model)
    return [
        Path(model.model).parent if Path(model.model).is_file() else files.model_folder(model.model, commit),
        files.model_folder(model.tokenizer, model.tokenizer_revision),
        *(files.model_folder(place) for place, _ in others),
    ]


def _remote_code(model: Any) -> list[str] | None:
    """Digests of the code that `trust_remote_code` allows the model and its processor to run. Code that is not found
    on this host gets a random one."""
    if not model.trust_remote_code:
        return None
    folders = [folder for folder in _folders(model) if folder is not None]
    elsewhere = {name: files.model_folder(name, model.code_revision) for name in files.other_repositories(folders)}
    codes = [
        secrets.token_hex(16)
        if folder is None
        else files.files_digest([path for path in files.files_below(folder) if path.suffix == ".py"], folder)
        for folder in [*folders, *elsewhere.values()] or [None]
    ]
    return [*codes, *elsewhere]
