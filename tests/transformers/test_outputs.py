"""cached(model): the outputs of the unwrapped model, encoded once, under keys that cover all that changes them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import tensord
from tensord.client.transformers import EncoderTally, cached, tally
from tensord.client.transformers.outputs import CallItems, NotSplittable
from tensord.client.transformers.patch_points import PATCH_POINTS

from .vision_models import Family, Watch, chosen, clip, encoded, llava, noise, pixels, qwen2_5, same


def test_outputs_are_those_of_the_unwrapped_model_bit_for_bit_and_encoded_once(
    client: tensord.Client, family: Family, rows: Watch
) -> None:
    plain = family.make()
    model = cached(family.make(), client)
    calls = rows(family, model)
    inputs = family.inputs(1, 2, 3)
    expected = family.call(plain, inputs)
    assert same(encoded(client, model, family.call, model, inputs), expected)
    for _ in range(2):
        assert same(family.call(model, inputs), expected)
    assert calls == [3]
    assert tally(model) == EncoderTally(found=6, encoded=3)


def test_a_batch_with_some_hits_encodes_only_the_misses(client: tensord.Client, family: Family, rows: Watch) -> None:
    plain = family.make()
    model = cached(family.make(), client)
    calls = rows(family, model)
    encoded(client, model, family.call, model, family.inputs(1, 2))
    mixed = encoded(client, model, family.call, model, family.inputs(3, 1, 4, 2))
    assert calls == [2, 2]
    assert tally(model) == EncoderTally(found=2, encoded=4)

    # Each as it is in the batch in which it was encoded.
    first, second = (family.call(plain, family.inputs(*numbers)) for numbers in ((1, 2), (3, 4)))
    assert same(chosen(mixed, 1, 3), chosen(first, 0, 1))
    assert same(chosen(mixed, 0, 2), chosen(second, 0, 1))
    whole = family.call(plain, family.inputs(3, 1, 4, 2))
    assert type(mixed) is type(whole) and list(mixed) == list(whole)
    torch.testing.assert_close(dict(mixed), dict(whole))


def test_dtypes_stay_what_they_are_and_have_keys_of_their_own(client: tensord.Client) -> None:
    model = cached(clip(), client)
    encoded(client, model, model, **pixels(1))
    model.to(torch.bfloat16)
    inputs = {"pixel_values": pixels(1)["pixel_values"].to(torch.bfloat16)}
    first = encoded(client, model, model, **inputs)
    assert first.last_hidden_state.dtype is torch.bfloat16
    assert same(model(**inputs), first)
    assert tally(model) == EncoderTally(found=1, encoded=2)


def test_a_result_may_be_written_to_and_the_cache_does_not_change(client: tensord.Client, family: Family) -> None:
    model = cached(family.make(), client)
    inputs = family.inputs(1)
    expected = copy.deepcopy(encoded(client, model, family.call, model, inputs))
    for _ in range(2):
        output = family.call(model, inputs)
        assert same(output, expected)
        for each in chosen(output, 0):
            each.zero_()
        output.last_hidden_state.zero_()


def test_whole_models_give_the_same_logits_and_tokens(client: tensord.Client) -> None:
    text = torch.tensor([[5, *[3] * 25, 6]])
    plain, model = llava(), cached(llava(), client)
    for _ in range(2):
        assert same(model(input_ids=text, **pixels(1)).logits, plain(input_ids=text, **pixels(1)).logits)
        encoded(client, model, model.generate, input_ids=text, max_new_tokens=4, do_sample=False, **pixels(1))
    tokens = [m.generate(input_ids=text, max_new_tokens=4, do_sample=False, **pixels(1)) for m in (model, plain)]
    assert same(*tokens)
    assert tally(model).encoded >= 1 and tally(model).found >= 1


def test_video_goes_through_the_same_tower(client: tensord.Client) -> None:
    video = {"pixel_values_videos": noise(1, 96, 96), "video_grid_thw": torch.tensor([[2, 4, 8], [1, 8, 4]])}
    plain, model = qwen2_5(), cached(qwen2_5(), client)
    expected = plain.get_video_features(**video)
    for _ in range(2):
        assert same(encoded(client, model, model.get_video_features, **video), expected)
    assert tally(model) == EncoderTally(found=2, encoded=2)


@pytest.mark.parametrize(
    "output",
    [torch.zeros(2, 4), torch.zeros(4, 4), torch.zeros(()), {"a": torch.zeros(3)}, [object()], [[torch.zeros(1)]]],
)
def test_an_output_whose_rows_cannot_be_assigned_to_items_is_not_split(output: Any) -> None:
    with pytest.raises(NotSplittable):
        CallItems([1, 1, 1]).split(output)


# ---- what is in a key


def test_other_outputs_asked_for_have_keys_of_their_own(client: tensord.Client) -> None:
    plain, model = clip(), cached(clip(), client)
    inputs = pixels(1, 2)
    asked: list[dict[str, Any]] = [
        {},
        {"output_hidden_states": True},
        {"output_attentions": True},
        {"interpolate_pos_encoding": True},
    ]
    for _ in range(2):
        for more in asked:
            assert same(encoded(client, model, model, **inputs, **more), plain(**inputs, **more))
    assert tally(model) == EncoderTally(found=8, encoded=8)
    # The default said, or left out, is one.
    assert same(model(**inputs, return_dict=True, output_hidden_states=None), plain(**inputs))
    assert tally(model).encoded == 8
    assert same(model(**inputs, return_dict=False), plain(**inputs, return_dict=False))
    assert tally(model).passed == 1


def activation(model: Any) -> None:
    model.encoder.layers[1].mlp.activation_fn = torch.nn.ReLU().eval()


SETTINGS: dict[str, Callable[[Any], object]] = {
    "attention": lambda model: model.set_attn_implementation("eager"),
    "a field of the configuration": lambda model: setattr(model.config, "output_hidden_states", True),
    "a scale": lambda model: setattr(model.encoder.layers[0].self_attn, "scale", 3.0),
    "an activation without weights": activation,
}


@pytest.mark.parametrize("change", SETTINGS.values(), ids=list(SETTINGS))
def test_a_setting_changed_on_the_living_model_changes_the_key(
    client: tensord.Client, change: Callable[[Any], object]
) -> None:
    plain, model = clip(), cached(clip(), client)
    encoded(client, model, model, **pixels(1))
    for changed in (plain, model):
        change(changed)
    assert same(model(**pixels(1)), plain(**pixels(1)))
    assert tally(model) == EncoderTally(encoded=2)


def test_each_attribute_of_each_module_is_in_the_key_or_in_the_list_with_a_reason(family: Family) -> None:
    from tensord.client.identity.settings import UNSAID_ATTRIBUTES as UNSAID
    from tensord.client.identity.settings import attributes_digest

    assert all(len(reason) > 5 for reason in UNSAID.values())
    changed = 0
    for module in family.make().modules():
        before = attributes_digest([module])
        for name, value in list(vars(module).items()):
            if name in UNSAID:
                continue
            vars(module)[name] = ["another", value]
            assert attributes_digest([module]) != before, f"{type(module).__name__}.{name} is in no key"
            vars(module)[name] = value
            changed += 1
        assert attributes_digest([module]) == before
    assert changed > 10


def test_each_field_of_a_configuration_is_in_the_key_or_in_the_list_with_a_reason(family: Family) -> None:
    from tensord.client.identity.settings import UNSAID_FIELDS as UNSAID
    from tensord.client.identity.settings import settings

    assert all(len(reason) > 5 for reason in UNSAID.values())
    tower = next(module for module in family.make().modules() if type(module).__name__ in PATCH_POINTS)
    before = settings([tower, *tower.modules()])
    changed = 0
    for field in tower.config.to_dict():
        if field in UNSAID or field == "model_type":
            continue
        name = f"_{field}" if f"_{field}" in vars(tower.config) else field
        value = getattr(tower.config, name, None)
        object.__setattr__(tower.config, name, "another")
        assert settings([tower, *tower.modules()]) != before, f"{name} is in no key"
        object.__setattr__(tower.config, name, value)
        changed += 1
    assert changed > 10


@contextmanager
def restored(change: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    """A setting, within a block."""
    change(value)
    try:
        yield
    finally:
        change(before)


def convolution(precision: str) -> None:
    torch.backends.mkldnn.conv.fp32_precision = precision  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "setting",
    [
        lambda: sdpa_kernel(SDPBackend.MATH),
        lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
        lambda: restored(torch.set_default_dtype, torch.bfloat16, torch.float32),
        lambda: restored(torch.set_flush_denormal, True, False),
        lambda: restored(convolution, "bf16", "none"),
    ],
    ids=["kernels of attention", "their order", "default dtype", "denormal numbers", "precision of convolutions"],
)
def test_settings_of_the_process_that_change_bits_are_in_the_key(
    client: tensord.Client, setting: Callable[[], AbstractContextManager[Any]]
) -> None:
    plain, model = clip(), cached(clip(), client)
    given = pixels(1)
    encoded(client, model, model, **given)
    with setting():
        assert same(encoded(client, model, model, **given), plain(**given))
    assert tally(model) == EncoderTally(encoded=2)
    model(**given)
    assert tally(model) == EncoderTally(found=1, encoded=2)


# ---- the weights


def weight(model: Any) -> Any:
    return model.encoder.layers[0].mlp.fc1.weight


def test_weights_made_under_inference_mode_are_never_stale_and_one_log_line_says_so(
    client: tensord.Client, caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = clip(), cached(clip(), client)
    with torch.inference_mode(), caplog.at_level(logging.WARNING, logger="tensord"):
        for module in (*plain.modules(), *model.modules()):
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = torch.nn.Parameter(parameter.clone(), requires_grad=False)
        for _ in range(3):
            assert same(model(**pixels(1)), plain(**pixels(1)))
            for each in (plain, model):
                weight(each)[0].mul_(5)
    assert tally(model) == EncoderTally(passed=3)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "CLIPVisionModel" in line and "torch.inference_mode()" in line and "torch.no_grad()" in line


def channels_last(model: Any) -> Any:
    model.to(memory_format=torch.channels_last)
    return model.embeddings.patch_embedding.weight


def transposed(model: Any) -> Any:
    weight(model).data = weight(model).data.t().contiguous().t()
    return weight(model)


def part_of_another(model: Any) -> Any:
    kept = weight(model)
    whole = torch.zeros(2 * kept.shape[0], 2 * kept.shape[1])
    whole[::2, ::2] = kept
    kept.data = whole[::2, ::2]
    return kept


WRITES: list[Callable[[Any], object]] = [
    lambda weight: weight.mul_(2),
    # Around the version counter.
    lambda weight: weight.data.mul_(0.75),
    lambda weight: weight.data.copy_(weight.data + 1),
    lambda weight: setattr(weight, "data", weight.data * 2),
]


@pytest.mark.parametrize("laid", [weight, channels_last, transposed, part_of_another])
def test_changed_weights_have_another_fingerprint_however_they_lie(
    client: tensord.Client, laid: Callable[[Any], Any]
) -> None:
    plain, model = clip(), cached(clip(), client)
    weights = [laid(each) for each in (plain, model)]
    assert {each.is_contiguous() for each in weights} == {laid is weight}
    encoded(client, model, model, **pixels(1))
    for count, write in enumerate(WRITES, 2):
        for each in weights:
            write(each)
        assert same(encoded(client, model, model, **pixels(1)), plain(**pixels(1)))
        assert same(model(**pixels(1)), plain(**pixels(1)))
        assert tally(model).encoded == count
