"""How a device stands by its last reading, and how many bytes therefore have to leave it.

Owns the arithmetic of thresholds, baselines and waiting reservations. Does not own which entries leave (passes), nor
the readings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from ....ipc.messages.modes import Mode
from ..forms.limits import GovernorLimits

_LOWERING: Final = (Mode.PRESSURE, Mode.WORKFLOW_AWARE, Mode.CRITICAL, Mode.EMERGENCY)
"""Modes whose passes bring the device under the pressure threshold, whatever entries are idle."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """The circumstances of a device by its last sample, which was begun at `began_at`.

    `host_accepts`: the host tier is below pressure. `refuses`: why new entries are refused; empty if they are accepted.
    `reserved_bytes`: memory that the sample shows as free and that is promised to reservations, that they wait for, or
    that entries have taken since. `wanted_bytes`: what must leave for waiting reservations. `baseline_bytes`: the used
    bytes that are held by plan.
    """

    mode: Mode
    used_bytes: int
    total_bytes: int
    began_at: float
    host_accepts: bool
    floor_blocks: int = 0
    refuses: str = ""
    reserved_bytes: int = 0
    wanted_bytes: int = 0
    baseline_bytes: int = 0

    def at(self, share: float) -> float:
        """The used bytes at this share of what is left beside the baseline."""
        return self.baseline_bytes + share * (self.total_bytes - self.baseline_bytes)


def needed_bytes(circumstances: Circumstances, limits: GovernorLimits) -> int:
    """How many bytes less must be used, for the mode and for waiting reservations; the larger of both."""
    lacking = lacking_bytes(circumstances, limits) if circumstances.mode in _LOWERING else 0
    return max(lacking, circumstances.wanted_bytes)


def is_for_reservations(circumstances: Circumstances, limits: GovernorLimits) -> bool:
    """Whether waiting reservations need more than the mode does."""
    return needed_bytes(replace(circumstances, wanted_bytes=0), limits) < circumstances.wanted_bytes


def calm_bytes(circumstances: Circumstances, limits: GovernorLimits) -> int:
    """How many bytes more may be used with the device still below the pressure threshold; negative if it is not."""
    return math.ceil(circumstances.at(limits.thresholds.pressure)) - 1 - circumstances.used_bytes


def lowers(circumstances: Circumstances, limits: GovernorLimits) -> bool:
    """Whether a pass is meant to lower the gauge."""
    return lacking_bytes(circumstances, limits) > 0 or circumstances.wanted_bytes > 0


def lacking_bytes(circumstances: Circumstances, limits: GovernorLimits) -> int:
    """How many bytes less must be used for the device to be under the pressure threshold; 0 if it is."""
    over = circumstances.used_bytes - circumstances.at(limits.thresholds.pressure)
    return math.floor(over) + 1 if over >= 0 else 0
