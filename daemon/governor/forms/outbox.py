"""The governor's outbox: the effects of one event, the connected clients, and the counters since the daemon started.

Invariants: those of `daemon.forms.outbox`. Counts only rise.
registered == resident + offloaded + dropped + released + gone_with_owner.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from msgspec import Struct, field

from ...forms.outbox import Outbox
from .events import Effect, GovernorClientJoined, GovernorLog


class GovernorCounters(Struct):
    """Monotonic counters, so that status walks nothing. `refused` by the error's code, `transitions` by the mode
    entered. `promoted`: registrations of offloaded keys, a part of `registered`. `used`: uses that owners reported.
    `freed_bytes`: bytes that owners report their drivers got back."""

    registered: int = 0
    promoted: int = 0
    used: int = 0
    offloaded: int = 0
    dropped: int = 0
    released: int = 0
    gone_with_owner: int = 0
    kept: int = 0
    timed_out: int = 0
    ordered: int = 0
    passes: int = 0
    offloaded_bytes: int = 0
    dropped_bytes: int = 0
    freed_bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    transitions: Counter[str] = field(default_factory=Counter)


class GovernorOutbox(Outbox[GovernorClientJoined, Effect]):
    """The governor's outbox, with its counters."""

    def __init__(self) -> None:
        self.counters = GovernorCounters()
        super().__init__(self.counters.refused)

    def log(self, level: str, event: str, **fields: Any) -> None:
        self.add(GovernorLog(level, event, fields))
