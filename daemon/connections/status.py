"""The status actor: serves the read-only status socket.

Owns: the sessions of readers, the merging of the store's and the governor's answers, and the events that wait for each
watcher. Does not own the figures (the store's and the governor's actors).

Invariants: no request on this socket changes any state. A watcher that does not keep up loses the oldest events, and
gets the number of lost events with the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from ...errors import ProtocolError, TensordError
from ...ipc.messages import control as messages
from ...ipc.messages.declared import handlers
from ...ipc.wire.channel import AsyncChannel
from ..actors.mailbox import Mailbox, Sender
from ..actors.messages import OUTBOX_MAX, GovernorMessage, Queried, StoreMessage
from ..claims.quotas import Rates
from ..process.logs import logger
from ..reports.counters import RequestTimes
from .session import RequestTimer, paced

INTEGER_MAX: Final = (1 << 64) - 1
QUERY_COST: Final = 20.0
"""The cost of a query, in requests: a query may return 256 entries, or read all lanes."""
OWN: Final[Sender] = (-1, 0)
"""The sender of the daemon's own queries. It takes turns with the uids."""

_log = logger("status")


class Watchers:
    """The events that wait for each watcher: at most OUTBOX_MAX."""

    def __init__(self) -> None:
        self._dropped: dict[asyncio.Queue[dict[str, Any]], int] = {}

    def tell(self, event: dict[str, Any]) -> None:
        """Queues an event (`Announce.body`) for all watchers. Never blocks."""
        body = {**event, "unix_s": time.time()}
        for waiting in self._dropped:
            if waiting.full():
                waiting.get_nowait()
                self._dropped[waiting] += 1
            waiting.put_nowait(body)

    @property
    def are_told(self) -> bool:
        return bool(self._dropped)

    async def events(self) -> AsyncGenerator[messages.Event, None]:
        """The events from now on, for one more watcher."""
        waiting: asyncio.Queue[dict[str, Any]] = asyncio.Queue(OUTBOX_MAX)
        self._dropped[waiting] = 0
        try:
            while True:
                body = await waiting.get()
                dropped, self._dropped[waiting] = self._dropped[waiting], 0
                yield messages.Event(body, dropped)
        finally:
            del self._dropped[waiting]


@dataclass(eq=False, repr=False)
class Documents:
    """The bodies of answers to queries, merged from the answers of the store and of the governor. `socket_problems`:
    which sockets no new client can reach, and why."""

    _store: Mailbox[StoreMessage]
    _governor: Mailbox[GovernorMessage]
    _socket_problems: Callable[[], list[str]]

    def __post_init__(self) -> None:
        merges: dict[type[Any], Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]] = {
            messages.StatusQuery: self._status,
            messages.HealthQuery: self._health,
        }
        self._merges = handlers(messages.DaemonQuery, merges)

    async def answer(self, message: messages.StatusRequest, sender: Sender = OWN) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        stored, governed = Queried(message, loop.create_future()), Queried(message, loop.create_future())
        await self._store.tell(stored, sender)
        if not isinstance(message, messages.DaemonQuery):
            return await stored.answer
        await self._governor.tell(governed, sender)
        return self._merges[type(message)](await stored.answer, await governed.answer)

    async def status(self) -> dict[str, Any]:
        """The body of the answer to a StatusQuery, with that to a LatencyQuery as `latency`."""
        status, latency = messages.StatusQuery(0), messages.LatencyQuery(0)
        return {**await self.answer(status), "latency": await self.answer(latency)}

    async def health(self) -> dict[str, Any]:
        return await self.answer(messages.HealthQuery(0))

    def _status(self, store: dict[str, Any], governor: dict[str, Any]) -> dict[str, Any]:
        return {**store, "socket_problems": self._socket_problems(), "governor": governor}

    def _health(self, store: dict[str, Any], governor: dict[str, Any]) -> dict[str, Any]:
        problems = store["problems"] + governor["problems"] + self._socket_problems()
        return {**store, "problems": problems, "healthy": not problems}


def _limited(figures: Any) -> Any:
    """`figures` with every integer limited to INTEGER_MAX, the largest on the wire. Sums of sizes that clients report
    may exceed 64 bits."""
    match figures:
        case dict():
            return {name: _limited(figure) for name, figure in figures.items()}
        case list():
            return [_limited(figure) for figure in figures]
        case int():
            return min(figures, INTEGER_MAX)
        case _:
            return figures


@dataclass(eq=False, repr=False)
class StatusSession:
    """One reader of the status socket. `_number`: the number of its connection."""

    _number: int
    _uid: int
    _channel: AsyncChannel
    _documents: Documents
    _watchers: Watchers
    _rates: Rates
    _times: RequestTimes

    def __post_init__(self) -> None:
        self._timer = RequestTimer(self._times, 0, f"a reader of uid {self._uid}")
        # Negative, because the numbers of clients are positive.
        self._sender: Sender = (self._uid, -self._number)

    async def run(self) -> None:
        watching: asyncio.Task[None] | None = None
        try:
            async for message, _ in self._channel:
                self._timer.began(message)
                await paced(self._channel, self._rates, self._sender[0], QUERY_COST)
                answer = await self._answer(message)
                self._channel.send(answer)
                self._timer.answered(answer)
                if isinstance(message, messages.Watch) and watching is None:
                    watching = asyncio.create_task(self._send_events())
            if self._channel.failure is not None:
                raise self._channel.failure
        except ProtocolError as error:
            _log.warning("protocol error; status connection closed", why=str(error))
        except (TensordError, OSError) as error:
            _log.info("status connection ended", why=str(error))
        finally:
            if watching is not None:
                watching.cancel()
            self._channel.close()

    async def _answer(self, message: messages.StatusRequest) -> messages.Answer:
        try:
            body = await self._documents.answer(message, self._sender)
            # The figures of entries came in messages, so they fit into messages. The check is skipped, because there
            # may be a thousand entries.
            fits = isinstance(message, messages.EntriesQuery)
            return messages.Document(message.id, body if fits else _limited(body))
        except TensordError as error:
            return messages.Error.of(error, message.id)

    async def _send_events(self) -> None:
        try:
            async with aclosing(self._watchers.events()) as events:
                async for event in events:
                    await self._channel.drained()
                    self._channel.send(event)
        except (TensordError, OSError):
            self._channel.close()
