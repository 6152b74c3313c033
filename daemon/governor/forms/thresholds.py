"""The shares of a tier at which its levels begin and end.

Owns: the thresholds, which the configuration gives. Does not own the level of a tier (`modes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ....errors import BadConfiguration


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

    def rising(self) -> list[tuple[str, float]]:
        """The names of the levels with their thresholds, from low to high, without relaxed."""
        names = "normal", "pressure", "critical", "emergency"
        return [(name, getattr(self, name)) for name in names]

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
    return round(threshold - hysteresis, 12)
