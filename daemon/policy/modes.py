"""In which mode a tier is: thresholds, hysteresis, and nothing else.

A rise takes effect at the sample that shows it. A fall needs FALLS samples in a row that lie `hysteresis` or more
below the threshold of the level it leaves, and goes as far down as all of them allow. A step graph changes the name of
normal and pressure to workflow_aware, and no level.

Invariant: `mode` follows from `level` and `workflow` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from ...errors import BadConfiguration
from ...ipc.modes import LEVELS, Mode

FALLS: Final = 2


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The share of a tier at which each level begins; relaxed begins at 0."""

    normal: float = 0.70
    pressure: float = 0.85
    critical: float = 0.92
    emergency: float = 0.96
    hysteresis: float = 0.02

    def __post_init__(self) -> None:
        for (low, begins), (high, ends) in pairwise(self.rising()):
            if not 0 <= begins + self.hysteresis < ends <= 1:
                raise BadConfiguration(
                    f"{low} at {begins:g} and {high} at {ends:g} with a hysteresis of {self.hysteresis:g}: each must "
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

    def level(self, share: float, *, below: float = 0.0) -> int:
        """The level of a share, as an index of LEVELS, with every threshold lowered by `below`."""
        return sum(share >= begins - below for _, begins in self.rising())


class TierMode:
    """One gauge's mode, from sample to sample."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._level = 0
        self._falls: list[int] = []
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
        rising = self._thresholds.level(share)
        if rising >= self._level:
            self._level = rising
            self._falls.clear()
            return
        falling = self._thresholds.level(share, below=self._thresholds.hysteresis)
        if falling >= self._level:
            self._falls.clear()
            return
        self._falls.append(falling)
        if len(self._falls) >= FALLS:
            self._level = max(self._falls)
            self._falls.clear()

    def change_thresholds(self, thresholds: Thresholds) -> None:
        """For samples from now on."""
        self._thresholds = thresholds
        self._falls.clear()
