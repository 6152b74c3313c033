"""Estimates the cost of computing an entry. For puts without a reported cost it is learned from other puts.

The cost of an entry is the milliseconds that its put reported. Without them it is the put's tokens times the recent
milliseconds per token. Without tokens it is the mean cost of other entries.

Owns: the recent milliseconds per token, and the mean cost. Does not own the entries.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from .candidate import Candidate

DECAY: Final = 0.999
"""The weight of the earlier reports after a new one."""


class Costs:
    """The costs of entries, per byte."""

    def __init__(self) -> None:
        self._reported_ms, self._reported_tokens, self._mean_cost = 0.0, 0.0, 0.0

    def learned(self) -> list[float]:
        """The state, for `learn`."""
        return [self._reported_ms, self._reported_tokens, self._mean_cost]

    def learn(self, state: Iterable[float]) -> None:
        """Restores the state from `learned`.

        Raises:
            ValueError, TypeError: `state` is not a state of `learned`.
        """
        self._reported_ms, self._reported_tokens, self._mean_cost = map(float, state)

    def weight(self, new: Candidate) -> float:
        """The cost of an entry divided by its bytes. A reported cost updates the estimates."""
        cost = new.cost_ms
        if cost > 0 and new.tokens:
            self._reported_ms = DECAY * self._reported_ms + cost
            self._reported_tokens = DECAY * self._reported_tokens + new.tokens
        elif cost <= 0 and new.tokens:
            cost = new.tokens * (self._reported_ms / self._reported_tokens if self._reported_tokens else 1.0)
        if cost > 0:
            self._mean_cost = cost if not self._mean_cost else DECAY * self._mean_cost + (1 - DECAY) * cost
        return (cost or self._mean_cost or 1.0) / max(new.size_bytes, 1)
