"""The governor's outbox: the effects of one event, as they are collected, and who is there to be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..outbox import Outbox
from .counters import GovernorCounters
from .effects import Effect, GovernorLog


@dataclass(frozen=True, slots=True)
class GovernorClient:
    """Who is on the other side."""

    name: str
    pid: int


class GovernorOutbox(Outbox[GovernorClient, Effect]):
    """The governor's outbox, with its counters."""

    def __init__(self) -> None:
        self.counters = GovernorCounters()
        super().__init__(self.counters.refused)

    def log(self, level: str, event: str, **fields: Any) -> None:
        """Writes one line for the operator."""
        self.add(GovernorLog(level, event, fields))
