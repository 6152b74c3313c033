"""cached_prompts(pipeline): the same embeddings, encoded once. The pipelines are tiny, with random weights."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import textwrap
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch

import tensord
from tensord.client.diffusers import PIPELINES, cached_prompts, tally, uncached_prompts
from tensord.errors import BadNamespace, UsageError

from ..transformers.vision_models import same
from .pipelines import FLUX, SD, XL, arguments, clip, counts, pipeline


@pytest.mark.parametrize("name", sorted(PIPELINES))
def test_a_prompt_is_encoded_once_and_read_bit_for_bit(name: str, client: tensord.Client) -> None:
    wanted = pipeline(name).encode_prompt(**arguments(name))
    one, another = (cached_prompts(pipeline(name), client) for _ in range(2))
    assert same(one.encode_prompt(**arguments(name)), wanted)
    assert same(another.encode_prompt(**arguments(name)), wanted)
    assert (counts(one), counts(another)) == ((0, 1, 0), (1, 0, 0)), tally(one).reasons + tally(another).reasons


NAMED = {
    # By their weights, settings or contents.
    *("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3"),
    # Their dtypes, and these themselves.
    *("unet", "transformer", "config", "tokenizer_max_length", "_execution_device"),
    # A call with a lora_scale bypasses the cache.
    "_lora_scale",
    # Checked to be diffusers' own.
    *("_get_clip_prompt_embeds", "_get_t5_prompt_embeds", "maybe_convert_prompt", "_maybe_convert_prompt"),
}


@pytest.mark.parametrize("name", sorted(PIPELINES))
def test_encode_prompt_reads_nothing_of_a_pipeline_that_no_name_covers(name: str) -> None:
    kind = getattr(diffusers, name)
    read = set()
    methods = ["encode_prompt", *(method for method in NAMED if method.startswith("_get_") and hasattr(kind, method))]
    for method in methods:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(kind, method)))))
        read |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        }
    assert read <= NAMED


OTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt": (SD, {"prompt": "a dog"}),
    "two prompts": (SD, {"prompt": ["a cat", "a cat"]}),
    "negative prompt": (SD, {"negative_prompt": "rain"}),
    "images": (SD, {"num_images_per_prompt": 2}),
    "no guidance": (SD, {"do_classifier_free_guidance": False}),
    "clip_skip": (XL, {"clip_skip": 1}),
    "second prompt": (XL, {"prompt_2": "rain"}),
    "second negative prompt": (XL, {"negative_prompt_2": "rain"}),
    "length": (FLUX, {"max_sequence_length": 16}),
}


@pytest.mark.parametrize(("name", "more"), OTHER.values(), ids=list(OTHER))
def test_each_argument_that_changes_embeddings_has_a_key_of_its_own(
    name: str, more: dict[str, Any], client: tensord.Client
) -> None:
    shared = cached_prompts(pipeline(name), client)
    shared.encode_prompt(**arguments(name))
    given = arguments(name, **more)
    assert same(shared.encode_prompt(**given), pipeline(name).encode_prompt(**given))
    assert same(shared.encode_prompt(**given), pipeline(name).encode_prompt(**given))
    assert counts(shared) == (1, 2, 0)


def weights(of: Any) -> None:
    of.text_encoder.final_layer_norm.weight.mul_(2)


def activation(of: Any) -> None:
    of.text_encoder.config.hidden_act = "gelu"
    for module in of.text_encoder.modules():
        if hasattr(module, "activation_fn"):
            module.activation_fn = torch.nn.GELU().eval()


def vocabulary(of: Any) -> None:
    of.tokenizer.add_tokens(["cat"])
    of.text_encoder.resize_token_embeddings(len(of.tokenizer))


CHANGES: dict[str, Callable[[Any], object]] = {
    "weights": weights,
    "another encoder": lambda of: setattr(of, "text_encoder", clip(5)),
    "dtype": lambda of: of.text_encoder.to(torch.bfloat16),
    "activation": activation,
    "vocabulary": vocabulary,
    "length": lambda of: setattr(of.tokenizer, "model_max_length", 8),
    "side of padding": lambda of: setattr(of.tokenizer, "padding_side", "left"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_changed_pipeline_finds_nothing_of_the_former_one(
    change: Callable[[Any], object], client: tensord.Client
) -> None:
    shared = cached_prompts(pipeline(SD), client)
    shared.encode_prompt(**arguments(SD))
    plain = pipeline(SD)
    change(shared)
    torch.manual_seed(0)
    change(plain)
    found = shared.encode_prompt(**arguments(SD))
    if change is not vocabulary:  # its new row is random
        assert same(found, plain.encode_prompt(**arguments(SD)))
    assert counts(shared) == (0, 2, 0), tally(shared).reasons


def test_two_tenants_share_nothing(client: tensord.Client) -> None:
    for tenant in "ab":
        shared = cached_prompts(pipeline(SD), client, tenant=tenant)
        shared.encode_prompt(**arguments(SD))
        assert counts(shared) == (0, 1, 0)


PASSED: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "embeddings": (
        lambda of: None,
        {"prompt": None, "prompt_embeds": torch.ones(1, 16, 16), "negative_prompt_embeds": torch.ones(1, 16, 16)},
        "prompt_embeds is given",
    ),
    "training": (lambda of: of.text_encoder.train(), {}, "training mode"),
    "a patched method": (
        lambda of: setattr(of, "maybe_convert_prompt", lambda prompt, tokenizer: "a dog"),
        {},
        "maybe_convert_prompt was replaced",
    ),
    "a patched tokenizer": (
        lambda of: setattr(of.tokenizer, "prepare", lambda text: text),
        {},
        "a tokenizer has an attribute of function",
    ),
    "a tokenizer of another class": (
        lambda of: setattr(of.tokenizer, "__class__", type("MyTokenizer", (type(of.tokenizer),), {})),
        {},
        "MyTokenizer is not one of transformers' tokenizers",
    ),
}


@pytest.mark.parametrize(("change", "more", "why"), PASSED.values(), ids=list(PASSED))
def test_a_call_that_no_key_covers_encodes_as_usual_and_says_why(
    change: Callable[[Any], Any], more: dict[str, Any], why: str, client: tensord.Client
) -> None:
    plain, shared = pipeline(SD), cached_prompts(pipeline(SD), client)
    change(plain)
    change(shared)
    given = arguments(SD, **more)
    for _ in range(2):
        torch.manual_seed(0)
        wanted = plain.encode_prompt(**given)
        torch.manual_seed(0)
        assert same(shared.encode_prompt(**given), wanted)
    assert counts(shared) == (0, 0, 2)
    assert why in next(iter(tally(shared).reasons))


def test_a_call_that_scales_adapters_bypasses_the_cache(client: tensord.Client) -> None:
    shared = cached_prompts(pipeline(FLUX), client)
    given = arguments(FLUX, lora_scale=0.5)
    assert same(shared.encode_prompt(**given), pipeline(FLUX).encode_prompt(**given))
    assert "lora_scale is given" in next(iter(tally(shared).reasons))


def test_another_version_of_diffusers_bypasses_the_cache_and_one_log_line_says_so_at_once(
    client: tensord.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tensord.client.diffusers.VERSION", "0.41.")
    shared = cached_prompts(pipeline(SD), client)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "tensord"]
    assert line.startswith("tensord: prompts of StableDiffusionPipeline are not shared: diffusers 0.42.")
    assert "prompts are shared with 0.41.x only" in line
    shared.encode_prompt(**arguments(SD))
    assert list(tally(shared).reasons.values()) == [1]
    assert len([record for record in caplog.records if record.name == "tensord"]) == 1


def test_an_error_of_the_pipeline_is_the_callers_and_is_raised_once(client: tensord.Client) -> None:
    shared = cached_prompts(pipeline(SD), client)
    with pytest.raises(TypeError, match="negative_prompt"):
        shared.encode_prompt(**arguments(SD, negative_prompt=["rain"]))
    with pytest.raises(TypeError):
        shared.encode_prompt()
    assert counts(shared) == (0, 0, 1)


def test_weights_that_change_while_a_prompt_is_encoded_store_nothing(
    client: tensord.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = cached_prompts(pipeline(SD), client)
    decode = type(shared.tokenizer).batch_decode
    given = arguments(SD, prompt="abcdefghijklmnopqrstuvwxyz")  # too long: encode_prompt decodes what it cut off

    def changed(*args: Any, **kwargs: Any) -> Any:
        weights(shared)
        return decode(*args, **kwargs)

    monkeypatch.setattr(type(shared.tokenizer), "batch_decode", changed)
    shared.encode_prompt(**given)
    assert counts(shared) == (0, 0, 1) and "meanwhile" in next(iter(tally(shared).reasons))
    assert client.status()["store"]["entries"] == 0


def test_wrong_arguments_raise_at_once(client: tensord.Client) -> None:
    with pytest.raises(UsageError, match="a str has no supported encode_prompt"):
        cached_prompts("a name", client)
    with pytest.raises(BadNamespace, match="tenant"):
        cached_prompts(pipeline(SD), client, tenant=1)  # type: ignore[arg-type]


def test_the_result_of_a_hit_is_the_callers_own(client: tensord.Client) -> None:
    shared = cached_prompts(pipeline(SD), client)
    wanted = shared.encode_prompt(**arguments(SD))
    shared.encode_prompt(**arguments(SD))[0].zero_()
    assert same(shared.encode_prompt(**arguments(SD)), wanted)


def test_copies_are_of_the_plain_pipeline_and_a_wrapper_can_be_removed(client: tensord.Client) -> None:
    shared = cached_prompts(pipeline(SD), client)
    assert type(shared).__name__ == SD and isinstance(shared, diffusers.StableDiffusionPipeline)
    for other in (copy.copy(shared), copy.deepcopy(shared), pickle.loads(pickle.dumps(shared))):
        assert type(other) is diffusers.StableDiffusionPipeline
        assert same(other.encode_prompt(**arguments(SD)), pipeline(SD).encode_prompt(**arguments(SD)))
    assert counts(shared) == (0, 0, 0)
    assert uncached_prompts(shared) is shared and type(shared) is diffusers.StableDiffusionPipeline
    shared.encode_prompt(**arguments(SD))
    assert counts(shared) == (0, 0, 0)
