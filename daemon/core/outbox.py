"""The effects of one event, as they are collected; who is there to be answered, and what refusals were counted.

Owns the clients' identities and the list of effects. The store and the governor each have one. Invariant: nothing is
sent to a client that left.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ...errors import TensordError
from ...ipc import messages
from .claims import Verdict
from .counters import StoreCounters
from .effects import Announce, Effect, Send

Client = TypeVar("Client")
Wanted = TypeVar("Wanted")


@dataclass(frozen=True, slots=True)
class StoreClient:
    """Who is on the other side, as the socket knows it."""

    uid: int
    name: str


class Outbox(Generic[Client, Wanted]):
    """Collects effects of type `Wanted` until `take`.

    Args:
        refusals: counts refusals by the error's code.
    """

    def __init__(self, refusals: Counter[str]) -> None:
        self.clients: dict[int, Client] = {}
        self._refusals = refusals
        self._effects: list[Wanted | Send | Announce] = []

    def take(self) -> list[Wanted | Send | Announce]:
        """The effects since the last call, in order."""
        effects, self._effects = self._effects, []
        return effects

    def add(self, effect: Wanted) -> None:
        """Adds an effect that concerns no client."""
        self._effects.append(effect)

    def send(self, client: int, message: messages.Answer) -> None:
        """Sends an answer or a push to a client, if it is still there."""
        if client in self.clients:
            self._effects.append(Send(client, message))

    def announce(self, event: str, **body: Any) -> None:
        """Tells whoever watches."""
        self._effects.append(Announce({"event": event, **body}))

    def count_refusal(self, client: int, error: TensordError) -> None:
        """Counts and announces a refusal; the answer is the caller's."""
        self._refusals[error.code] += 1
        self.announce("refuse", client=client, code=error.code, text=str(error))

    def refuse(self, client: int, request: int | None, error: TensordError) -> None:
        """Answers a request with an error, and counts and announces it. A request without an id is not answered."""
        self.count_refusal(client, error)
        if request is not None:
            self.send(client, messages.Error.of(error, request))


class StoreOutbox(Outbox[StoreClient, Effect]):
    """The store's outbox, with its counters and the time of the event whose effects these are."""

    def __init__(self, counters: StoreCounters) -> None:
        super().__init__(counters.refusals)
        self.counters = counters
        self.now = 0.0

    def send_verdicts(self, verdicts: list[Verdict]) -> None:
        """Answers those who asked for claims."""
        for verdict in verdicts:
            self.counters.claims[verdict.answer] += 1
            self.send(
                verdict.client,
                messages.Claimed(verdict.request, verdict.answer, verdict.token, verdict.lasts_s),
            )
            self.announce("claim", client=verdict.client, key=verdict.key.hex(), answer=verdict.answer)
