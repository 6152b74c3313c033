"""The governor's outbox: the effects of one event, the connected clients, and the counters.

Owns the log effects and the clients' names and pids. Does not own collecting and sending (`daemon.core.outbox`, whose
invariant holds here too).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..outbox import Outbox
from .counters import GovernorCounters
from .effects import Effect, GovernorLog


@dataclass(frozen=True, slots=True)
class GovernorClient:
    """The peer of a connection."""

    name: str
    pid: int


class GovernorOutbox(Outbox[GovernorClient, Effect]):
    """The governor's outbox, with its counters."""

    def __init__(self) -> None:
        self.counters = GovernorCounters()
        super().__init__(self.counters.refused)

    def log(self, level: str, event: str, **fields: Any) -> None:
        """Writes one log line for the operator."""
        self.add(GovernorLog(level, event, fields))
