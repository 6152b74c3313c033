"""The outbox of one core: the effects of one event, the connected clients, and the count of refusals.

Owns the clients' identities and the list of effects. The store and the governor have one each. Does not own how effects
are carried out. Invariant: nothing is sent to a client that has left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ...errors import TensordError
from ...ipc.messages import control as messages
from ..claims.claims import Verdict
from ..reports.counters import StoreCounters
from .effects import Announce, Effect, Send
from .events import ClientJoined

Client = TypeVar("Client")
Wanted = TypeVar("Wanted")


class Outbox(Generic[Client, Wanted]):
    """Collects effects of type `Wanted` until `take`. `refusals` counts refusals by the error's code."""

    def __init__(self, refusals: Counter[str]) -> None:
        self.clients: dict[int, Client] = {}
        self._refusals = refusals
        self._effects: list[Wanted | Send | Announce] = []
        self.is_watched: Callable[[], bool] = lambda: True
        """Whether somebody wants to hear of events."""

    def take(self) -> list[Wanted | Send | Announce]:
        """The effects since the last call, in order."""
        effects, self._effects = self._effects, []
        return effects

    def add(self, effect: Wanted) -> None:
        """Adds an effect that concerns no client."""
        self._effects.append(effect)

    def send(self, client: int, message: messages.Answer) -> None:
        """Sends an answer or a push to a client, if it is still connected."""
        if client in self.clients:
            self._effects.append(Send(client, message))

    def announce(self, event: str, **body: Any) -> None:
        """Reports an event to the watchers, if there are any."""
        if self.is_watched():
            self._effects.append(Announce({"event": event, **body}))

    def count_refusal(self, client: int, error: TensordError) -> None:
        """Counts and announces a refusal. The caller sends the answer."""
        self._refusals[error.code] += 1
        self.announce("refuse", client=client, code=error.code, text=str(error))

    def refuse(self, client: int, request: int | None, error: TensordError) -> None:
        """Answers a request with an error, which it counts and announces. A request without an id gets no answer."""
        self.count_refusal(client, error)
        if request is not None:
            self.send(client, messages.Error.of(error, request))


class StoreOutbox(Outbox[ClientJoined, Effect]):
    """The store's outbox, with its counters and the time of the present event."""

    def __init__(self, counters: StoreCounters) -> None:
        super().__init__(counters.refusals)
        self.counters = counters
        self.now = 0.0

    def send_verdicts(self, verdicts: list[Verdict]) -> None:
        """Answers the clients that asked for claims."""
        for verdict in verdicts:
            self.counters.claims[verdict.answer] += 1
            claimed = messages.Claimed(verdict.request, verdict.answer, verdict.token, verdict.lasts_s)
            self.send(verdict.client, claimed)
            self.announce("claim", client=verdict.client, key=verdict.key.hex(), answer=verdict.answer)
