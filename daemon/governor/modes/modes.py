"""The mode of a tier, from thresholds and hysteresis.

A rise takes effect at once, with the sample that shows it. A level ends downwards once the last FALLS samples are all
below its threshold by `hysteresis` or more; so a fall goes as far down as all of these samples allow. A step graph
changes the name of the modes normal and pressure to workflow_aware, and changes no level.

Owns: the level of one tier. Does not own the thresholds (`forms.thresholds`), samples, nor the consequences of a mode.

Invariants: `mode` depends only on `level` and `workflow`. After FALLS samples of an empty tier its mode is relaxed.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from ....ipc.messages.modes import LEVELS, Mode
from ..forms.thresholds import Thresholds

FALLS: Final = 2


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
