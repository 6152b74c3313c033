"""A session actor: one client's connection.

Turns what the client says into messages for the store, and what the store says into bytes. Who may say what when is
the connection's to know (ipc), what it means the store's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from tensord import __version__

from ...errors import ProtocolError, TensordError
from ...ipc import messages
from ...ipc.channel import AsyncChannel
from ...ipc.declared import handlers, id_of
from ...ipc.peer import Peer
from ...ipc.schema import PROTOCOL_VERSION, ClientLimits
from ..core.rates import Rates
from ..logs import logger
from .mailbox import Mailbox, Sender
from .messages import (
    Deliver,
    Governed,
    GovernorMessage,
    HangUp,
    Joined,
    Left,
    MemoryRequest,
    Requested,
    SessionInbox,
    StoreMessage,
)
from .pace import paced
from .repeats import Repeats

_log = logger("session")
_said = Repeats()
_TURN_MESSAGES = 64


class Session:
    """Client number `client`, on `channel`, until either side hangs up."""

    def __init__(
        self,
        client: int,
        channel: AsyncChannel,
        peer: Peer,
        store: Mailbox[StoreMessage],
        governor: Mailbox[GovernorMessage],
        rates: Rates,
        *,
        welcome: Callable[[int], messages.Welcome],
        outbox_max: int,
        hello_s_max: float,
    ) -> None:
        self.inbox: SessionInbox = Mailbox(outbox_max)
        self._client = client
        self._channel = channel
        self._peer = peer
        self._sender: Sender = (peer.uid, client)
        self._store = store
        self._governor = governor
        self._rates = rates
        self._welcome = welcome
        self._hello_s_max = hello_s_max
        self._joined = False
        self._passing = False
        self._query: int | None = None
        self._answered = asyncio.Event()

    async def run(self) -> None:
        """Serves until the connection is closed, by whom- and whatever."""
        speaking = asyncio.create_task(self._speak())
        try:
            if await self._greet():
                async for message, fds in self._channel:
                    self._passing = True
                    if self._rates.limits(self._peer.uid):
                        await paced(self._channel, self._rates, self._peer.uid)
                    await _ROUTES[type(message)](self, message, fds)
                    self._passing = False
            if self._channel.failure is not None:
                raise self._channel.failure
        except ProtocolError as error:
            if self._is_new("protocol error", type(error)):
                said = {"client": self._client, "pid": self._peer.pid, "why": str(error)}
                _log.warning("protocol error; connection closed", **said)
        except (TensordError, OSError) as error:
            if self._is_new("ended", type(error)):
                _log.info("connection ended", client=self._client, pid=self._peer.pid, why=str(error))
        finally:
            speaking.cancel()
            self._channel.close()
            self._return_descriptors()
            if self._joined:
                self._rates.left(self._peer.uid)
                self._store.tell_now(Left(self._client), self._sender)
                self._governor.tell_now(Left(self._client), self._sender)

    def hear_no_more(self) -> None:
        """Takes up what has arrived, and nothing after it."""
        self._channel.stop_reading()

    @property
    def settled(self) -> bool:
        """Whether all that has arrived is passed on, and all answers given here are sent."""
        channel = self._channel
        return channel.closed or not (self._passing or channel.untaken or len(self.inbox) or channel.unsent_bytes)

    async def _greet(self) -> bool:
        try:
            async with asyncio.timeout(self._hello_s_max):
                async for message, _ in self._channel:
                    joined = Joined(self._client, self._peer, message.name, message.pid, message.fence, self.inbox)
                    await self._store.tell(joined, self._sender)
                    self._governor.tell_now(joined, self._sender)
                    # From here on both must hear of its end, however that comes about.
                    self._joined = True
                    self._rates.joined(self._peer.uid)
                    self._channel.send(self._welcome(message.id))
                    return True
        except TimeoutError:
            if self._is_new("no Hello"):
                _log.warning("no Hello", client=self._client, pid=self._peer.pid, hello_s_max=self._hello_s_max)
        return False

    def _is_new(self, *what: object) -> bool:
        """Whether it is to be logged. A client that is turned away tries again every second."""
        return _said.is_new((self._peer.uid, self._peer.pid, *what), asyncio.get_running_loop().time())

    # ---- where each message goes, by the base with which it is declared

    async def _greeted(self, message: messages.GreetingRequest, fds: Sequence[int]) -> None:
        """Nothing is left to do: `_greet` has taken the Hello, and the connection allows no other."""

    async def _attach(self, message: messages.AttachmentRequest, fds: Sequence[int]) -> None:
        await self._store.tell(MemoryRequest(self._client, message, fds), self._sender)

    async def _ask_store(self, message: messages.StoreRequest, fds: Sequence[int]) -> None:
        await self._store.tell(Requested(self._client, message), self._sender)

    async def _match(self, message: messages.PrefixRequest, fds: Sequence[int]) -> None:
        # One at a time: who asks for many long ones waits for their own, and nobody else does.
        self._answered.clear()
        self._query = id_of(message)
        await self._store.tell(Requested(self._client, message), self._sender)
        await self._answered.wait()

    async def _ask_governor(
        self, message: messages.GovernorRequest | messages.GaugeRequest, fds: Sequence[int]
    ) -> None:
        await self._governor.tell(Governed(self._client, message), self._sender)

    async def _speak(self) -> None:
        while True:
            words = await self.inbox.take(_TURN_MESSAGES)
            with self._channel.together():
                for word in words:
                    if isinstance(word, HangUp):
                        break
                    self._deliver(word)
            if isinstance(word, HangUp):
                _log.warning("client hung up on", client=self._client, pid=self._peer.pid, why=word.reason)
                self._channel.close()
                self._answered.set()
                return

    def _deliver(self, word: Deliver) -> None:
        message = word.message
        try:
            self._channel.send(message, fds=word.fds)
        except TensordError as error:
            kind = type(message).__name__
            _log.info("not delivered", client=self._client, message=kind, why=str(error))
            self._excuse(message, error)
        finally:
            _close(word.close)
            self._settle(message)

    def _settle(self, message: messages.Answer) -> None:
        """Whether or not it could be sent: an answer to the query that is waited for."""
        if self._query is not None and id_of(message) == self._query:
            self._query = None
            self._answered.set()

    def _excuse(self, message: messages.Answer, error: TensordError) -> None:
        """Whoever waits for an answer that cannot be sent is told why."""
        number = id_of(message)
        if number is None or isinstance(message, messages.Error):
            return
        with suppress(TensordError):
            self._channel.send(messages.Error.of(error, number))

    def _return_descriptors(self) -> None:
        for word in self.inbox.close():
            if isinstance(word, Deliver):
                _close(word.close)


_BY_BASE: Final[dict[type[Any], Callable[[Session, Any, Sequence[int]], Awaitable[None]]]] = {
    messages.GreetingRequest: Session._greeted,
    messages.AttachmentRequest: Session._attach,
    messages.StoreRequest: Session._ask_store,
    messages.PrefixRequest: Session._match,
    messages.GovernorRequest: Session._ask_governor,
    messages.GaugeRequest: Session._ask_governor,
}
_ROUTES: Final = handlers(messages.ControlRequest, _BY_BASE)


def welcome_for(instance: str, epoch: int, limits: ClientLimits) -> Callable[[int], messages.Welcome]:
    """Makes the answer to Hello."""
    return lambda request: messages.Welcome(request, PROTOCOL_VERSION, __version__, instance, epoch, limits)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
