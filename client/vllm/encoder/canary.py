"""Spot checks of hits: some hits are encoded anyway and compared with the stored output. They detect namespaces that
cover too little.

Owns: the comparison. Does not own: the choice of hits, and the reaction to a difference (scheduler.py).

Bits may differ between an image encoded alone and in a batch, and between machines; by how much depends on the dtype
(`TOLERANCES`, docs/vllm.md). Outputs of another model differ by about 1.4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch

TOLERANCES: Final[Mapping[torch.dtype, float]] = {
    torch.float64: 1e-4,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""By dtype: the relative difference of a row up to which two outputs count as equal."""


def difference(found: torch.Tensor, encoded: torch.Tensor) -> float:
    """The largest relative difference of any row: the norm of the row's difference over the norm of the row as this
    engine encodes it. Infinite if shapes or dtypes differ, or if only one of two values is NaN or infinite.

    Args:
        found, encoded: (rows, width), on the CPU.
    """
    if found.shape != encoded.shape or found.dtype != encoded.dtype:
        return math.inf
    if torch.equal(found, encoded):
        return 0.0
    ours, theirs = encoded.float(), found.float()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    apart = (theirs - ours).masked_fill_(same, 0.0).norm(dim=1)
    # In a row of `encoded` that is zero or has infinities, any difference is too large.
    by = (apart / ours.norm(dim=1)).nan_to_num_(math.inf, math.inf).masked_fill_(apart == 0, 0.0)
    return math.inf if bool((~apart.isfinite()).any()) else float(by.max())
