"""Families of language models that share prefixes, and a model's name. test_prefix_families.py tests each family.

Owns: the list, settings within a family that make keys and values depend on later tokens, the check that the installed
transformers has for a model what sharing needs, and the name of a model as it is at a call: everything that its keys
and values depend on besides the tokens. Does not own: these needs (generation, caches), nor single parts of the
name (identity, conditions).

Invariants: two models with equal names compute the same keys and values for the same tokens. In a listed family, keys
and values of a token depend on that token and those before it only, and the model continues from a cache as if it had
computed the whole sequence. Not listed, since transformers does not continue them from a cache with more than one
token: Mamba, FalconMamba, Jamba and Bamba, whose logits differ from those of the whole prompt; and Mamba2, whose cache
does not count tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
import transformers

from ...arguments.namespace import Namespace
from ...identity.described import digest_of
from ...identity.modules import Fingerprint
from ..conditions import state_of
from ..reasons import NotShared
from .caches import empty_cache
from .generation import cache_argument, check_methods

_ATTENTION: Final = """
arcee bloom cohere2 deepseek_v3 ernie4_5 exaone4 gemma gemma2 gemma3_text glm4 glm4_moe gpt2 gpt_neox
gpt_oss gptj granite hunyuan_v1_dense llama llama4_text ministral mistral mixtral nemotron olmo2 olmo3 opt
phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2
"""
_RECURRENT: Final = """
falcon_h1 granitemoehybrid lfm2 lfm2_moe nemotron_h olmo_hybrid qwen3_5_text qwen3_next zamba2
"""
FAMILIES: Final = frozenset((_ATTENTION + _RECURRENT).split())
"""The `model_type` of each family."""
_MOVING_ROPE: Final = frozenset({"dynamic", "longrope"})
"""Kinds of rotary embedding whose frequencies change with the length of the whole sequence."""


def check_model(model: Any) -> str:
    """The name of the argument with which the model takes a cache. Raises NotShared unless the model is of a family in
    the list, and the installed transformers has its methods and the classes of its cache."""
    _check_family(model)
    check_methods(model)
    empty_cache(model)
    return cache_argument(model)


def name_of(model: Any, input_ids: torch.Tensor, fingerprint: Fingerprint, tenant: str) -> Namespace:
    """The namespace of the model's keys and values, for a prompt on the device that the model computes on. Raises
    NotShared or UnsupportedLeaf if something in the model has no name."""
    _check_family(model)
    # `generate` computes without gradients.
    with torch.no_grad():
        state = state_of({"": model}, input_ids, fingerprint)
    return Namespace(
        model=f"{type(model).__module__}.{type(model).__qualname__}",
        revision=digest_of(state),
        dtype=str(model.dtype),
        processor=f"transformers {transformers.__version__}",
        tenant=tenant,
    )


def _check_family(model: Any) -> None:
    """Raises NotShared unless the model is of a family in the list, without a setting that makes keys depend on the
    sequence's length."""
    config = getattr(model, "config", None)
    family = getattr(config, "model_type", None)
    if not type(model).__module__.startswith("transformers.models.") or family not in FAMILIES:
        raise NotShared(f"{type(model).__name__} ({family}) is not among the families in docs/transformers.md")
    if getattr(config, "use_bidirectional_attention", None) or getattr(config, "is_causal", None) is False:
        raise NotShared(f"{type(model).__name__} attends to later tokens too, so a prompt's keys depend on all of it")
    if config is not None and (kind := next(_rope_kinds(config.to_dict()), None)):
        raise NotShared(f"rope_type is {kind!r}, with which the keys of a prompt depend on its length")


def _rope_kinds(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            if name in ("rope_type", "type") and each in _MOVING_ROPE:
                yield each
            yield from _rope_kinds(each)
