"""Now and then a hit is encoded all the same and compared with what was found, so that a name that misses something
comes to light.

Owns: which hits, and what counts as the same. Does not own what follows from a difference: that is the scheduler's.

The first hit of each namespace is compared, and after that a share of all. "Same" is judged by the row that differs
most: the norm of its difference over the norm of the row as this engine encodes it. Bits may differ between a picture
encoded alone and in a batch, and between machines; by how much depends on the dtype (`TOLERANCES`, docs/vllm.md).
Another model's output differs by about 1.4 in such units.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Final

import torch

TOLERANCES: Final[Mapping[torch.dtype, float]] = {
    torch.float64: 1e-4,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""Relative differences of a row that are no difference."""
_TAG_BYTES: Final = 8


class Canary:
    """Chooses. `rate`: the share of hits that is encoded all the same; 0 compares none, not even the first."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._compared: set[bytes] = set()
        self._chance = random.Random()

    def chooses(self, key: bytes) -> bool:
        """Whether the hit on `key` is to be encoded all the same."""
        if not self._rate:
            return False
        return key[:_TAG_BYTES] not in self._compared or self._chance.random() < self._rate

    def compares(self, key: bytes) -> None:
        """One of the key's namespace is going to be compared."""
        self._compared.add(key[:_TAG_BYTES])


def difference(found: torch.Tensor, encoded: torch.Tensor) -> float:
    """By how much the row differs that differs most, relative to its norm; infinite where shapes or dtypes differ, or
    only one of the two is a number.

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
    # Where a row has infinities, or is zero, any difference in it is too large.
    by = (apart / ours.norm(dim=1)).nan_to_num_(math.inf, math.inf).masked_fill_(apart == 0, 0.0)
    return math.inf if bool((~apart.isfinite()).any()) else float(by.max())
