"""The mode of a tier, from thresholds and hysteresis.

A rise takes effect at once, with the sample that shows it. A level ends downwards once the last FALLS samples are all
below its threshold by `hysteresis` or more; so a fall goes as far down as all of these samples allow. A step graph
changes the name of the modes normal and pressure to workflow_aware, and changes no level.

Owns: the thresholds, and the level of one tier. Does not own samples, nor the consequences of a mode.

Invariants: `mode` depends only on `level` and `workflow`. After FALLS samples of an empty tier its mode is relaxed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import Final

from ....errors import BadConfiguration
from ....ipc.messages.modes import LEVELS, Mode

FALLS: Final = 2


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The share of a tier at which each level begins. Relaxed begins at 0.

    Raises:
        BadConfiguration: a threshold is not above the one before it by more than the hysteresis, or `normal` is below
            the hysteresis, so that it would never end. The text names the settings.
    """

    normal: float = 0.70
    pressure: float = 0.85
    critical: float = 0.92
    emergency: float = 0.96
    hysteresis: float = 0.02

    def __post_init__(self) -> None:
        if not 0 <= self.hysteresis < 1:
            raise BadConfiguration(f"hysteresis = {self.hysteresis:g}: give a share of at least 0 and below 1")
        if not max(self.hysteresis, 1e-9) <= self.normal:
            raise BadConfiguration(
                f"normal = {self.normal:g} with a hysteresis of {self.hysteresis:g}: it must be above 0, and not "
                "below the hysteresis, or the mode would never end"
            )
        for (low, begins), (high, ends) in pairwise(self.rising()):
            if not begins < _below(ends, self.hysteresis) <= ends <= 1:
                raise BadConfiguration(
                    f"{low} = {begins:g} and {high} = {ends:g} with a hysteresis of {self.hysteresis:g}: each must "
                    "be above the one before by more than the hysteresis, and at most 1"
                )

    def rising(self) -> list[tuple[Mode, float]]:
        """The levels with their thresholds, from low to high, without relaxed."""
        return [
            (Mode.NORMAL, self.normal),
            (Mode.PRESSURE, self.pressure),
            (Mode.CRITICAL, self.critical),
            (Mode.EMERGENCY, self.emergency),
        ]

    def level(self, share: float) -> int:
        """The level of a share, as an index of LEVELS. A threshold belongs to the level that begins there."""
        return sum(share >= begins for _, begins in self.rising())

    def kept(self, share: float) -> int:
        """The highest level that a sample of `share` does not end, as an index of LEVELS; at least `level`.

        A share that is below a threshold by the hysteresis, or by more, ends the level that begins there.
        """
        kept = sum(share > _below(begins, self.hysteresis) for _, begins in self.rising())
        return max(kept, self.level(share))


def _below(threshold: float, hysteresis: float) -> float:
    """The decimal difference: 0.02 below 0.7 is 0.68, while floats give 0.6799999999999999."""
    return float(Decimal(repr(threshold)) - Decimal(repr(hysteresis)))


class TierMode:
    """The mode of one gauge."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._level = 0
        self._kept: deque[int] = deque(maxlen=FALLS)
        self.workflow = False

    @property
    def level(self) -> Mode:
        """The level of the tier, without regard to step graphs."""
        return LEVELS[self._level]

    @property
    def mode(self) -> Mode:
        """The mode: the level, or workflow_aware."""
        if self.workflow and self.level in (Mode.NORMAL, Mode.PRESSURE):
            return Mode.WORKFLOW_AWARE
        return self.level

    @property
    def pressed(self) -> bool:
        """True at the level pressure or above. Samples are taken more often then."""
        return self._level >= LEVELS.index(Mode.PRESSURE)

    def sample(self, share: float) -> None:
        """Takes one reading: the used share of the tier, 0 or more. A gauge may report more than 1."""
        assert share >= 0, share  # fails for NaN too, which would otherwise count as empty
        self._kept.append(self._thresholds.kept(share))
        if len(self._kept) == FALLS:
            self._level = min(self._level, max(self._kept))
        self._level = max(self._level, self._thresholds.level(share))

    def change_thresholds(self, thresholds: Thresholds) -> None:
        """Sets the thresholds for later samples. Earlier samples no longer count."""
        self._thresholds = thresholds
        self._kept.clear()
