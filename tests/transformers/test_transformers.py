"""cached(model): the same outputs, encoded once. The models are tiny, made from configurations, with random weights."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers

import tensord
from tensord.client.transformers import EncoderTally, cached, refresh, tally, uncached
from tensord.client.transformers.outputs import CallItems, NotSplittable
from tensord.client.transformers.patch_points import PATCH_POINTS
from tensord.errors import UsageError

from ..daemon_process import PATIENCE_S, Daemon, until
from ..processes import Child, Stage
from .conftest import patient

PATCHES = 32
"""Of each picture that Qwen's towers are given here."""


@dataclass(frozen=True)
class Family:
    """A model, the first module that its tower calls, and a call. `inputs(numbers)` gives the arguments for the items
    of these numbers, `rows_per_item` how many rows of the first module's input an item has."""

    make: Callable[[], Any]
    entry: str
    """Its class's name."""
    call: Callable[[Any, dict[str, Any]], Any]
    inputs: Callable[..., dict[str, Any]]
    rows_per_item: int = 1

    def first(self, model: Any) -> Any:
        return next(module for module in model.modules() if type(module).__name__ == self.entry)


def pixels(*numbers: int) -> dict[str, Any]:
    return {"pixel_values": torch.stack([noise(number, 3, 30, 30) for number in numbers])}


def features(*numbers: int) -> dict[str, Any]:
    return {"input_features": torch.stack([noise(number, 8, 64) for number in numbers])}


def patches(*numbers: int) -> dict[str, Any]:
    """Pictures of 4×8 and of 8×4 patches in turn."""
    grid = torch.tensor([[1, 4, 8] if number % 2 else [1, 8, 4] for number in numbers])
    return {
        "pixel_values": torch.cat([noise(number, PATCHES, 3 * 2 * 4 * 4) for number in numbers]),
        "image_grid_thw": grid,
    }


def noise(number: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 30,
    "patch_size": 6,
}
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


_made: dict[Any, Any] = {}


def seeded(make: Callable[[Any], Any], config: Any) -> Any:
    """A model in eval mode, with the same weights each time."""
    if make not in _made:
        torch.manual_seed(0)
        _made[make] = make(config).eval()
    return copy.deepcopy(_made[make])


def clip() -> Any:
    return seeded(transformers.CLIPVisionModel, transformers.CLIPVisionConfig(**VISION))


def clip_pair() -> Any:
    config = transformers.CLIPConfig(vision_config=VISION, text_config={**TEXT, "bos_token_id": 0, "eos_token_id": 1})
    return seeded(transformers.CLIPModel, config)


def siglip_pair() -> Any:
    text: dict[str, Any] = {**TEXT, "bos_token_id": 0, "eos_token_id": 1}
    return seeded(transformers.SiglipModel, transformers.SiglipConfig(vision_config=VISION, text_config=text))


def llava() -> Any:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=3,
    )
    return seeded(transformers.LlavaForConditionalGeneration, config)


def whisper() -> Any:
    config = transformers.WhisperConfig(
        num_mel_bins=8,
        d_model=64,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=64,
        max_source_positions=32,
        max_target_positions=32,
        vocab_size=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return seeded(transformers.WhisperForConditionalGeneration, config)


def qwen2() -> Any:
    vision: dict[str, Any] = {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "mlp_ratio": 2,
    }
    config = transformers.Qwen2VLConfig(vision_config=vision, text_config={**TEXT, "rope_parameters": ROPE})
    return seeded(transformers.Qwen2VLForConditionalGeneration, config)


def qwen2_5() -> Any:
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 32,
        "out_hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    config = transformers.Qwen2_5_VLConfig(vision_config=vision, text_config={**TEXT, "rope_parameters": ROPE})
    return seeded(transformers.Qwen2_5_VLForConditionalGeneration, config)


def qwen3() -> Any:
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 32,
        "out_hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    }
    text: dict[str, Any] = {**TEXT, "head_dim": 16, "rope_parameters": ROPE}
    config = transformers.Qwen3VLConfig(vision_config=vision, text_config=text)
    return seeded(transformers.Qwen3VLForConditionalGeneration, config)


def image_features(model: Any, inputs: dict[str, Any]) -> Any:
    return model.get_image_features(**inputs)


FAMILIES = {
    "clip tower": Family(clip, "CLIPVisionEmbeddings", lambda m, i: m(**i), pixels),
    "clip": Family(clip_pair, "CLIPVisionEmbeddings", lambda m, i: m.vision_model(**i), pixels),
    "siglip": Family(siglip_pair, "SiglipVisionEmbeddings", image_features, pixels),
    "llava": Family(llava, "CLIPVisionEmbeddings", image_features, pixels),
    "whisper": Family(whisper, "Conv1d", lambda m, i: m.get_encoder()(**i), features),
    "qwen2": Family(qwen2, "PatchEmbed", image_features, patches, PATCHES),
    "qwen2.5": Family(qwen2_5, "Qwen2_5_VisionPatchEmbed", image_features, patches, PATCHES),
    "qwen3": Family(qwen3, "Qwen3VLVisionPatchEmbed", image_features, patches, PATCHES),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


Watch = Callable[[Family, Any], list[int]]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """A list of how many items enter a model's tower, call by call."""

    def watched(family: Family, model: Any) -> list[int]:
        calls: list[int] = []
        on_entry(monkeypatch, family, model, lambda given: calls.append(len(given) // family.rows_per_item))
        return calls

    return watched


def on_entry(monkeypatch: pytest.MonkeyPatch, family: Family, model: Any, tell: Callable[[Any], object]) -> None:
    """Has `tell` called with what enters a model's tower. Before `forward`: a hook or a patch would end the caching."""
    first = family.first(model)
    call: Any = type(first).__call__

    def noted(self: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        if self is first:
            tell(given)
        return call(self, given, *args, **kwargs)

    monkeypatch.setattr(type(first), "__call__", noted)


def encoded(client: tensord.Client, model: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs, and returns when all that was encoded can be found."""
    before = client.status()["store"]["entries"]
    was = tally(model).encoded
    output = run(*args, **kwargs)
    until(lambda: client.status()["store"]["entries"] >= before + tally(model).encoded - was, "it is stored")
    return output


def same(one: Any, other: Any) -> bool:
    """The same types, and tensors that are equal bit for bit."""
    if isinstance(one, torch.Tensor):
        return (
            type(one) is type(other)
            and (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
            and one.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8))
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def chosen(output: Any, *positions: int) -> list[torch.Tensor]:
    """The features of some of a batch's items."""
    features = output.get("pooler_output")
    if features is None:
        features = output.last_hidden_state
    return [features[position] for position in positions]


# ---- the same outputs


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


def test_an_item_that_a_batch_has_twice_among_hits_is_encoded_once(client: tensord.Client, rows: Watch) -> None:
    family = FAMILIES["clip tower"]
    model = cached(family.make(), client)
    calls = rows(family, model)
    encoded(client, model, family.call, model, family.inputs(1))
    output = family.call(model, family.inputs(2, 1, 2))
    assert calls == [1, 1]
    assert same(output.last_hidden_state[0], output.last_hidden_state[2])


def test_exact_calls_are_bit_for_bit_whatever_was_encoded_before(
    client: tensord.Client, family: Family, rows: Watch
) -> None:
    plain = family.make()
    model = cached(family.make(), client, exact=True)
    calls = rows(family, model)
    for numbers in ((1,), (1, 2), (2, 1, 3)):
        inputs = family.inputs(*numbers)
        expected = family.call(plain, inputs)
        assert same(encoded(client, model, family.call, model, inputs), expected)
        assert same(family.call(model, inputs), expected)
    assert calls == [1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_stay_what_they_are_and_have_keys_of_their_own(client: tensord.Client, dtype: torch.dtype) -> None:
    model = cached(clip(), client)
    encoded(client, model, model, **pixels(1))
    model.to(dtype)
    inputs = {"pixel_values": pixels(1)["pixel_values"].to(dtype)}
    first = encoded(client, model, model, **inputs)
    assert first.last_hidden_state.dtype is dtype
    assert same(model(**inputs), first)
    assert tally(model) == EncoderTally(found=1, encoded=2)


def test_a_result_may_be_written_to_and_the_cache_does_not_change(client: tensord.Client, family: Family) -> None:
    model = cached(family.make(), client)
    inputs = family.inputs(1)
    expected = copy.deepcopy(encoded(client, model, family.call, model, inputs))
    for _ in range(2):
        output = family.call(model, inputs)
        assert same(output, expected)
        for features in chosen(output, 0):
            features.zero_()
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

    speech, listening = whisper(), cached(whisper(), client)
    begun = torch.tensor([[1, 4]])
    for _ in range(2):
        heard = encoded(client, listening, listening, decoder_input_ids=begun, **features(1))
        assert same(heard.logits, speech(decoder_input_ids=begun, **features(1)).logits)
    assert tally(listening) == EncoderTally(found=1, encoded=1)


def test_video_goes_through_the_same_tower(client: tensord.Client) -> None:
    video = {
        "pixel_values_videos": noise(1, 96, 96),
        "video_grid_thw": torch.tensor([[2, 4, 8], [1, 8, 4]]),
    }
    plain, model = qwen2_5(), cached(qwen2_5(), client)
    expected = plain.get_video_features(**video)
    for _ in range(2):
        assert same(encoded(client, model, model.get_video_features, **video), expected)
    assert tally(model) == EncoderTally(found=2, encoded=2)


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


def test_a_setting_changed_on_the_living_model_changes_the_key(client: tensord.Client) -> None:
    plain, model = clip(), cached(clip(), client)
    encoded(client, model, model, **pixels(1))
    for changed in (plain, model):
        changed.set_attn_implementation("eager")
    assert same(model(**pixels(1)), plain(**pixels(1)))
    assert tally(model) == EncoderTally(encoded=2)
    for changed in (plain, model):
        changed.config.output_hidden_states = True
    assert same(model(**pixels(1)), plain(**pixels(1)))
    assert tally(model) == EncoderTally(encoded=3)


def norms(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "eps") or hasattr(module, "variance_epsilon")]


def test_a_hyperparameter_changed_in_a_module_changes_the_key(client: tensord.Client, family: Family) -> None:
    plain, model = family.make(), cached(family.make(), client)
    family.call(model, family.inputs(1))
    for changed in (plain, model):
        for norm in norms(changed):
            setattr(norm, "eps" if hasattr(norm, "eps") else "variance_epsilon", 0.5)
    assert same(family.call(model, family.inputs(1)), family.call(plain, family.inputs(1)))
    assert tally(model) == EncoderTally(encoded=2)


def test_a_scale_and_an_activation_without_weights_are_in_the_key(client: tensord.Client) -> None:
    plain, model = clip(), cached(clip(), client)
    encoded(client, model, model, **pixels(1))
    for changed in (plain, model):
        changed.encoder.layers[0].self_attn.scale = 3.0
    assert same(model(**pixels(1)), plain(**pixels(1)))
    for changed in (plain, model):
        changed.encoder.layers[1].mlp.activation_fn = torch.nn.ReLU().eval()
    assert same(model(**pixels(1)), plain(**pixels(1)))
    assert tally(model) == EncoderTally(encoded=3)


@pytest.mark.parametrize("value", [object(), lambda x: x, torch.ones(1)], ids=["object", "function", "tensor"])
def test_an_attribute_that_no_key_can_hold_lets_the_call_through(client: tensord.Client, value: object) -> None:
    model = cached(clip(), client)
    model.encoder.layers[0].self_attn.extra = value
    assert same(model(**pixels(1)), clip()(**pixels(1)))
    assert tally(model) == EncoderTally(passed=1)


def test_each_attribute_of_each_module_is_in_the_key_or_in_the_list_with_a_reason(family: Family) -> None:
    from tensord.client.identity.attributes import UNSAID, attributes_digest

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
    from tensord.client.identity.settings import UNSAID, settings

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


# ---- when a call goes through untouched


def test_gradients_pass_through(client: tensord.Client, family: Family, rows: Watch) -> None:
    model = cached(family.make(), client)
    calls = rows(family, model)
    with torch.enable_grad():
        for _ in range(2):
            torch.autograd.backward(chosen(family.call(model, family.inputs(1)), 0)[0].sum())
        assert calls == [1, 1]
        assert any(parameter.grad is not None for parameter in model.parameters())
        assert tally(model) == EncoderTally(passed=2)

        model.requires_grad_(False)
        encoded(client, model, family.call, model, family.inputs(1))
        assert tally(model) == EncoderTally(passed=2, encoded=1)


def test_gradients_of_the_input_pass_through(client: tensord.Client) -> None:
    model = cached(clip().requires_grad_(False), client)
    inputs = pixels(1)
    with torch.enable_grad():
        encoded(client, model, model, **inputs)
        inputs["pixel_values"].requires_grad_()
        torch.autograd.backward(model(**inputs).pooler_output.sum())
    assert inputs["pixel_values"].grad is not None
    assert tally(model) == EncoderTally(encoded=1, passed=1)


def test_training_mode_passes_through(client: tensord.Client, family: Family) -> None:
    model = cached(family.make(), client).train()
    family.call(model, family.inputs(1))
    assert tally(model) == EncoderTally(passed=1)
    encoded(client, model.eval(), family.call, model, family.inputs(1))
    assert tally(model) == EncoderTally(passed=1, encoded=1)


def test_arguments_that_no_key_can_hold_pass_through(client: tensord.Client) -> None:
    model = cached(whisper(), client)
    encoder = model.get_encoder()
    for more in ({"extra": torch.zeros(3)}, {"extra": object()}, {"attention_mask": torch.ones(2, 64)}):
        encoder(**features(1), **more)
    assert tally(model) == EncoderTally(passed=3)
    masks = torch.ones(2, 64)
    encoded(client, model, encoder, **features(1, 2), attention_mask=masks)
    encoder(**features(2), attention_mask=masks[:1])
    assert tally(model) == EncoderTally(passed=3, found=1, encoded=2)


def test_hooks_adapters_and_patches_pass_through(client: tensord.Client) -> None:
    def hooked(tower: Any) -> None:
        tower.encoder.layers[0].register_forward_hook(lambda _, __, output: output * 2)

    def hooked_before(tower: Any) -> None:
        tower.encoder.layers[0].register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:]))

    def adapted(tower: Any) -> None:
        tower.encoder.layers[0].mlp.fc1 = Adapter(tower.encoder.layers[0].mlp.fc1)

    def patched(tower: Any) -> None:
        tower.encoder.layers[0].mlp.forward = lambda given: given * 2

    def patched_under_accelerate(tower: Any) -> None:
        patched(tower)
        as_accelerate(tower.encoder.layers[0].mlp, lambda output: output)

    def hooked_as_accelerate_does(tower: Any) -> None:
        as_accelerate(tower.encoder.layers[0].mlp, lambda output: output * 3)

    for change in (hooked, hooked_before, adapted, patched, patched_under_accelerate, hooked_as_accelerate_does):
        plain, model = clip(), cached(clip(), client)
        encoded(client, model, model, **pixels(1))
        for each in (plain, model):
            change(each)
        assert same(model(**pixels(1)), plain(**pixels(1)))
        assert tally(model).passed == 1


def as_accelerate(module: Any, change: Callable[[Any], Any]) -> None:
    """Puts somebody's hook on a module, as accelerate puts one."""
    before = module.forward
    module._old_forward, module._hf_hook = before, object()
    module.forward = functools.update_wrapper(functools.partial(lambda _, given: change(before(given)), module), before)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["CLIPMLP", "CLIPVisionModel"])
def test_patched_classes_pass_through(
    client: tensord.Client, monkeypatch: pytest.MonkeyPatch, kind: str, masked: bool
) -> None:
    wrapped = cached(clip(), client)
    encoded(client, wrapped, wrapped, **pixels(1))
    patched = getattr(transformers.models.clip.modeling_clip, kind)
    forward = patched.forward

    def negated(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        for features in [output] if isinstance(output, torch.Tensor) else output.values():
            features.neg_()
        return output

    monkeypatch.setattr(patched, "forward", functools.wraps(forward)(negated) if masked else negated)
    for model in (wrapped, cached(clip(), client)):
        assert same(model(**pixels(1)), clip()(**pixels(1)))
        assert tally(model).passed == 1


@pytest.mark.parametrize("before", [False, True])
def test_hooks_of_all_modules_pass_through(client: tensord.Client, before: bool) -> None:
    plain, model = clip(), cached(clip(), client)
    encoded(client, model, model, **pixels(1))

    def doubled(module: Any, given: Any, *output: Any) -> Any:
        if type(module).__name__ == "CLIPMLP":
            return 2 * (output or given)[0]
        return None

    register: Any = torch.nn.modules.module.register_module_forward_hook
    if before:
        register = torch.nn.modules.module.register_module_forward_pre_hook
    hook = register(doubled)
    try:
        assert same(model(**pixels(1)), plain(**pixels(1)))
    finally:
        hook.remove()
    assert tally(model) == EncoderTally(encoded=1, passed=1)
    model(**pixels(1))
    assert tally(model) == EncoderTally(found=1, encoded=1, passed=1)


def test_the_model_is_called_although_the_preparation_raises(
    client: tensord.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = clip(), cached(clip(), client)

    def fail() -> Any:
        raise LookupError("the configuration")

    monkeypatch.setattr(model.config, "to_dict", fail)
    assert same(model(**pixels(1)), plain(**pixels(1)))
    assert tally(model) == EncoderTally(passed=1)


class Adapter(torch.nn.Module):
    """Something of another library's."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.eval()

    def forward(self, given: Any) -> Any:
        return 2 * self.base(given)


def test_a_compiled_model_passes_through(client: tensord.Client) -> None:
    plain, model = clip(), cached(clip(), client)
    compiled: Any = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(**pixels(1)).pooler_output, plain(**pixels(1)).pooler_output)
    assert client.status()["store"]["entries"] == 0


def test_an_error_of_the_model_is_raised_and_no_caller_waits_for_the_result(
    daemon: Daemon, client: tensord.Client
) -> None:
    model = cached(clip(), client)
    with pytest.raises(ValueError, match="doesn't match model"):
        model(pixel_values=torch.zeros(1, 3, 10, 10))
    with pytest.raises(AttributeError):
        model(pixel_values=None)
    daemon.until(lambda status: status["store"]["claims_held"] == 0, "its claim was given back")


def test_without_a_daemon_the_model_just_computes(tmp_path: Path, family: Family) -> None:
    with tensord.Client(tmp_path / "none.sock", timeout_s=0.2) as nobody:
        plain, model = family.make(), cached(family.make(), nobody)
        for _ in range(2):
            assert same(family.call(model, family.inputs(1, 2)), family.call(plain, family.inputs(1, 2)))
        assert tally(model) == EncoderTally(encoded=4)


def test_a_tampered_entry_changes_the_output_so_entries_are_really_used(client: tensord.Client) -> None:
    model = cached(clip(), client)
    keys = stored_keys(model, client)
    lease = client.get(keys[0])
    assert lease is not None
    tree = lease.torch()
    client.evict(keys[0])
    tree[2]["last_hidden_state"][1].zero_()
    client.put(keys[0], tree, wait=True)
    assert not model(**pixels(1)).last_hidden_state.any()


@pytest.mark.parametrize("tree", [[], ["rows"], ["output", "Nobody", {}], ["rows", torch.zeros(3, 1)], 7])
def test_an_entry_of_another_form_under_a_key_is_not_taken_for_an_output(client: tensord.Client, tree: Any) -> None:
    plain, model = clip(), cached(clip(), client)
    keys = stored_keys(model, client)
    client.evict(keys[0])
    client.put(keys[0], tree, wait=True)
    assert same(model(**pixels(1)), plain(**pixels(1)))


def stored_keys(model: Any, client: tensord.Client) -> list[bytes]:
    """The keys that a call of the model stores under."""
    keys: list[bytes] = []
    put = client.put

    def noted(key: bytes, tree: Any, **more: Any) -> Any:
        keys.append(key)
        return put(key, tree, **more)

    client.put = noted  # type: ignore[method-assign]
    try:
        encoded(client, model, model, **pixels(1))
    finally:
        del client.put
    return keys


@pytest.mark.parametrize(
    "output",
    [torch.zeros(2, 4), torch.zeros(4, 4), torch.zeros(()), {"a": torch.zeros(3)}, [object()], [[torch.zeros(1)]]],
)
def test_an_output_whose_rows_cannot_be_assigned_to_items_is_not_split(output: Any) -> None:
    with pytest.raises(NotSplittable):
        CallItems([1, 1, 1]).split(output)


# ---- the weights


def test_changed_weights_have_another_fingerprint(client: tensord.Client, family: Family) -> None:
    plain, model = family.make(), cached(family.make(), client)
    inputs = family.inputs(1)

    def changed_by(change: Callable[[Any], None]) -> None:
        before = tally(model).encoded
        for each in (plain, model):
            change(next(iter(family.first(each).parameters())))
        assert same(encoded(client, model, family.call, model, inputs), family.call(plain, inputs))
        assert tally(model).encoded == before + 1
        assert same(family.call(model, inputs), family.call(plain, inputs))
        assert tally(model).encoded == before + 1

    encoded(client, model, family.call, model, inputs)
    changed_by(lambda weight: weight.mul_(2))
    # Around the version counter.
    changed_by(lambda weight: weight.data.mul_(0.75))
    changed_by(lambda weight: setattr(weight, "data", weight.data * 2))


def test_weights_that_are_put_back_find_what_was_encoded_with_them(client: tensord.Client) -> None:
    model = cached(clip(), client)
    weights = copy.deepcopy(model.state_dict())
    first = encoded(client, model, model, **pixels(1))
    model.encoder.layers[0].mlp.fc1.weight.zero_()
    assert not same(encoded(client, model, model, **pixels(1)), first)
    model.load_state_dict(weights)
    assert same(model(**pixels(1)), first)
    assert tally(model) == EncoderTally(found=1, encoded=2)


def test_refresh_sees_writes_that_nothing_else_can_see(client: tensord.Client) -> None:
    model = cached(clip(), client)
    first = encoded(client, model, model, **pixels(1))
    model.encoder.layers[0].mlp.fc1.weight.data[0, 0] += 1
    assert same(model(**pixels(1)), first)
    assert not same(refresh(model)(**pixels(1)), first)


def test_other_weights_or_configurations_never_share(client: tensord.Client) -> None:
    models = [cached(clip(), client) for _ in range(3)]
    list(models[1].parameters())[-1].add_(1)
    models[2].config.hidden_act = "gelu"
    for model in models:
        encoded(client, model, model, **pixels(1))
        assert tally(model) == EncoderTally(encoded=1)


def test_a_namespace_that_names_other_weights_alike_does_not_mix_them(client: tensord.Client) -> None:
    namespace = tensord.Namespace(model="clip", revision="main", dtype="float32", processor="none")
    models = [cached(clip(), client, namespace) for _ in range(2)]
    next(models[1].parameters()).add_(1)
    for model in models:
        encoded(client, model, model, **pixels(1))
        assert tally(model) == EncoderTally(encoded=1)


def test_a_namespace_keeps_tenants_apart_and_can_be_invalidated(client: tensord.Client) -> None:
    tenants = [
        tensord.Namespace(model="clip", revision="1", dtype="float32", processor="none", tenant=tenant)
        for tenant in ("a", "b")
    ]
    models = [cached(clip(), client, tenant) for tenant in tenants]
    for model in models:
        encoded(client, model, model, **pixels(1))
        assert tally(model) == EncoderTally(encoded=1)
    cached(models[0], client, client.invalidate(tenants[0]))
    encoded(client, models[0], models[0], **pixels(1))
    models[1](**pixels(1))
    assert [tally(model) for model in models] == [EncoderTally(encoded=1), EncoderTally(found=1, encoded=1)]


# ---- other processes


def test_two_callers_with_the_same_input_encode_once(
    daemon: Daemon, client: tensord.Client, other_client: tensord.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES["clip tower"]
    models = [cached(family.make(), each) for each in (client, other_client)]
    begun, go = threading.Event(), threading.Event()

    def pause(_: object) -> None:
        begun.set()
        assert go.wait(60)

    on_entry(monkeypatch, family, models[0], pause)
    outputs: dict[int, Any] = {}

    @torch.no_grad()
    def run(number: int) -> None:
        outputs[number] = family.call(models[number], family.inputs(*[(1, 2), (3, 2, 1)][number]))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    daemon.until(lambda status: status["store"]["claims_waiting"] == 2, "the other one waits for two")
    go.set()
    for thread in threads:
        thread.join(60)
    assert [tally(model) for model in models] == [EncoderTally(encoded=2), EncoderTally(encoded=1, waited=2)]
    assert same(outputs[1].last_hidden_state[[2, 1]], outputs[0].last_hidden_state)


def test_a_waiting_caller_encodes_when_the_other_one_fails(
    daemon: Daemon, client: tensord.Client, other_client: tensord.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES["clip tower"]
    models = [cached(family.make(), each) for each in (client, other_client)]
    begun, go = threading.Event(), threading.Event()

    def fail(_: object) -> None:
        begun.set()
        assert go.wait(60)
        raise KeyError("the encoder")

    on_entry(monkeypatch, family, models[0], fail)
    outputs: list[Any] = []

    @torch.no_grad()
    def run(number: int) -> None:
        try:
            outputs.append(family.call(models[number], family.inputs(1)))
        except KeyError as error:
            outputs.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    daemon.until(lambda status: status["store"]["claims_waiting"] == 1, "the other one waits")
    go.set()
    for thread in threads:
        thread.join(60)
    assert isinstance(outputs[0], KeyError) or isinstance(outputs[1], KeyError)
    assert tally(models[1]) == EncoderTally(encoded=1)


def encoding(stage: Stage, socket: Path) -> None:
    patient(pytest.MonkeyPatch())
    with tensord.Client(socket, timeout_s=PATIENCE_S) as client, torch.no_grad():
        client.wait_connected(PATIENCE_S)
        torch.set_num_threads(stage.hear())
        model = cached(llava(), client)
        output = encoded(client, model, image_features, model, pixels(1))
        stage.tell((tally(model).encoded, output.pooler_output[0].numpy()))


def test_two_processes_share(daemon: Daemon, client: tensord.Client) -> None:
    with Child(encoding, daemon.socket) as child:
        child.tell(torch.get_num_threads())
        count, features = child.hear(4 * PATIENCE_S)  # it imports transformers first
    assert count == 1
    model = cached(llava(), client)
    assert same(image_features(model, pixels(1)).pooler_output[0], torch.from_numpy(features))
    assert tally(model) == EncoderTally(found=1)


def test_nobody_waits_for_what_there_was_no_room_for(rows: Watch) -> None:
    family = FAMILIES["clip tower"]
    numbers = range(1, 9)
    with Daemon(ring_bytes="1MiB", limits_claim_s=PATIENCE_S, limits_claim_s_max=PATIENCE_S) as full:
        full.start()
        client, other = (full.client(timeout_s=PATIENCE_S) for _ in range(2))
        pinned: list[Any] = []
        while client.put(key := sha256(bytes([len(pinned)])).digest(), bytes(8192), wait=True).state == "stored":
            pinned.append(client.get(key))
        for each in (client, other):
            model = cached(family.make(), each)
            calls = rows(family, model)
            family.call(model, family.inputs(*numbers))
            full.until(lambda status: status["store"]["claims_held"] == 0, "claims to be given back")
            assert (full.store("entries"), calls) == (len(pinned), [len(numbers)])


# ---- the model itself


def test_unwrapping_leaves_the_model_as_it_was(client: tensord.Client, family: Family) -> None:
    plain, model = family.make(), family.make()
    types = [type(module) for module in model.modules()]
    assert cached(model, client) is model
    assert list(model.state_dict()) == list(plain.state_dict())
    assert repr(model) == repr(plain)
    assert all(isinstance(module, kind) for module, kind in zip(model.modules(), types, strict=True))
    assert uncached(model) is model
    assert [type(module) for module in model.modules()] == types
    assert "_tensord" not in {name for module in model.modules() for name in vars(module)}
    assert same(family.call(model, family.inputs(1)), family.call(plain, family.inputs(1)))
    assert client.status()["store"]["entries"] == 0
    assert uncached(model) is model


def test_wrapping_twice_wraps_once(client: tensord.Client) -> None:
    model = cached(cached(clip(), client), client)
    encoded(client, model, model, **pixels(1))
    assert tally(model) == EncoderTally(encoded=1)
    assert type(uncached(model)) is transformers.CLIPVisionModel


def test_copies_and_pickles_are_of_the_plain_model(client: tensord.Client, tmp_path: Path) -> None:
    model = cached(llava(), client)
    encoded(client, model, image_features, model, pixels(1))
    made = copy.deepcopy(model)
    assert type(made.model) is transformers.LlavaModel
    assert tally(made) == EncoderTally()
    made.model.vision_tower.embeddings.patch_embedding.weight.zero_()
    assert not same(image_features(made, pixels(1)), image_features(model, pixels(1)))
    tower = cached(clip(), client)
    again = pickle.loads(pickle.dumps(tower))
    assert type(again) is transformers.CLIPVisionModel
    assert same(again(**pixels(1)), tower(**pixels(1)))
    assert tally(again) == EncoderTally()
    model.save_pretrained(tmp_path)
    loaded: Any = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path)
    assert same(image_features(loaded.eval(), pixels(1)), image_features(model, pixels(1)))


def test_an_unsupported_model_is_an_error_with_the_reason(client: tensord.Client) -> None:
    with pytest.raises(UsageError, match=r"Linear has no supported encoder \(.*LlavaModel"):
        cached(torch.nn.Linear(1, 1), client)
    with pytest.raises(UsageError, match="model is a str"):
        cached("openai/clip", client)
    hooked = clip()
    hooked.forward = hooked.forward
    with pytest.raises(UsageError, match="replaced in this instance"):
        cached(hooked, client)
