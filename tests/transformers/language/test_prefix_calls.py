"""prefix_cached: which calls of generate share, what a name covers, and that every other call runs as without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StaticCache

import tensord
from tensord.client.transformers import prefix_cached
from tensord.client.transformers.language.families import cache_argument
from tensord.errors import BadNamespace, BadPrefix, UsageError

from ...daemon_process import Daemon
from .language_models import PROMPT, cache_of, generated, language_model, prompt, same, sharing

Arguments = dict[str, Any]
Case = Arguments | Callable[[Any, torch.Tensor], Arguments]
"""More arguments of `generate` than the prompt, or a function that makes all of them of the model and the prompt."""


def both(model: Any, shared: Any, case: Case, **common: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that the model generates by itself, and with the cache."""
    found = []
    for each in (model, shared):
        ids = prompt(PROMPT)
        given = case(model, ids) if callable(case) else {"input_ids": ids, **case}
        torch.manual_seed(7)
        output = each.generate(**{**common, **given})
        found.append(getattr(output, "sequences", output))
    return found[0], found[1]


# ---- calls that share


CALLS: dict[str, Case] = {
    "inputs": lambda _, ids: {"inputs": ids},
    "a configuration": {"generation_config": GenerationConfig(max_new_tokens=5)},
    "no mask": {"max_new_tokens": 5},
    "sampling": {"do_sample": True, "top_k": 20, "max_new_tokens": 5},
    "a penalty": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "stopping at a length": {"max_length": PROMPT + 3},
    "stopping at a token": {"eos_token_id": list(range(3, 50)), "max_new_tokens": 9},
    "scores": {"output_scores": True, "return_dict_in_generate": True},
}


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_a_call_that_shares_generates_the_tokens_of_a_call_that_does_not(
    family: str, call: Case, client: tensord.Client
) -> None:
    model = language_model(family)
    shared = sharing(model, client)
    wanted, found = both(model, shared, call)
    assert torch.equal(found, wanted)
    assert (shared.tally.calls, shared.tally.passed) == (2, 0), shared.tally.reasons
    assert shared.tally.found_tokens == (PROMPT - 1 if family == "llama" else 32)


def test_a_cache_that_the_caller_gets_is_its_own_and_may_be_changed_at_once(client: tensord.Client, llama: Any) -> None:
    shared = prefix_cached(llama, client, block_tokens=16)

    def zero(cache: Any) -> None:
        for layer in cache.layers:
            layer.keys.zero_()
            layer.values.zero_()

    zero(cache_of(generated(shared, prompt(PROMPT))))
    assert shared.flush()
    zero(shared.past_key_values(prompt(PROMPT)).cache)
    again = generated(shared, prompt(PROMPT))
    assert shared.tally.found_tokens == 2 * (PROMPT - 1), "both times all but the last token"
    assert torch.equal(again.sequences, generated(llama, prompt(PROMPT)).sequences)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_of_other_dtypes_come_back_bit_for_bit(dtype: torch.dtype, client: tensord.Client) -> None:
    model = language_model("llama").to(dtype)
    shared = sharing(model, client)
    ids = prompt(9, 3, prompt(PROMPT))
    cache = cache_of(generated(model, prompt(PROMPT)))
    cache.crop(PROMPT - cache.get_seq_length())
    assert same(generated(shared, ids), generated(model, ids, cache))
    assert shared.tally.found_tokens == PROMPT
    assert all(layer.keys.dtype == dtype for layer in shared.past_key_values(ids).cache.layers)


def test_a_call_under_inference_mode_shares(client: tensord.Client, llama: Any) -> None:
    with torch.inference_mode():
        shared = sharing(llama, client)
        found = generated(shared, prompt(PROMPT))
    assert shared.tally.found_tokens == PROMPT - 1
    assert torch.equal(found.sequences, generated(llama, prompt(PROMPT)).sequences)


# ---- calls that do not


def padded(_: Any, ids: torch.Tensor) -> Arguments:
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def static(model: Any, ids: torch.Tensor) -> Arguments:
    return {"input_ids": ids, cache_argument(model): StaticCache(config=model.config, max_cache_len=64)}


def with_cache(name: str | None = None) -> Case:
    return lambda m, ids: {"input_ids": ids, name or cache_argument(m): DynamicCache(config=m.config)}


HIDDEN: Arguments = {"output_hidden_states": True, "return_dict_in_generate": True}
REFUSED: dict[str, tuple[Case, str]] = {
    "padding": (padded, "attention_mask hides tokens"),
    "the padding token": (lambda _, ids: {"input_ids": ids.masked_fill(ids == ids[0, 0], 0)}, "the padding token 0"),
    "two sequences": (lambda _, ids: {"input_ids": ids.repeat(2, 1)}, "a batch of 2 sequences"),
    "beams": ({"num_beams": 2}, "generation mode is beam_search"),
    "several answers": ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences is 2"),
    "embeddings": (lambda m, ids: {"inputs_embeds": m.get_input_embeddings()(ids)}, "inputs_embeds is given"),
    "positions": ({"position_ids": torch.arange(1, PROMPT + 1)[None]}, "position_ids is given"),
    "a cache": (with_cache(), "cache of its own"),
    "a cache by its older name": (with_cache("past_key_values"), "past_key_values is given: the call brings a cache"),
    "a static cache": (static, "cache of its own"),
    "a static implementation": (
        {"cache_implementation": "static", "disable_compile": True},
        "cache_implementation is 'static'",
    ),
    "no cache": ({"use_cache": False}, "use_cache is False"),
    "prefill in parts": ({"prefill_chunk_size": 8}, "prefill_chunk_size is 8"),
    "hidden states": (HIDDEN, "output_hidden_states is True"),
    "guidance": ({"guidance_scale": 2.0}, "guidance_scale is 2.0"),
    "an assistant": (lambda m, ids: {"input_ids": ids, "assistant_model": m}, "assistant_model is given"),
    "lookup": ({"prompt_lookup_num_tokens": 3}, "generation mode"),
    "one token": (lambda _, ids: {"input_ids": ids[:, :1]}, "at least 2 tokens"),
}


@pytest.mark.parametrize(("case", "why"), REFUSED.values(), ids=list(REFUSED))
def test_a_call_that_cannot_share_says_why_and_generates_as_without_tensord(
    case: Case, why: str, client: tensord.Client, llama: Any
) -> None:
    shared = sharing(llama, client)
    wanted, found = both(llama, shared, case, max_new_tokens=6)
    assert torch.equal(found, wanted)
    assert shared.tally.passed == 1
    assert why in next(iter(shared.tally.reasons))


def test_an_argument_that_tensord_does_not_know_ends_sharing(client: tensord.Client) -> None:
    model = language_model("gemma3_text")
    shared = sharing(model, client)
    ids = prompt(PROMPT)
    given = {"input_ids": ids, "mm_token_type_ids": torch.zeros_like(ids), "max_new_tokens": 4}
    # transformers refuses the argument for this model, and the caller gets its message.
    with pytest.raises(ValueError, match="mm_token_type_ids"):
        shared.generate(**given)
    assert "mm_token_type_ids may change the keys" in next(iter(shared.tally.reasons))


def test_the_models_own_generation_settings_count(client: tensord.Client) -> None:
    model = language_model("llama")
    model.generation_config.num_beams = 2
    shared = prefix_cached(model, client)
    assert torch.equal(shared.generate(prompt(PROMPT)), model.generate(prompt(PROMPT)))
    assert "beam_search" in next(iter(shared.tally.reasons))


def test_a_cache_of_another_class_is_not_stored(client: tensord.Client, llama: Any) -> None:
    shared = prefix_cached(llama, client)
    static = StaticCache(config=llama.config, max_cache_len=64)
    with torch.no_grad():
        llama(input_ids=prompt(9), use_cache=True, **{cache_argument(llama): static})
    assert not shared.store(prompt(9), static)
    offloaded = DynamicCache(config=llama.config)
    offloaded.offloading = True
    assert not shared.store(prompt(9), offloaded)
    quantised = DynamicCache(config=llama.config)
    quantised.layers[0].__class__ = type("QuantoQuantizedLayer", (type(quantised.layers[0]),), {})
    assert not shared.store(prompt(9), quantised)
    assert [reason.split(";")[0] for reason in shared.tally.reasons] == [
        "the cache is a StaticCache",
        "the cache is offloaded",
        "layer 0 of the cache is a QuantoQuantizedLayer, which cannot be shared",
    ]


def test_a_cache_of_other_tokens_is_not_stored(client: tensord.Client, llama: Any) -> None:
    shared = prefix_cached(llama, client)
    cache = cache_of(generated(llama, prompt(PROMPT)))
    assert not shared.store(prompt(PROMPT), cache)
    assert "the cache holds 51 tokens, but there are 40" in shared.tally.reasons
    assert not shared.store(torch.cat([prompt(51), prompt(51, 2)]), cache)


def test_wrong_arguments_raise_at_once(daemon: Daemon, client: tensord.Client, llama: Any) -> None:
    with pytest.raises(UsageError, match="model is a str"):
        prefix_cached("a name", client)
    with pytest.raises(BadPrefix, match="block_tokens is 17"):
        prefix_cached(llama, client, block_tokens=17)
    with pytest.raises(UsageError, match="snapshot_tokens"):
        prefix_cached(llama, client, snapshot_tokens=0)
    with pytest.raises(BadNamespace, match="tenant"):
        prefix_cached(llama, client, tenant=1)  # type: ignore[arg-type]


def test_an_error_of_the_model_is_the_callers(client: tensord.Client, llama: Any) -> None:
    shared = sharing(llama, client)
    with pytest.raises(ValueError, match="max_new_tokens"):
        shared.generate(prompt(PROMPT), max_new_tokens=0)
