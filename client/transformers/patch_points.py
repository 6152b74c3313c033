"""The patched method of each model family: the innermost method that all callers use.

    LLaVA                     LlavaModel.get_image_features      an item is a row of pixel_values
    CLIP, SigLIP              the vision tower's forward          the same
    Whisper                   the encoder's forward               an item is a row of input_features
    Qwen2-VL, 2.5-VL, 3-VL    the vision tower's forward          an item is a row of grid_thw, and its patches

Owns: this table. Does not own: the wrapper. Invariants: classes are named, not imported, so using one family does not
import the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["PATCH_POINTS", "PatchPoint"]


@dataclass(frozen=True, slots=True)
class PatchPoint:
    """The patched method of one family, and the roles of its arguments.

    Args:
        method: the name of the method that is wrapped.
        modality: the modality in the key.
        items: the argument whose rows are the batch.
        grid: the argument with a row (t, h, w) for each item; `items` then has t·h·w rows for the item.
        beside: an optional argument with a row for each item.
        parts: attributes with the modules that encode; empty for the module itself.
        listed: fields of the output with a list of one tensor for each item; "" is the output itself.
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
"""The patch point of each module class, by class name."""
