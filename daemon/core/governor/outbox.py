"""The effects of one event, as they are collected, and who is there to be told.

Invariant: nothing is sent to a client that left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....errors import TensordError
from ....ipc import messages
from .counters import GovernorCounters
from .effects import Effect, GovernorAnnounce, GovernorLog, GovernorSend, Press


@dataclass(frozen=True, slots=True)
class GovernorClient:
    """Who is on the other side."""

    name: str
    pid: int


class GovernorOutbox:
    """Collects effects until `take`."""

    def __init__(self) -> None:
        self.clients: dict[int, GovernorClient] = {}
        self.counters = GovernorCounters()
        self._effects: list[Effect] = []

    def take(self) -> list[Effect]:
        """The effects since the last call, in order."""
        effects, self._effects = self._effects, []
        return effects

    def send(self, client: int, message: messages.Answer) -> None:
        """Tells a client something, if it is still there."""
        if client in self.clients:
            self._effects.append(GovernorSend(client, message))

    def press(self, press: Press) -> None:
        """Tells the store how much it may keep."""
        self._effects.append(press)

    def announce(self, event: str, **body: Any) -> None:
        """Tells whoever watches."""
        self._effects.append(GovernorAnnounce({"event": event, **body}))

    def log(self, level: str, event: str, **fields: Any) -> None:
        """One line for the operator."""
        self._effects.append(GovernorLog(level, event, fields))

    def refuse(self, client: int, request: int | None, error: TensordError) -> None:
        """Answers a request with an error, counts and announces it; one without an id is not answered."""
        self.counters.refused[error.code] += 1
        self.announce("refuse", client=client, code=error.code, text=str(error))
        if request is not None:
            self.send(client, messages.Error.of(error, request))
