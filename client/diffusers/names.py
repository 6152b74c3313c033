"""Names a diffusers pipeline as far as its prompt embeddings depend on it.

Owns: the pipelines that are known, the parts of their names, the names of tokenizers. Does not own: names of weights
and settings of text encoders (identity), nor the arguments of a call (prompts).

Invariants: two pipelines with equal names encode equal prompts to equal embeddings. A part without a name raises
NotShared.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

import diffusers
import torch
import transformers

from ...errors import TensordError
from ..arguments.namespace import Namespace
from ..identity.described import digest_of
from ..identity.modules import Fingerprint
from ..identity.origin import LIBRARIES, is_from
from ..identity.settings import machine, settings
from ..transformers.conditions import Untouchable, attention_of, check_still
from ..transformers.reasons import NotShared

__all__ = ["PIPELINES", "check_pipeline", "name_of"]

VERSION: Final = "0.42."
"""The version of diffusers whose pipelines are known."""
PIPELINES: Final = frozenset(
    {
        "FluxImg2ImgPipeline",
        "FluxInpaintPipeline",
        "FluxPipeline",
        "StableDiffusion3Img2ImgPipeline",
        "StableDiffusion3InpaintPipeline",
        "StableDiffusion3Pipeline",
        "StableDiffusionImg2ImgPipeline",
        "StableDiffusionInpaintPipeline",
        "StableDiffusionPipeline",
        "StableDiffusionXLImg2ImgPipeline",
        "StableDiffusionXLInpaintPipeline",
        "StableDiffusionXLPipeline",
    }
)
_ENCODERS: Final = ("text_encoder", "text_encoder_2", "text_encoder_3")
_TOKENIZERS: Final = ("tokenizer", "tokenizer_2", "tokenizer_3")
_METHODS: Final = ("encode_prompt", "_get_clip_prompt_embeds", "_get_t5_prompt_embeds", "maybe_convert_prompt")
_FROM: Final = LIBRARIES | {"diffusers"}
_FUNCTIONS: Final = (FunctionType, MethodType, BuiltinFunctionType)
_PLAIN: Final = (bool, int, float, str, type(None))
_UNSAID: Final = frozenset(
    {
        "_in_target_context_manager",
        "_tokenizer",
        "deprecation_warnings",
        "files_loaded",
        "init_inputs",
        "init_kwargs",
        "name_or_path",
        "verbose",
    }
)
"""Attributes of a tokenizer that are records, paths, or named in another way."""


def name_of(pipeline: Any, plain: type, device: torch.device, fingerprint: Fingerprint, tenant: str) -> Namespace:
    """The namespace of the pipeline's prompt embeddings.

    Args:
        plain: the pipeline's class without the wrapper.
        device: where the embeddings are wanted.
        fingerprint: of the text encoders' weights; keeps their hash from call to call.

    Raises:
        NotShared: there is no name, because something in the pipeline has none.
    """
    check_pipeline(pipeline, plain)
    encoders = {name: part for name in _ENCODERS if (part := getattr(pipeline, name, None)) is not None}
    try:
        check_still(torch.empty(0, device=device), encoders.values())
    except Untouchable:
        raise NotShared(
            f"a text encoder of {plain.__name__} is in training mode, needs gradients, lies on another device than "
            f"{device}, or has hooks, adapters or other code that is not torch's or transformers'"
        ) from None
    modules = [module for encoder in encoders.values() for module in encoder.modules()]
    try:
        parts = [
            {name: settings(list(encoder.modules())) for name, encoder in encoders.items()},
            attention_of(modules),
            {name: _tokenizer(part) for name in _TOKENIZERS if (part := getattr(pipeline, name, None)) is not None},
            _settings(pipeline),
            machine(device),
            fingerprint.current(encoders),
        ]
    except TensordError as error:
        raise NotShared(str(error)) from None
    return Namespace(
        model=f"{plain.__module__}.{plain.__qualname__}",
        revision=digest_of(parts),
        dtype=",".join(str(encoder.dtype) for encoder in encoders.values()) or "none",
        processor=f"diffusers {diffusers.__version__}, transformers {transformers.__version__}",
        tenant=tenant,
    )


def check_pipeline(pipeline: Any, plain: type) -> None:
    """Checks that the version of diffusers is known, and that the code which encodes is diffusers' own.

    Raises:
        NotShared: it is not.
    """
    if not diffusers.__version__.startswith(VERSION):
        raise NotShared(f"diffusers {diffusers.__version__} is installed; prompts are shared with {VERSION}x only")
    for name in _METHODS:
        method = inspect.getattr_static(plain, name, None)
        if name in vars(pipeline) or (method is not None and not is_from(method, _FROM)):
            raise NotShared(f"{plain.__name__}.{name} was replaced by other code")


def _settings(pipeline: Any) -> list[Any]:
    """The pipeline's settings, and the dtypes of its other models."""
    config = {
        name: value for name, value in pipeline.config.items() if type(value) in _PLAIN and name != "_name_or_path"
    }
    others = {name: str(part.dtype) for name in ("unet", "transformer") if (part := getattr(pipeline, name, None))}
    return [config, others, getattr(pipeline, "tokenizer_max_length", None)]


def _tokenizer(tokenizer: Any) -> str:
    """SHA-256, as hex text, over all that a tokenizer's output depends on.

    Raises:
        NotShared: it is not one of transformers' tokenizers with a backend in Rust, or has an attribute without a text
            form.
    """
    kind = type(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not kind.__module__.startswith("transformers.") or backend is None or not is_from(kind.__call__):
        raise NotShared(f"a {kind.__name__} is not one of transformers' tokenizers with a backend")
    model = json.loads(backend.to_str())
    # Every call sets these two anew, from its arguments.
    del model["truncation"], model["padding"]
    own = {name: value for name, value in vars(tokenizer).items() if name not in _UNSAID}
    return digest_of([f"{kind.__module__}.{kind.__qualname__}", model, {name: _text(own[name]) for name in own}])


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return repr(sorted((str(name), _text(each)) for name, each in value.items()))
    if isinstance(value, list | tuple | set):
        return repr([_text(each) for each in (sorted(value, key=str) if isinstance(value, set) else value)])
    if isinstance(value, _FUNCTIONS) or not (isinstance(value, _PLAIN) or is_from(type(value), _FROM | {"tokenizers"})):
        raise NotShared(f"a tokenizer has an attribute of {type(value).__name__}, which cannot be part of a name")
    return f"{type(value).__name__} {value}"
