"""Whatever changes what an encoder computes changes the key, or the call passes: no answer of before is given."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import tensord
from tensord.client.transformers import Tally, cached, tally

from .test_transformers import clip, encoded, pixels, same


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
    assert tally(model) == Tally(passed=3)
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
        assert tally(model) == Tally(found=1, encoded=1)
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
    assert tally(model) == Tally(found=1, encoded=1)
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
    assert tally(model) == Tally(encoded=2)
    model(**given)
    assert tally(model) == Tally(found=1, encoded=2)
