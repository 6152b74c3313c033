"""What computing an entry took, for entries of which nobody said it: learned from the entries of which somebody did.

The cost of an entry is the milliseconds that its put reported. Without them it is the put's tokens times the
milliseconds that a token took lately, and without tokens the mean cost of other entries.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from .candidate import Candidate

TOLD: Final = 0.999
"""What a new report of milliseconds leaves of those before."""


class Costs:
    """Costs of entries by the byte."""

    def __init__(self) -> None:
        self._told_ms, self._told_tokens, self._mean_cost = 0.0, 0.0, 0.0

    def learned(self) -> list[float]:
        """For `learn`."""
        return [self._told_ms, self._told_tokens, self._mean_cost]

    def learn(self, told: Iterable[float]) -> None:
        """Goes on from what `learned` told.

        Raises:
            ValueError, TypeError: it told something else.
        """
        self._told_ms, self._told_tokens, self._mean_cost = map(float, told)

    def weight(self, new: Candidate) -> float:
        """cost / bytes of an entry, which is learned from if its put reported it."""
        cost = new.cost_ms
        if cost > 0 and new.tokens:
            self._told_ms = TOLD * self._told_ms + cost
            self._told_tokens = TOLD * self._told_tokens + new.tokens
        elif cost <= 0 and new.tokens:
            cost = new.tokens * (self._told_ms / self._told_tokens if self._told_tokens else 1.0)
        if cost > 0:
            self._mean_cost = cost if not self._mean_cost else TOLD * self._mean_cost + (1 - TOLD) * cost
        return (cost or self._mean_cost or 1.0) / max(new.size_bytes, 1)
