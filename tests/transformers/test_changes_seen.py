"""Whatever changes what an encoder computes changes the key, or the call passes: no answer of before is given."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.clip import modeling_clip

import tensord
from tensord.client.transformers import EncoderTally, cached, functions, tally

from .test_transformers import clip, encoded, noise, pixels, same


def weight(model: Any) -> Any:
    return model.encoder.layers[0].mlp.fc1.weight


# ---- tensors made under inference_mode, which count no versions


def inferred() -> Any:
    with torch.inference_mode():
        made = clip()
        for module in made.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = torch.nn.Parameter(parameter.clone(), requires_grad=False)
        assert all(parameter.is_inference() for parameter in made.parameters())
        return made


def test_weights_made_under_inference_mode_are_never_stale_and_one_log_line_says_so(
    client: tensord.Client, caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = inferred(), cached(inferred(), client)
    with torch.inference_mode(), caplog.at_level(logging.WARNING, logger="tensord"):
        for _ in range(3):
            assert same(model(**pixels(1)), plain(**pixels(1)))
            for each in (plain, model):
                weight(each)[0].mul_(5)
    assert tally(model) == EncoderTally(passed=3)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "CLIPVisionModel" in line and "torch.inference_mode()" in line and "torch.no_grad()" in line


def test_all_bytes_of_a_small_buffer_made_under_inference_mode_are_seen(client: tensord.Client) -> None:
    models = plain, model = clip(), cached(clip(), client)
    with torch.inference_mode():
        for each in models:
            each.embeddings.position_ids = each.embeddings.position_ids.clone()
            assert each.embeddings.position_ids.is_inference()
        encoded(client, model, model, **pixels(1))
        model(**pixels(1))
        assert tally(model) == EncoderTally(found=1, encoded=1)
        for each in models:
            each.embeddings.position_ids[0, 0] = 3
        assert same(model(**pixels(1)), plain(**pixels(1)))
    assert tally(model).encoded == 2


# ---- memory in another order


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


@pytest.mark.parametrize("laid", [channels_last, transposed, part_of_another])
def test_a_write_around_the_counter_is_seen_however_the_weight_lies(
    client: tensord.Client, laid: Callable[[Any], Any]
) -> None:
    plain, model = clip(), cached(clip(), client)
    weights = [laid(each) for each in (plain, model)]
    assert not any(each.is_contiguous() for each in weights)
    encoded(client, model, model, **pixels(1))
    model(**pixels(1))
    assert tally(model) == EncoderTally(found=1, encoded=1)
    writes: list[Callable[[Any], Any]] = [lambda each: each.mul_(3), lambda each: each.copy_(each + 1)]
    for write in writes:
        for each in weights:
            write(each.data)
        assert same(encoded(client, model, model, **pixels(1)), plain(**pixels(1)))
    assert tally(model).encoded == 3


# ---- settings of the process


def default_dtype() -> Any:
    return Restored(torch.set_default_dtype, torch.bfloat16, torch.float32)


class Restored(AbstractContextManager[None]):
    """A setting, within a block."""

    def __init__(self, change: Callable[[Any], object], value: Any, before: Any) -> None:
        self.change, self.value, self.before = change, value, before

    def __enter__(self) -> None:
        self.change(self.value)

    def __exit__(self, *_: object) -> None:
        self.change(self.before)


def convolution(precision: str) -> None:
    torch.backends.mkldnn.conv.fp32_precision = precision  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "setting",
    [
        lambda: sdpa_kernel(SDPBackend.MATH),
        lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
        default_dtype,
        lambda: Restored(torch.set_flush_denormal, True, False),
        lambda: Restored(convolution, "bf16", "none"),
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


# ---- functions that the encoder's code calls


def attention(scale: float) -> Any:
    """A user's own, the same code with another number in its closure."""

    @functools.wraps(sdpa_attention_forward)
    def scaled(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, query * scale, *args, **kwargs)

    return scaled


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> type[transformers.AttentionInterface]:
    """Which is as it was after the test."""
    kind: type[transformers.AttentionInterface] = transformers.AttentionInterface
    monkeypatch.setattr(kind, "_global_mapping", dict(kind._global_mapping))
    return kind


@pytest.mark.parametrize("name", ["mine", "sdpa"])
def test_attention_of_somebodys_own_passes_under_whatever_name(
    client: tensord.Client, registry: type[transformers.AttentionInterface], name: str
) -> None:
    plain, model = clip(), cached(clip(), client)
    encoded(client, model, model, **pixels(1))
    for scale in (2.0, 5.0):
        registry.register(name, attention(scale))
        for each in (plain, model):
            each.set_attn_implementation(name)
        assert same(model(**pixels(1)), plain(**pixels(1)))
        assert same(cached(clip_with(name), client)(**pixels(1)), plain(**pixels(1)))
    assert tally(model) == EncoderTally(encoded=1, passed=2)


def test_transformers_own_attention_with_arguments_bound_passes(
    client: tensord.Client, registry: type[transformers.AttentionInterface]
) -> None:
    registry.register("mine", functools.partial(modeling_clip.eager_attention_forward))
    plain, model = clip_with("mine"), cached(clip_with("mine"), client)
    for _ in range(2):
        assert same(model(**pixels(1)), plain(**pixels(1)))
    assert tally(model) == EncoderTally(passed=2)


def test_an_encoder_with_a_compiled_module_in_it_passes(client: tensord.Client) -> None:
    model = cached(clip(), client)
    encoded(client, model, model, **pixels(1))
    model.encoder.layers[0].mlp.compile(backend="eager")
    model(**pixels(1))
    assert tally(model) == EncoderTally(encoded=1, passed=1)


def clip_with(implementation: str) -> Any:
    model = clip()
    model.set_attn_implementation(implementation)
    return model


def test_transformers_own_attention_under_another_name_has_keys_of_its_own(
    client: tensord.Client, registry: type[transformers.AttentionInterface]
) -> None:
    registry.register("mine", sdpa_attention_forward)
    plain, model = clip_with("mine"), cached(clip_with("mine"), client)
    encoded(client, model, model, **pixels(1))
    registry.register("mine", modeling_clip.eager_attention_forward)
    assert same(encoded(client, model, model, **pixels(1)), plain(**pixels(1)))
    model(**pixels(1))
    assert tally(model) == EncoderTally(found=1, encoded=2)


PLACES: list[tuple[Any, str]] = [
    (modeling_clip, "eager_attention_forward"),
    (modeling_clip.CLIPVisionEmbeddings, "interpolate_pos_encoding"),
    (torch.nn.functional, "linear"),
    (torch.nn.functional, "layer_norm"),
    (torch, "matmul"),
]


@pytest.mark.parametrize("wrapped_first", [True, False])
@pytest.mark.parametrize("place", PLACES, ids=[name for _, name in PLACES])
def test_a_function_that_was_replaced_in_a_library_lets_calls_through(
    client: tensord.Client, monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str], wrapped_first: bool
) -> None:
    plain, model = clip_with("eager"), cached(clip_with("eager"), client)
    inputs = {"pixel_values": noise(1, 1, 3, 36, 36), "interpolate_pos_encoding": True}
    first = encoded(client, model, model, **inputs)
    calls: Any = functions._calls_of
    owner, name = place
    before = getattr(owner, name)

    def doubled(*args: Any, **kwargs: Any) -> Any:
        output = before(*args, **kwargs)
        return (output[0] * 2, *output[1:]) if isinstance(output, tuple) else output * 2

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, doubled)
        if not wrapped_first:
            # As in a process that has wrapped nothing yet.
            calls.cache_clear()
            functions._first.clear()
            model = cached(clip_with("eager"), client)
        was = tally(model).passed
        expected = plain(**inputs)
        assert not same(expected, first)
        assert same(model(**inputs), expected)
        assert tally(model).passed == was + 1
    was = tally(model).found
    assert same(model(**inputs), first)
    assert tally(model).found == was + 1


def test_another_function_of_the_library_in_the_place_of_one_is_noticed(
    client: tensord.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = clip(), cached(clip(), client)
    encoded(client, model, model, **pixels(1))
    monkeypatch.setattr(torch.nn.functional, "linear", torch.ops.aten.linear.default)
    assert same(model(**pixels(1)), plain(**pixels(1)))
    assert tally(model) == EncoderTally(encoded=1, passed=1)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output * 2 if func is torch.nn.functional.linear else output


class DoublingOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output * 2 if func is torch.ops.aten.addmm.default else output


@pytest.mark.parametrize("mode", [Doubling, DoublingOperators, torch.autograd.forward_ad.dual_level])
def test_calls_within_a_mode_of_torch_pass(client: tensord.Client, mode: Callable[[], Any]) -> None:
    plain, model = clip(), cached(clip(), client)
    encoded(client, model, model, **pixels(1))
    with mode():
        assert same(model(**pixels(1)), plain(**pixels(1)))
    assert tally(model) == EncoderTally(encoded=1, passed=1)


def test_a_default_device_ends_no_caching(client: tensord.Client) -> None:
    model = cached(clip(), client)
    encoded(client, model, model, **pixels(1))
    with torch.device("cpu"):
        model(**pixels(1))
    assert tally(model) == EncoderTally(found=1, encoded=1)


def test_hooks_of_accelerate_that_move_tensors_end_no_caching_and_others_do(client: tensord.Client) -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    class Tripling(hooks.AlignDevicesHook):  # type: ignore[misc, name-defined]
        def post_forward(self, module: Any, output: Any) -> Any:
            return super().post_forward(module, output) * 3

    plain, model = clip(), cached(clip(), client)
    encoded(client, model, model, **pixels(1))
    found = passed = 0
    moving: Any = hooks.AlignDevicesHook
    tripling: Any = Tripling
    makes: list[tuple[Callable[[], Any], bool]] = [
        (lambda: moving("cpu"), True),
        (lambda: hooks.SequentialHook(moving("cpu"), hooks.CpuOffload("cpu")), True),
        (tripling, False),
        (lambda: hooks.SequentialHook(moving("cpu"), tripling()), False),
    ]
    for make, known in makes:
        for each in (plain, model):
            hooks.add_hook_to_module(each.encoder.layers[0].mlp, make())
        assert same(model(**pixels(1)), plain(**pixels(1)))
        found, passed = found + known, passed + (not known)
        assert tally(model) == EncoderTally(found=found, encoded=1, passed=passed)
