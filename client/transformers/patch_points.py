"""Where each family of models is cut open: the narrowest place that all its callers pass.

    LLaVA                     LlavaModel.get_image_features      an item is a row of pixel_values
    CLIP, SigLIP              the vision tower's forward          the same
    Whisper                   the encoder's forward               an item is a row of input_features
    Qwen2-VL, 2.5-VL, 3-VL    the vision tower's forward          an item is a row of grid_thw, and its patches

Owns: that table. Knows classes by their names, so that no family is imported for the sake of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["PATCH_POINTS", "PatchPoint"]


@dataclass(frozen=True, slots=True)
class PatchPoint:
    """Where one family is cut open.

    Args:
        method: of the module, which is wrapped.
        modality: in the key.
        items: name of the argument whose rows are the batch.
        grid: name of the argument with a row (t, h, w) for each item, where `items` has t·h·w rows for it.
        beside: an argument with a row for each item that may come along.
        parts: attributes with the modules that encode; none: the module itself.
        listed: fields of the output that are a list with a tensor for each item; "" is the output itself.
    """

    method: str
    modality: Literal["image", "audio"]
    items: str
    grid: str | None = None
    beside: str | None = None
    parts: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()


_PIXELS: Final = PatchPoint("forward", "image", "pixel_values")
_PATCHES: Final = PatchPoint("forward", "image", "hidden_states", grid="grid_thw")

PATCH_POINTS: Final[Mapping[str, PatchPoint]] = {
    "LlavaModel": PatchPoint(
        "get_image_features",
        "image",
        "pixel_values",
        parts=("vision_tower", "multi_modal_projector"),
        listed=("", "pooler_output"),
    ),
    "CLIPVisionModel": _PIXELS,
    "CLIPVisionTransformer": _PIXELS,
    "SiglipVisionModel": _PIXELS,
    "SiglipVisionTransformer": _PIXELS,
    "WhisperEncoder": PatchPoint("forward", "audio", "input_features", beside="attention_mask"),
    "Qwen2VisionTransformerPretrainedModel": _PATCHES,
    "Qwen2_5_VisionTransformerPretrainedModel": _PATCHES,
    "Qwen3VLVisionModel": _PATCHES,
    "Qwen3VLMoeVisionModel": _PATCHES,
}
"""By the name of the module's class."""
