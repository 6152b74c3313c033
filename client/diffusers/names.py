"""Names a diffusers pipeline as far as its prompt embeddings depend on it.

Owns: the pipelines that are known, the parts of their names, the names of tokenizers. Does not own: names of weights
and settings of text encoders (identity), nor the arguments of a call (prompts).

Invariants: two pipelines with equal names encode equal prompts to equal embeddings. A part without a name raises
NotShared.
"""

from __future__ import annotations

import inspect
import json
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

import diffusers
import torch
import transformers

from ..arguments.namespace import Namespace
from ..identity.described import described, digest_of
from ..identity.modules import Fingerprint
from ..identity.origin import LIBRARIES, is_from
from ..transformers.conditions import state_of
from ..transformers.reasons import NotShared

VERSION: Final = "0.42."
"""The version of diffusers whose pipelines are known."""
PIPELINES: Final = frozenset(
    f"{family}{task}Pipeline"
    for family in ("Flux", "StableDiffusion", "StableDiffusion3", "StableDiffusionXL")
    for task in ("", "Img2Img", "Inpaint")
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
        NotShared, UnsupportedLeaf: there is no name, because something in the pipeline has none.
    """
    check_pipeline(pipeline, plain)
    encoders = {name: part for name in _ENCODERS if (part := getattr(pipeline, name, None)) is not None}
    tokenizers = {name: part for name in _TOKENIZERS if (part := getattr(pipeline, name, None)) is not None}
    others = {name: str(part.dtype) for name in ("unet", "transformer") if (part := getattr(pipeline, name, None))}
    config = {name: value for name, value in pipeline.config.items() if type(value) in _PLAIN}
    config.pop("_name_or_path", None)
    parts = [
        state_of(encoders, torch.empty(0, device=device), fingerprint),
        {name: _tokenizer(part) for name, part in tokenizers.items()},
        [config, others, getattr(pipeline, "tokenizer_max_length", None)],
    ]
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
    return digest_of([f"{kind.__module__}.{kind.__qualname__}", model, described(own, _part)])


def _part(value: Any) -> Any:
    """A tokenizer's attribute, or a part of one, that is an object of the libraries."""
    if isinstance(value, _FUNCTIONS) or not is_from(type(value), _FROM | {"tokenizers"}):
        raise NotShared(f"a tokenizer has an attribute of {type(value).__name__}, which cannot be part of a name")
    return f"{type(value).__name__} {value}"
