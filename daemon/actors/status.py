"""The status actor: the read-only socket. Nothing that arrives there can change anything.

Asks the store on behalf of its readers, and tells watchers what happens; a watcher that does not keep up loses events,
and is told how many.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from ...errors import ProtocolError, TensordError
from ...ipc import messages
from ...ipc.channel import AsyncChannel
from ...ipc.declared import handlers
from ..core.rates import Rates
from ..logs import logger
from .mailbox import Mailbox, Sender
from .messages import GovernorMessage, Happened, Question, StoreMessage
from .pace import paced

INTEGER_MAX: Final = (1 << 64) - 1
QUESTION_COST: Final = 20.0
"""Requests that a question counts for: up to 1,024 entries are told, or all lanes looked at."""
OWN: Final[Sender] = (-1, 0)
"""Who asks on the daemon's own behalf: a sender that takes turns with the uids."""

_log = logger("status")


class Watchers:
    """Everybody who watches, and what they have yet to be told: at most `outbox_max` events each."""

    def __init__(self, outbox_max: int) -> None:
        self._outbox_max = outbox_max
        self._watchers: set[_Watcher] = set()

    def tell(self, happened: Happened) -> None:
        """Tells all watchers. Never blocks."""
        for watcher in self._watchers:
            watcher.tell(happened.body)

    def add(self) -> _Watcher:
        watcher = _Watcher(self._outbox_max)
        self._watchers.add(watcher)
        return watcher

    def remove(self, watcher: _Watcher) -> None:
        self._watchers.discard(watcher)


class _Watcher:
    def __init__(self, outbox_max: int) -> None:
        self._events: deque[dict[str, Any]] = deque()
        self._outbox_max = outbox_max
        self._dropped = 0
        self._arrived = asyncio.Event()

    def tell(self, body: dict[str, Any]) -> None:
        if len(self._events) >= self._outbox_max:
            self._events.popleft()
            self._dropped += 1
        self._events.append(body)
        self._arrived.set()

    async def next(self) -> messages.Event:
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        dropped, self._dropped = self._dropped, 0
        return messages.Event(self._events.popleft(), dropped)


class Documents:
    """What is told of the daemon, put together from what the store and the governor each know."""

    def __init__(self, store: Mailbox[StoreMessage], governor: Mailbox[GovernorMessage]) -> None:
        self._store = store
        self._governor = governor
        together: dict[type[Any], Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]] = {
            messages.StatusQuery: lambda store, governor: {**store, "governor": governor},
            messages.HealthQuery: _health,
        }
        self._together = handlers(messages.DaemonQuery, together)

    async def answer(self, message: messages.StatusRequest, sender: Sender = OWN) -> dict[str, Any]:
        """The body of one answer."""
        if isinstance(message, messages.EntriesQuery):
            return await self._entries(message, sender)
        told = _asked()
        await self._store.tell(Question(message, told), sender)
        if not isinstance(message, messages.DaemonQuery):
            return await told
        governed = _asked()
        await self._governor.tell(Question(message, governed), sender)
        return self._together[type(message)](await told, await governed)

    async def _entries(self, message: messages.EntriesQuery, sender: Sender) -> dict[str, Any]:
        """As many as were asked for, which the store tells by parts; fewer only at the end."""
        rows: list[dict[str, Any]] = []
        after = message.after
        while True:
            told = _asked()
            asked = messages.EntriesQuery(message.id, after, message.count - len(rows), message.namespace)
            await self._store.tell(Question(asked, told), sender)
            part = await told
            rows += part["entries"]
            after = part["behind"]
            if after is None or len(rows) == message.count:
                return {"entries": rows}

    async def status(self) -> dict[str, Any]:
        """What StatusQuery is answered."""
        return await self.answer(messages.StatusQuery(0))


def _health(store: dict[str, Any], governor: dict[str, Any]) -> dict[str, Any]:
    problems = store["problems"] + governor["problems"]
    return {**store, "problems": problems, "healthy": not problems}


def _sayable(figures: Any) -> Any:
    """The same with no integer larger than can be said: sums of what clients claim need not fit into 64 bits."""
    match figures:
        case dict():
            return {name: _sayable(figure) for name, figure in figures.items()}
        case list():
            return [_sayable(figure) for figure in figures]
        case int():
            return min(figures, INTEGER_MAX)
        case _:
            return figures


def _asked() -> asyncio.Future[dict[str, Any]]:
    return asyncio.get_running_loop().create_future()


class StatusSession:
    """One reader of the status socket."""

    def __init__(
        self,
        number: int,
        uid: int,
        channel: AsyncChannel,
        documents: Documents,
        watchers: Watchers,
        rates: Rates,
    ) -> None:
        """`number`: of the connection on the status socket."""
        self._rates = rates
        # Numbers of clients are positive.
        self._sender: Sender = (uid, -number)
        self._channel = channel
        self._documents = documents
        self._watchers = watchers

    async def run(self) -> None:
        """Answers until the reader hangs up."""
        watching: asyncio.Task[None] | None = None
        try:
            async for message, _ in self._channel:
                await paced(self._channel, self._rates, self._sender[0], QUESTION_COST)
                self._channel.send(await self._answer(message))
                if isinstance(message, messages.Watch) and watching is None:
                    watching = asyncio.create_task(self._tell_events())
            if self._channel.failure is not None:
                raise self._channel.failure
        except ProtocolError as error:
            _log.warning("protocol error; status connection closed", why=str(error))
        except (TensordError, OSError) as error:
            _log.info("reader gone", why=str(error))
        finally:
            if watching is not None:
                watching.cancel()
            self._channel.close()

    async def _answer(self, message: messages.StatusRequest) -> messages.Answer:
        try:
            body = await self._documents.answer(message, self._sender)
            # What entries are told by came in messages, as it goes out; and there may be a thousand of them.
            is_sayable = isinstance(message, messages.EntriesQuery)
            return messages.Document(message.id, body if is_sayable else _sayable(body))
        except TensordError as error:
            return messages.Error.of(error, message.id)

    async def _tell_events(self) -> None:
        watcher = self._watchers.add()
        try:
            while True:
                event = await watcher.next()
                await self._channel.drained()
                self._channel.send(event)
        except (TensordError, OSError):
            self._channel.close()
        finally:
            self._watchers.remove(watcher)
