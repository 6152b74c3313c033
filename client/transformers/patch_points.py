"""The patched method of each model family: the innermost method that all callers use.

    LLaVA                     LlavaModel.get_image_features      an item is a row of pixel_values
    CLIP, SigLIP              the vision tower's forward          the same
    Whisper                   the encoder's forward               an item is a row of input_features
    Qwen2-VL, 2.5-VL, 3-VL    the vision tower's forward          an item is a row of grid_thw, and its patches

Owns: this table, and how a call's arguments divide into items. Does not own: the wrapper. Invariants: classes are
named, not imported, so using one family does not import the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from ..identity.modules import tensor_bytes
from .conditions import NotShared, plain_tensor


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

    def rows_of(self, given: Mapping[str, Any], items: Any) -> tuple[list[int], list[Any]]:
        """The number of rows of each item in a call's arguments, and further parts of each item's key. Raises NotShared
        if the arguments do not fit together."""
        if self.grid is not None:
            beside: list[Any] = plain_tensor(given.get(self.grid)).tolist()
            rows = [t * h * w for t, h, w in beside]
        else:
            rows = [1] * items.shape[0]
            beside = [None] * len(rows)
            if given.get(self.beside or "") is not None:
                more = plain_tensor(given.get(self.beside or ""))
                if more.shape[0] != len(rows):
                    raise NotShared(f"{self.beside} has {more.shape[0]} rows for {len(rows)} items")
                beside = [[str(row.dtype), list(row.shape), hashlib.sha256(tensor_bytes(row)).digest()] for row in more]
        if not rows or min(rows) < 1 or sum(rows) != items.shape[0]:
            raise NotShared(f"{self.items} has {items.shape[0]} rows for items of {rows}")
        return rows, beside


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
