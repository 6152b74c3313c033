"""The governor actor: runs the governor's core, which decides about modes, device entries and workflows.

Owns: the governor's inbox, and the threads that ask neighbours. Turns messages into events of the core, and carries the
core's effects out. Does not own the decisions (the core), nor any shared memory.

Invariant: the core is called from one task only, and its effects are carried out in order.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any, assert_never

from ...ipc.messages import control as messages
from ...ipc.messages.declared import handlers
from ..forms.effects import Announce, Send
from ..forms.events import AgentsTurned, ClientLeft, Pressed, Tick
from ..governor.forms import events
from ..governor.governor import Governor
from ..neighbours.registry import ask
from ..process.logs import logger
from .mailbox import INBOX_MAX, Mailbox, Pump
from .messages import Deliver, GovernorMessage, Joined, Queried

_log = logger("governor")


@dataclass(eq=False, repr=False)
class GovernorActor:
    """Runs `governor` on the messages of `inbox`. `clock` gives monotonic seconds. `tell_store`: sends the store the
    limits under pressure, and what step graphs say of agents. `reading`: gives the gauges a device reading from a
    client. `hasten`: called when `sample_every_s` has become shorter. `tell_watchers`: sends an event to all watchers.
    None may block."""

    _governor: Governor
    _: KW_ONLY
    clock: Callable[[], float]
    tell_store: Callable[[Pressed | AgentsTurned], object]
    reading: Callable[[str, int, int, float], object]
    hasten: Callable[[], object]
    tell_watchers: Callable[[dict[str, Any]], object]

    def __post_init__(self) -> None:
        self.inbox: Mailbox[GovernorMessage] = Mailbox(INBOX_MAX)
        self._clients: dict[int, Joined] = {}
        self._pump = Pump(self.inbox, self._receive, self.clock)
        self._every_s = self._governor.sample_every_s
        queries: dict[type[Any], Callable[[dict[str, Any]], dict[str, Any]]] = {
            messages.StatusQuery: lambda status: status,
            messages.HealthQuery: lambda status: {"problems": problems(status)},
        }
        self._queries = handlers(messages.DaemonQuery, queries)

    @property
    def sample_every_s(self) -> float:
        return self._governor.sample_every_s

    async def run(self) -> None:
        while True:
            timer = self._governor.next_timer()
            idle_s = None if timer is None else timer - self.clock()
            if not self._pump.busy and (idle_s is None or idle_s > 0):
                await self.inbox.wait(idle_s)
            self._pump.turn()
            timer = self._governor.next_timer()
            if timer is not None and timer <= self.clock():
                self._handle(Tick())
            if self.sample_every_s < self._every_s:
                self.hasten()
            self._every_s = self.sample_every_s
            # The other tasks of the loop run between two turns.
            await asyncio.sleep(0)

    def _receive(self, message: GovernorMessage) -> None:
        match message:
            case events.Governed(client, messages.ReadDevice() as reading):
                if self._governor.devices.owner(client, reading.device) is not None:
                    # The client's clock is this machine's. A time to come is a mistake.
                    read_at = min(reading.read_at_s, self.clock())
                    self.reading(reading.device, reading.used_bytes, reading.total_bytes, read_at)
            case events.Governed(client):
                if client in self._clients:
                    self._handle(message)
            case Joined():
                self._clients[message.client] = message
                self._handle(events.GovernorClientJoined(message.client, message.name, message.pid))
            case ClientLeft(client):
                if self._clients.pop(client, None) is not None:
                    self._handle(message)
            case Queried():
                message.settle(self._answer)
            case _:
                self._handle(message)

    def _handle(self, event: events.Event) -> None:
        for effect in self._governor.handle(event, self.clock()):
            match effect:
                case Send(client, message):
                    self._clients[client].deliver(Deliver(message))
                case Pressed() | AgentsTurned():
                    self.tell_store(effect)
                case events.AskNeighbour():
                    self._ask_neighbour(effect)
                case Announce(body):
                    self.tell_watchers(body)
                case events.GovernorLog(level, event_name, fields):
                    getattr(_log, level)(event_name, **fields)
                case _:
                    assert_never(effect)

    def _ask_neighbour(self, asked: events.AskNeighbour) -> None:
        """Asks in a thread of its own, since the server may hang. It is a daemon thread: a server that never answers
        does not keep the process from ending."""
        loop = asyncio.get_running_loop()

        def run() -> None:
            answer = events.NeighbourAnswered(asked.number, *ask(asked.place, asked.answer_s))
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self.inbox.tell_now, answer)

        try:
            threading.Thread(target=run, name=f"tensord-neighbour-{asked.place.kind}", daemon=True).start()
        except RuntimeError as error:
            # The process may have no more threads (TasksMax, ulimit -u).
            why = f"there is no thread to ask it in: {error}"
            self.inbox.tell_now(events.NeighbourAnswered(asked.number, "failed", why))

    def _answer(self, query: messages.StatusRequest) -> dict[str, Any]:
        return self._queries[type(query)](self._governor.status())


def problems(status: dict[str, Any]) -> list[str]:
    """The findings of a governor's status that an operator has to look at. The daemon serves all the same."""
    found = [
        f"gauge {gauge['gauge']} cannot be read; its last value, {gauge['age_s']:.3g} s old, is used "
        f"({gauge['source']}: {gauge.get('failure', '')})"
        for gauge in status["gauges"]
        if gauge["stale"]
    ]
    found += [
        f"gauge source {source['source']} hangs for {source['since_s']:.3g} s; its gauges are not read"
        if source["state"] == "hanging"
        else f"gauge source {source['source']} cannot be read: {source['why']}"
        for source in status["sources"]
        if source["problem"]
    ]
    found += [
        f"{each['setting']} names {each['card']}, and no card is called so; name one of `tensorctl status`"
        for each in status["missing_cards"]
    ]
    found += [f"device {device['device']}: {device['stuck']}" for device in status["devices"] if device["stuck"]]
    found += [
        f"client {owner['client']} ({owner['name']}, pid {owner['pid']}) does not carry out orders for "
        f"{owner['device']}"
        for owner in status["owners"]
        if owner["unresponsive"]
    ]
    return found
