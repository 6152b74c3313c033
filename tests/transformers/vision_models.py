"""Tiny encoders of each family, made from configurations, with random weights; their inputs and outputs."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers

import tensord
from tensord.client.transformers import tally

from ..daemon_process import until
from .language.language_models import sizes

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


LAYERS = sizes(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
VISION = sizes(LAYERS, image_size=30, patch_size=6)
HEADS = sizes(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
TEXT = sizes(HEADS, vocab_size=64, max_position_embeddings=128, bos_token_id=0, eos_token_id=1)
SPEECH = sizes(
    encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=128, max_source_positions=32, num_mel_bins=8
)
WORDS = sizes(decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=64, max_target_positions=32, vocab_size=64)
SPECIAL = sizes(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
QWEN: dict[str, Any] = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
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
    return seeded(transformers.CLIPModel, transformers.CLIPConfig(vision_config=VISION, text_config=TEXT))


def siglip_pair() -> Any:
    return seeded(transformers.SiglipModel, transformers.SiglipConfig(vision_config=VISION, text_config=TEXT))


def llava() -> Any:
    vision, text = transformers.CLIPVisionConfig(**VISION), transformers.LlamaConfig(**TEXT)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=3)
    return seeded(transformers.LlavaForConditionalGeneration, config)


def whisper() -> Any:
    config = transformers.WhisperConfig(**sizes(SPEECH, WORDS, SPECIAL, d_model=64, max_source_positions=32))
    return seeded(transformers.WhisperForConditionalGeneration, config)


def qwen2() -> Any:
    vision = {**QWEN, "embed_dim": 32, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(vision_config=vision, text_config={**TEXT, "rope_parameters": ROPE})
    return seeded(transformers.Qwen2VLForConditionalGeneration, config)


def qwen2_5() -> Any:
    vision = {**QWEN, "out_hidden_size": 32, "intermediate_size": 64, "window_size": 16, "fullatt_block_indexes": [1]}
    config = transformers.Qwen2_5_VLConfig(vision_config=vision, text_config={**TEXT, "rope_parameters": ROPE})
    return seeded(transformers.Qwen2_5_VLForConditionalGeneration, config)


def qwen3() -> Any:
    vision = {**QWEN, "out_hidden_size": 32, "intermediate_size": 64, "num_position_embeddings": 16}
    vision["deepstack_visual_indexes"] = [0, 1]
    text = {**TEXT, "head_dim": 16, "rope_parameters": ROPE}
    config = transformers.Qwen3VLConfig(vision_config=vision, text_config=text)
    return seeded(transformers.Qwen3VLForConditionalGeneration, config)


class Adapter(torch.nn.Module):
    """Another library's module around a layer, as PEFT puts one."""

    def __init__(self, around: Any) -> None:
        super().__init__()
        self.around = around
        self.eval()

    def forward(self, given: Any) -> Any:
        return 2 * self.around(given)


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


Watch = Callable[[Family, Any], list[int]]


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
