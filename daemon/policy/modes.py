"""In which mode a tier is: thresholds, hysteresis, and nothing else.

A rise takes effect at the sample that shows it. A level is left downwards once the last FALLS samples all lie
`hysteresis` or more below its threshold; so a fall goes as far down as all of them allow. A step graph changes the name
of normal and pressure to workflow_aware, and no level.

Invariants: `mode` follows from `level` and `workflow` alone; FALLS samples of an empty tier lead to relaxed from
everywhere.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import Final

from ...errors import BadConfiguration
from ...ipc.modes import LEVELS, Mode

FALLS: Final = 2


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The share of a tier at which each level begins; relaxed begins at 0.

    Raises BadConfiguration, which names the settings: they must rise by more than the hysteresis from one to the next,
    and normal must be left before the tier is emptier than empty.
    """

    normal: float = 0.70
    pressure: float = 0.85
    critical: float = 0.92
    emergency: float = 0.96
    hysteresis: float = 0.02

    def __post_init__(self) -> None:
        if not 0 <= self.hysteresis < 1:
            raise BadConfiguration(f"hysteresis = {self.hysteresis:g}: from 0 to below 1 may be")
        if not max(self.hysteresis, 1e-9) <= self.normal:
            raise BadConfiguration(
                f"normal = {self.normal:g} with a hysteresis of {self.hysteresis:g}: it must begin above 0, and no "
                "lower than the hysteresis, or it would never be left"
            )
        for (low, begins), (high, ends) in pairwise(self.rising()):
            if not begins < _below(ends, self.hysteresis) <= ends <= 1:
                raise BadConfiguration(
                    f"{low} = {begins:g} and {high} = {ends:g} with a hysteresis of {self.hysteresis:g}: each must "
                    "begin above the one before by more than the hysteresis, and none above 1"
                )

    def rising(self) -> list[tuple[Mode, float]]:
        """Levels and where they begin, from low to high, relaxed left out."""
        return [
            (Mode.NORMAL, self.normal),
            (Mode.PRESSURE, self.pressure),
            (Mode.CRITICAL, self.critical),
            (Mode.EMERGENCY, self.emergency),
        ]

    def level(self, share: float) -> int:
        """The level that a share is in, as an index of LEVELS. A threshold belongs to the level that begins there."""
        return sum(share >= begins for _, begins in self.rising())

    def kept(self, share: float) -> int:
        """The highest level that a sample of `share` speaks for keeping, as an index of LEVELS; no less than `level`.

        A share that lies the hysteresis below a threshold speaks for leaving what begins there, also exactly so.
        """
        kept = sum(share > _below(begins, self.hysteresis) for _, begins in self.rising())
        return max(kept, self.level(share))


def _below(threshold: float, hysteresis: float) -> float:
    """As people reckon: 2 points below 0.7 is 0.68, where floats have it 0.6799999999999999."""
    return float(Decimal(repr(threshold)) - Decimal(repr(hysteresis)))


class TierMode:
    """One gauge's mode, from sample to sample."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._level = 0
        self._kept: deque[int] = deque(maxlen=FALLS)
        self.workflow = False

    @property
    def level(self) -> Mode:
        """How full the tier is, whatever graph there is."""
        return LEVELS[self._level]

    @property
    def mode(self) -> Mode:
        """What policies go by."""
        if self.workflow and self.level in (Mode.NORMAL, Mode.PRESSURE):
            return Mode.WORKFLOW_AWARE
        return self.level

    @property
    def pressed(self) -> bool:
        """Whether it is at pressure or above, where samples come more often."""
        return self._level >= LEVELS.index(Mode.PRESSURE)

    def sample(self, share: float) -> None:
        """Takes one reading: `share` used of the whole, from 0 up (a gauge may show more than 1)."""
        assert share >= 0, share  # nor NaN, which would pass for empty
        self._kept.append(self._thresholds.kept(share))
        if len(self._kept) == FALLS:
            self._level = min(self._level, max(self._kept))
        self._level = max(self._level, self._thresholds.level(share))

    def change_thresholds(self, thresholds: Thresholds) -> None:
        """For samples from now on; those before speak for nothing any more."""
        self._thresholds = thresholds
        self._kept.clear()
