"""Tiny language models with random weights, one of each family whose prefixes are shared, and runs of them without
tensord."""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Iterable, Mapping
from typing import Any, Final

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import tensord
from tensord.client.transformers import prefix_cached
from tensord.client.transformers.language.families import cache_argument

from ...daemon_process import PATIENCE_S

VOCABULARY: Final = 96
PROMPT: Final = 40
"""Tokens of the prompt that `sharing` stores."""
WINDOW: Final = 16


def sizes(*bases: Mapping[str, Any], **given: Any) -> dict[str, Any]:
    """The fields of a configuration: those that are given, and those of the bases; an earlier one counts."""
    return dict(ChainMap(given, *map(dict, bases)))


HEADS: Final = sizes(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
TOKENS: Final = sizes(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2)
LAYERS: Final = sizes(hidden_size=32, intermediate_size=48, num_hidden_layers=3)
COMMON: Final = sizes(HEADS, TOKENS, LAYERS, max_position_embeddings=512)
GPT2: Final = sizes(n_embd=32, n_layer=3, n_head=4, n_positions=512)
EXPERTS: Final = sizes(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
SHARED: Final = sizes(EXPERTS, shared_expert_intermediate_size=16)
ROUTED: Final = sizes(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1)
LOCAL: Final = sizes(num_local_experts=2, num_experts_per_tok=1, shared_intermediate_size=16)
LATENT: Final = sizes(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
STATE: Final = sizes(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1)
MAMBA: Final = sizes(STATE, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=16)
LINEAR_HEADS: Final = sizes(linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
LINEAR_TYPES: Final = sizes(layer_types=["linear_attention", "full_attention", "linear_attention"])
LINEAR: Final = sizes(LINEAR_HEADS, LINEAR_TYPES, linear_num_value_heads=4, linear_conv_kernel_dim=4)
CONVOLUTION: Final = sizes(layer_types=["conv", "full_attention", "conv"], conv_L_cache=3)
SLIDING: Final = sizes(sliding_window=WINDOW)
LLAMA4: Final = sizes(num_local_experts=2, intermediate_size_mlp=32, interleave_moe_layer_step=2)
NEMOTRON: Final = sizes(mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=1, conv_kernel=4)
ZAMBA: Final = sizes(mamba_d_state=8, mamba_ngroups=1, n_mamba_heads=4, mamba_headdim=16, chunk_size=16)
ZAMBA_HEADS: Final = sizes(attention_head_dim=16, attention_hidden_size=64, adapter_rank=4, use_mem_rope=True)
ZAMBA_LAYERS: Final = sizes(hybrid_layer_ids=[1, 3], layers_block_type=["mamba", "hybrid", "mamba", "hybrid"])
PLAIN: Final = """
arcee ernie4_5 gemma glm4 gpt_neox granite hunyuan_v1_dense llama nemotron olmo2 phi phi3 qwen2 qwen3 seed_oss smollm3
stablelm starcoder2
"""
WINDOWS: Final = "cohere2 exaone4 gemma2 ministral mistral olmo3"
FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    **{name: {} for name in PLAIN.split()},
    **dict.fromkeys(WINDOWS.split(), SLIDING),
    "bloom": sizes(n_layer=3, n_head=4),
    "deepseek_v3": sizes(ROUTED, LATENT, first_k_dense_replace=1, num_key_value_heads=4),
    "gemma3_text": sizes(SLIDING, num_hidden_layers=6),
    "glm4_moe": ROUTED,
    "gpt2": GPT2,
    "gpt_oss": sizes(SLIDING, num_local_experts=4),
    "gptj": sizes(GPT2, rotary_dim=8),
    "llama4_text": sizes(LLAMA4, attention_chunk_size=WINDOW),
    "mixtral": sizes(num_local_experts=4),
    "opt": sizes(ffn_dim=48, word_embed_proj_dim=32),
    "qwen2_moe": SHARED,
    "qwen3_moe": EXPERTS,
    "falcon_h1": sizes(MAMBA, mamba_d_ssm=64),
    "granitemoehybrid": sizes(MAMBA, LOCAL, layer_types=["mamba", "attention", "mamba"]),
    "lfm2": sizes(CONVOLUTION, block_auto_adjust_ff_dim=False),
    "lfm2_moe": sizes(CONVOLUTION, EXPERTS, num_dense_layers=1),
    "nemotron_h": sizes(NEMOTRON, layers_block_type=["mamba", "attention", "mlp"], chunk_size=16),
    "olmo_hybrid": sizes(LINEAR, linear_num_value_heads=2),
    "qwen3_5_text": LINEAR,
    "qwen3_next": sizes(LINEAR, SHARED),
    "zamba2": sizes(ZAMBA, ZAMBA_HEADS, ZAMBA_LAYERS, num_hidden_layers=4, num_mem_blocks=1),
}
"""By `model_type`: what its configuration has beside COMMON."""


def language_model(family: str, seed: int = 0, **more: Any) -> Any:
    """A model in eval mode. The same seed gives the same weights. They are larger than a new model's, so that a lost
    token changes what is generated."""
    config = AutoConfig.for_model(family, **sizes(FAMILIES.get(family, {}), COMMON, **more))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
    return model


def prompt(tokens: int, seed: int = 1, after: torch.Tensor | None = None) -> torch.Tensor:
    """Random tokens (1, tokens), with those of `after` first."""
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (1, tokens), generator=chance)
    return ids if after is None else torch.cat([after, ids], 1)


def computed(model: Any, ids: torch.Tensor, stops: Iterable[int], cache: Any = None, start: int = 0) -> Any:
    """The cache of the first tokens, computed in parts that end at the stops."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad():
        for stop in stops:
            model(input_ids=ids[:, start:stop], use_cache=True, logits_to_keep=1, **{cache_argument(model): cache})
            start = stop
    return cache


def generated(model: Any, ids: torch.Tensor, cache: Any = None, **more: Any) -> Any:
    """What `model` (a model, or a `PrefixCached`) generates, with the logits of each step and its cache."""
    given: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, **more}
    if cache is not None:
        given[cache_argument(model)] = cache
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_logits=True, **given
    )


def cache_of(output: Any) -> Any:
    """The cache in the output of `generate`."""
    return output["cache" if "cache" in output else "past_key_values"]


def same(one: Any, another: Any) -> bool:
    """Whether two outputs have the same tokens, and the same logits bit for bit."""
    return torch.equal(one.sequences, another.sequences) and all(
        torch.equal(mine, other) for mine, other in zip(one.logits, another.logits, strict=True)
    )


def sharing(model: Any, client: tensord.Client, **more: Any) -> Any:
    """With the model's answer to `prompt(PROMPT)` stored."""
    shared = prefix_cached(model, client, **{"block_tokens": 16, "snapshot_tokens": 16, **more})
    generated(shared, prompt(PROMPT).to(model.device))
    assert shared.flush(PATIENCE_S)
    assert (shared.tally.calls, shared.tally.passed) == (1, 0), shared.tally.reasons
    return shared
