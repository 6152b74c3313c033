"""The effects of one event, as they are collected; who is there to be answered, and what refusals were counted.

Owns the clients' identities and the list of effects. Invariant: nothing is sent to a client that left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import TensordError
from ...ipc import messages
from .claims import Verdict
from .counters import StoreCounters
from .effects import Announce, Effect, Send


@dataclass(frozen=True, slots=True)
class StoreClient:
    """Who is on the other side, as the socket knows it."""

    uid: int
    name: str


class StoreOutbox:
    """Collects effects until `take`."""

    def __init__(self, counters: StoreCounters) -> None:
        self.clients: dict[int, StoreClient] = {}
        self.counters = counters
        self.now = 0.0
        """The time of the event whose effects these are."""
        self._effects: list[Effect] = []

    def take(self) -> list[Effect]:
        """The effects since the last call, in order."""
        effects, self._effects = self._effects, []
        return effects

    def add(self, effect: Effect) -> None:
        self._effects.append(effect)

    def send(self, client: int, message: messages.Answer) -> None:
        """Answers a client, if it is still there."""
        if client in self.clients:
            self._effects.append(Send(client, message))

    def announce(self, event: str, **body: Any) -> None:
        """Tells whoever watches."""
        self._effects.append(Announce({"event": event, **body}))

    def count_refusal(self, client: int, error: TensordError) -> None:
        """Counts and announces a refusal; the answer is the caller's."""
        self.counters.refusals[error.code] += 1
        self.announce("refuse", client=client, code=error.code, text=str(error))

    def refuse(self, client: int, request: int, error: TensordError) -> None:
        """Answers a request, other than a put, with an error."""
        self.count_refusal(client, error)
        self.send(client, messages.Error.of(error, request))

    def tell(self, verdicts: list[Verdict]) -> None:
        """Answers those who asked for claims."""
        for verdict in verdicts:
            self.counters.claims[verdict.answer] += 1
            self.send(
                verdict.client,
                messages.Claimed(verdict.request, verdict.answer, verdict.token, verdict.lasts_s),
            )
            self.announce("claim", client=verdict.client, key=verdict.key.hex(), answer=verdict.answer)
