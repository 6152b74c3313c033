"""cached(model): calls that no key can describe run as if the model were not wrapped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.modules.module as torch_modules
import transformers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.clip import modeling_clip

import tensord
from tensord.client.transformers import EncoderTally, cached, tally

from ..daemon_process import Daemon
from .vision_models import Adapter, Family, chosen, clip, encoded, features, pixels, same, whisper

Patch = pytest.MonkeyPatch

# ---- by the call


def test_gradients_pass_through(client: tensord.Client, family: Family) -> None:
    model = cached(family.make(), client)
    with torch.enable_grad():
        torch.autograd.backward(chosen(family.call(model, family.inputs(1)), 0)[0].sum())
        assert any(parameter.grad is not None for parameter in model.parameters())
        assert tally(model) == EncoderTally(passed=1)
        model.requires_grad_(False)
        encoded(client, model, family.call, model, family.inputs(1))
    assert tally(model) == EncoderTally(passed=1, encoded=1)


def test_training_mode_passes_through(client: tensord.Client) -> None:
    model = cached(clip(), client).train()
    model(**pixels(1))
    assert tally(model) == EncoderTally(passed=1)


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


@pytest.mark.parametrize("value", [object(), lambda x: x, torch.ones(1)], ids=["object", "function", "tensor"])
def test_an_attribute_that_no_key_can_hold_lets_the_call_through(client: tensord.Client, value: object) -> None:
    model = cached(clip(), client)
    model.encoder.layers[0].self_attn.extra = value
    assert same(model(**pixels(1)), clip()(**pixels(1)))
    assert tally(model) == EncoderTally(passed=1)


def test_a_compiled_model_passes_through(client: tensord.Client) -> None:
    plain, model = clip(), cached(clip(), client)
    compiled: Any = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(**pixels(1)).pooler_output, plain(**pixels(1)).pooler_output)
    model.encoder.layers[0].mlp.compile(backend="eager")
    model(**pixels(1))
    assert tally(model) == EncoderTally(passed=1)
    assert client.status()["store"]["entries"] == 0


# ---- by other code


def doubled_of_all_modules(module: Any, given: Any, *output: Any) -> Any:
    """A hook of torch's for every module, before it or after it."""
    return 2 * (output or given)[0] if type(module).__name__ == "CLIPMLP" else None


def negating(kind: Any) -> Callable[[Patch, Any], None]:
    """Replaces a class's `forward` by a function that says that it is the former one."""
    forward = kind.forward

    @functools.wraps(forward)
    def negated(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        for tensor in [output] if isinstance(output, torch.Tensor) else output.values():
            tensor.neg_()
        return output

    return lambda patch, _: patch.setattr(kind, "forward", negated)


def as_accelerate(module: Any, change: Callable[[Any], Any]) -> None:
    """Puts somebody's hook on a module, as accelerate puts one."""
    before = module.forward
    module._old_forward, module._hf_hook = before, object()
    module.forward = functools.update_wrapper(functools.partial(lambda _, given: change(before(given)), module), before)


def attention(patch: Patch, model: Any, name: str) -> None:
    """Registers attention of one's own, which says that it is transformers'."""

    @functools.wraps(sdpa_attention_forward)
    def scaled(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, query * 2, *args, **kwargs)

    registered(patch, name, scaled)
    model.set_attn_implementation(name)


def registered(patch: Patch, name: str, function: Any) -> None:
    """A function in transformers' registry, until the test ends."""
    patch.setitem(transformers.AttentionInterface._global_mapping, name, function)


def mlp(model: Any) -> Any:
    return model.encoder.layers[0].mlp


CHANGES: dict[str, Callable[[Patch, Any], object]] = {
    "a hook": lambda _, model: mlp(model).register_forward_hook(lambda *given: given[2] * 2),
    "a hook before": lambda _, model: mlp(model).register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
    "a hook of all modules": lambda patch, _: patch.setitem(
        torch_modules._global_forward_hooks, 0, doubled_of_all_modules
    ),
    "one before": lambda patch, _: patch.setitem(torch_modules._global_forward_pre_hooks, 0, doubled_of_all_modules),
    "an adapter": lambda _, model: setattr(mlp(model), "fc1", Adapter(mlp(model).fc1)),
    "a method of an instance": lambda _, model: setattr(mlp(model), "forward", lambda given: given * 2),
    "a hook as accelerate has": lambda _, model: as_accelerate(mlp(model), lambda output: output * 3),
    "a method of a module": negating(modeling_clip.CLIPMLP),
    "the tower's method": negating(modeling_clip.CLIPVisionModel),
    "attention": lambda patch, model: attention(patch, model, "mine"),
    "attention in the place of transformers'": lambda patch, model: attention(patch, model, "sdpa"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_what_other_code_changes_passes_through(
    client: tensord.Client, monkeypatch: Patch, change: Callable[[Patch, Any], object]
) -> None:
    plain, model = clip(), cached(clip(), client)
    first = encoded(client, model, model, **pixels(1))
    with monkeypatch.context() as patch:
        for each in (plain, model):
            change(patch, each)
        expected = plain(**pixels(1))
        assert not same(expected, first)
        assert same(model(**pixels(1)), expected)
        assert tally(model) == EncoderTally(encoded=1, passed=1)


def test_hooks_of_accelerate_that_move_tensors_end_no_caching_and_others_do(client: tensord.Client) -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    class Tripling(hooks.AlignDevicesHook):  # type: ignore[misc, name-defined]
        def post_forward(self, module: Any, output: Any) -> Any:
            return super().post_forward(module, output) * 3

    plain, model = clip(), cached(clip(), client)
    encoded(client, model, model, **pixels(1))
    moving: Any = hooks.AlignDevicesHook
    tripling: Any = Tripling
    makes: list[tuple[Callable[[], Any], bool]] = [
        (lambda: moving("cpu"), True),
        (lambda: hooks.SequentialHook(moving("cpu"), hooks.CpuOffload("cpu")), True),
        (tripling, False),
        (lambda: hooks.SequentialHook(moving("cpu"), tripling()), False),
    ]
    found = passed = 0
    for make, known in makes:
        for each in (plain, model):
            hooks.add_hook_to_module(mlp(each), make())
        assert same(model(**pixels(1)), plain(**pixels(1)))
        found, passed = found + known, passed + (not known)
        assert tally(model) == EncoderTally(found=found, encoded=1, passed=passed)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output * 2 if func is torch.nn.functional.linear else output


class DoublingOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output * 2 if func is torch.ops.aten.addmm.default else output


@pytest.mark.parametrize("mode", [Doubling, DoublingOperators, torch.autograd.forward_ad.dual_level])
def test_calls_within_a_mode_of_torch_pass_and_a_default_device_is_none(
    client: tensord.Client, mode: Callable[[], Any]
) -> None:
    plain, model = clip(), cached(clip(), client)
    encoded(client, model, model, **pixels(1))
    with mode():
        assert same(model(**pixels(1)), plain(**pixels(1)))
    assert tally(model) == EncoderTally(encoded=1, passed=1)
    with torch.device("cpu"):
        model(**pixels(1))
    assert tally(model) == EncoderTally(found=1, encoded=1, passed=1)


def test_transformers_own_attention_under_another_name_has_keys_of_its_own(
    client: tensord.Client, monkeypatch: Patch
) -> None:
    plain, model = clip(), cached(clip(), client)
    for function in (sdpa_attention_forward, modeling_clip.eager_attention_forward):
        registered(monkeypatch, "mine", function)
        for each in (plain, model):
            each.set_attn_implementation("mine")
        assert same(encoded(client, model, model, **pixels(1)), plain(**pixels(1)))
    assert tally(model) == EncoderTally(encoded=2)
    registered(monkeypatch, "mine", functools.partial(modeling_clip.eager_attention_forward))
    assert same(model(**pixels(1)), plain(**pixels(1)))
    assert tally(model) == EncoderTally(encoded=2, passed=1)


# ---- by the daemon and the model


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
