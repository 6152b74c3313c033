"""prefix_cached: which models share, and that a name covers all that keys and values depend on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import transformers

import tensord
from tensord.client.transformers import prefix_cached

from .language_models import PROMPT, generated, language_model, prompt, sharing


def refused(model: Any, client: tensord.Client, why: str) -> None:
    shared = prefix_cached(model, client, block_tokens=16)
    ids = prompt(PROMPT)
    assert torch.equal(shared.generate(ids, max_new_tokens=4), model.generate(ids, max_new_tokens=4))
    assert shared.tally.passed == 1 and why in next(iter(shared.tally.reasons)), shared.tally.reasons


def t5() -> Any:
    sizes = {"vocab_size": 96, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()


def with_rope(kind: str, **more: Any) -> Any:
    return language_model("llama", rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **more})


LONG: dict[str, Any] = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 256}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "training": (lambda: language_model("llama").train(), "training mode"),
    "both directions": (lambda: language_model("gemma3_text", use_bidirectional_attention=True), "to later tokens"),
    "no causality": (lambda: language_model("gemma3_text", is_causal=False), "attends to later tokens"),
    "an encoder and decoder": (t5, "(t5) is not among the families"),
    "frequencies of the length": (lambda: with_rope("dynamic"), "rope_type is 'dynamic'"),
    "other frequencies of the length": (lambda: with_rope("longrope", **LONG), "rope_type is 'longrope'"),
}


@pytest.mark.parametrize(("make", "why"), REFUSED.values(), ids=list(REFUSED))
def test_a_model_whose_keys_no_name_covers_does_not_share(
    make: Callable[[], Any], why: str, client: tensord.Client
) -> None:
    refused(make(), client, why)


@contextmanager
def hooked(model: Any) -> Iterator[None]:
    handle = model.model.layers[1].register_forward_hook(lambda module, args, output: output * 2)
    yield
    handle.remove()


@contextmanager
def patched(model: Any) -> Iterator[None]:
    plain = type(model).prepare_inputs_for_generation

    @functools.wraps(plain)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "prepare_inputs_for_generation", prepare)
        yield


@pytest.mark.parametrize(
    ("change", "why"), [(hooked, "has hooks"), (patched, "prepare_inputs_for_generation was replaced")]
)
def test_a_hook_or_a_patched_method_ends_sharing_as_long_as_it_is_there(
    change: Callable[[Any], AbstractContextManager[None]], why: str, client: tensord.Client
) -> None:
    model = language_model("llama")
    shared = sharing(model, client)
    with change(model):
        assert torch.equal(generated(shared, prompt(PROMPT)).sequences, generated(model, prompt(PROMPT)).sequences)
        assert why in next(iter(shared.tally.reasons))
    generated(shared, prompt(PROMPT))
    assert (shared.tally.passed, shared.tally.found_tokens) == (1, PROMPT - 1)


def test_a_call_during_which_weights_change_stores_nothing(client: tensord.Client) -> None:
    model = language_model("llama")
    shared = prefix_cached(model, client, block_tokens=16)

    def change(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            model.model.layers[1].self_attn.v_proj.weight.mul_(1.5)
        return scores

    shared.generate(prompt(PROMPT), logits_processor=[change], max_new_tokens=3)
    assert shared.flush()
    assert "changed" in next(iter(shared.tally.reasons))
    assert client.status()["store"]["entries"] == 0


@pytest.mark.parametrize(
    "other",
    [
        lambda: language_model("llama", seed=1),
        lambda: language_model("llama").to(torch.bfloat16),
        lambda: language_model("llama", attn_implementation="eager"),
        lambda: language_model("llama", rms_norm_eps=1e-3),
        lambda: language_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 5000.0}),
        lambda: language_model("mistral", sliding_window=None),
    ],
    ids=["weights", "dtype", "attention", "a setting", "rotary embedding", "class"],
)
def test_models_that_compute_other_keys_share_nothing(
    other: Callable[[], Any], client: tensord.Client, llama: Any
) -> None:
    sharing(llama, client)
    assert sharing(other(), client).tally.found_tokens == 0


def test_two_copies_of_a_model_share_and_two_tenants_do_not(client: tensord.Client, llama: Any) -> None:
    sharing(llama, client, tenant="a")
    assert sharing(language_model("llama"), client, tenant="a").tally.found_tokens == PROMPT - 1
    assert sharing(llama, client, tenant="b").tally.found_tokens == 0


def test_autocast_has_a_name_of_its_own(client: tensord.Client, llama: Any) -> None:
    sharing(llama, client)
    with torch.autocast("cpu", torch.bfloat16):
        shared = sharing(llama, client)
        assert shared.tally.found_tokens == 0
        wanted = generated(llama, prompt(PROMPT))
        assert torch.equal(generated(shared, prompt(PROMPT)).sequences, wanted.sequences)
        assert shared.tally.found_tokens == PROMPT - 1
