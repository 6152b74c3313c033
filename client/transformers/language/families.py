"""Which models and which calls of `generate` share prefixes, and a model's name. test_prefix_families.py tests each
family of the list.

Owns: the list of families, settings within a family that make keys and values depend on later tokens, the check that
the installed transformers has for a model what sharing needs; the name of a model as it is at a call: everything that
its keys and values depend on besides the tokens; and the conditions on a call's arguments. Does not own: caches, nor
single parts of the name (identity, conditions).

Invariants: two models with equal names compute the same keys and values for the same tokens. An argument that is not
known to leave the prompt's keys and values as they are ends sharing for the call. In a listed family, keys and values
of a token depend on that token and those before it only, and the model continues from a cache as if it had computed the
whole sequence. Not listed, since transformers does not continue them from a cache with more than one token: Mamba,
FalconMamba, Jamba and Bamba, whose logits differ from those of the whole prompt; and Mamba2, whose cache does not count
tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
import transformers
from transformers.generation import GenerationMixin, GenerationMode

from ...arguments.namespace import Namespace
from ...identity.described import by_name, digest_of
from ...identity.modules import Fingerprint
from ...identity.settings import is_from
from ...prefix import layers
from ..conditions import NotShared, state_of
from .caches import empty_cache

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
_SIGNATURE: Final = inspect.signature(GenerationMixin.generate)
_REFUSED: Final[Mapping[str, str]] = by_name(
    {
        "the assistant rolls the cache back": "assistant_model assistant_tokenizer",
        "other code generates": "custom_generate",
        "embeddings have no tokens to be found by": "inputs_embeds",
        "a second prompt is computed beside the first": "negative_prompt_ids negative_prompt_attention_mask",
        "the call brings a cache of its own": "cache cache_params past_key_values",
        "other positions give other keys": "position_ids",
        "several devices generate together": "synced_gpus",
        "they may change the keys of tokens": "token_type_ids",
    }
)
"""Argument of `generate` → why a call with it is not shared."""
_AFTERWARDS: Final = frozenset({"streamer", "tokenizer", "trust_remote_code"})
"""Arguments of `generate` that are no settings, and change nothing about the prompt."""
_SETTINGS: Final[Mapping[str, tuple[Any, ...]]] = {
    "cache_implementation": (None,),
    "guidance_scale": (None, 1, 1.0),
    "num_return_sequences": (None, 1),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "prefill_chunk_size": (None,),
    "token_healing": (None, False),
    "use_cache": (None, True),
}
"""Setting of a GenerationConfig → the values with which a call is shared."""
_METHODS: Final = ("generate", "_prefill", "_sample", "prepare_inputs_for_generation")
"""Methods of a model that take the prompt and the cache apart."""
_CACHES: Final = ("cache", "cache_params", "past_key_values")
"""Names of the argument of `forward` and `generate` with the cache: since transformers 5.24; before that, of state
space models and of all others."""
_MODES: Final = frozenset({GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE})


# ---- models


def check_model(model: Any) -> str:
    """The name of the argument with which the model takes a cache. Raises NotShared unless the model is of a family in
    the list, and the installed transformers has the classes of its cache."""
    _check_family(model)
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
    """Raises NotShared unless the model is of a family in the list, whose keys depend on no later token."""
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


def cache_argument(model: Any) -> str:
    """The name of the argument with which the model takes a cache. Raises NotShared for one that is not known."""
    taken = inspect.signature(model.forward).parameters
    for name in _CACHES:
        if name in taken:
            return name
    where = f"{type(model).__name__}.forward of transformers {transformers.__version__}"
    raise NotShared(f"{where} has no parameter {', '.join(_CACHES[:-1])} or {_CACHES[-1]}, which sharing needs")


# ---- calls


def tokens_of(input_ids: Any) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """The tokens of one sequence, ids of shape (1, n) or (n,), as uint32 (n,). Raises NotShared or BadPrefix for
    anything else."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim not in (1, 2):
        shape = list(getattr(input_ids, "shape", ()))
        raise NotShared(f"input_ids is a {type(input_ids).__name__} of shape {shape}; it must be a tensor (1, tokens)")
    if input_ids.ndim == 2 and len(input_ids) != 1:
        raise NotShared(f"a batch of {len(input_ids)} sequences; only one sequence can be shared")
    return layers.tokens_of(input_ids.reshape(-1).cpu())


def prompt_of(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The ids of the prompt of a call of `generate`. Raises NotShared if the call must run without sharing."""
    for name in _METHODS:
        if name in vars(model) or not is_from(getattr(type(model), name)):
            raise NotShared(f"{type(model).__name__}.{name} was replaced by other code")
    given = dict(_SIGNATURE.bind(model, *args, **kwargs).arguments)
    given |= given.pop("kwargs", {})
    given = {name: value for name, value in given.items() if value is not None}
    del given["self"]
    for name, why in _REFUSED.items():
        if name in given and given[name] is not False:
            raise NotShared(f"{name} is given: {why}")
    for name in ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", *_AFTERWARDS):
        given.pop(name, None)
    ids = given.pop("input_ids", None)
    inputs = given.pop("inputs", None)
    if (ids is None) == (inputs is None):
        raise NotShared("there must be input_ids, or inputs, and not both")
    ids = inputs if ids is None else ids
    mask = given.pop("attention_mask", None)
    config, left = model._prepare_generation_config(given.pop("generation_config", None), **given)
    _check_settings(config)
    left = {name for name, value in left.items() if value is not None and name not in _SETTINGS}
    if left:
        raise NotShared(f"{', '.join(sorted(left))} may change the keys of the prompt, and no name covers that")
    if len(tokens_of(ids)) < 2 or ids.ndim != 2:
        raise NotShared(f"input_ids has the shape {list(ids.shape)}; it must be (1, tokens) with at least 2 tokens")
    _check_mask(ids, mask, config)
    prompt: torch.Tensor = ids
    return prompt


def _check_settings(config: Any) -> None:
    for name, values in _SETTINGS.items():
        value = getattr(config, name, None)
        if value not in values:
            raise NotShared(f"{name} is {value!r}; calls are shared with {values[-1]!r} only")
    mode = config.get_generation_mode()
    if mode not in _MODES:
        raise NotShared(f"the generation mode is {mode.value}; only greedy search and sampling are shared")


def _check_mask(ids: torch.Tensor, mask: Any, config: Any) -> None:
    if mask is not None:
        if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape or not bool((mask == 1).all()):
            raise NotShared("attention_mask hides tokens; only a prompt without padding is shared")
    elif config.pad_token_id is not None and bool((ids == config.pad_token_id).any()):
        # `generate` takes such tokens for padding.
        raise NotShared(f"the prompt has the padding token {config.pad_token_id}; pass an attention_mask of ones")
