"""A session actor: serves the connection of one client on the control socket.

Owns: the channel of one connection, the client's outgoing messages, the wait for the rate of a uid, and the begin of
open requests. Does not own the protocol (`ipc.wire.connection`), nor the meaning of a request.

Invariants: the store and the governor get exactly one ClientLeft for each Joined. At most OUTBOX_MAX messages wait for
the client; a client that does not read is disconnected.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from msgspec.structs import replace

from ...errors import ProtocolError, TensordError
from ...ipc.messages import control as messages
from ...ipc.messages.declared import Answer, Request, id_of
from ...ipc.wire.channel import AsyncChannel
from ...ipc.wire.descriptors import Peer
from ..actors.mailbox import Mailbox, Sender
from ..actors.messages import OUTBOX_MAX, Deliver, GovernorMessage, HangUp, Joined, MemoryRequest, StoreMessage
from ..claims.quotas import Rates
from ..forms.events import ClientLeft, Received
from ..governor.forms.events import Governed
from ..process.logs import Repeats, logger
from ..reports.counters import RequestTimes

HELLO_S_MAX: Final = 5.0
"""The time in which a new connection must send Hello."""
_log = logger("session")
_logged = Repeats()
_TURN_MESSAGES = 64


class RequestTimer:
    """Measures the requests of one connection, from their arrival until the connection has their answer.

    `client`: 0 for a reader of the status socket. `name`: the client's, once it is known.
    """

    def __init__(self, times: RequestTimes, client: int, name: str = "") -> None:
        self.name = name
        self._times = times
        self._client = client
        self._open: dict[int | None, tuple[type[Request], int, float]] = {}

    def began(self, request: Request) -> None:
        """A request has arrived. One without an answer is not measured."""
        if request.answered_by is not None:
            size_bytes = sum(request.sizes) if isinstance(request, messages.AskForGrants) else 0
            self._open[id_of(request)] = type(request), size_bytes, time.monotonic()

    def answered(self, answer: Answer) -> None:
        """The connection has an answer. Pushes, and the second answer to a claim, are ignored."""
        number = id_of(answer)
        kind, size_bytes, began = self._open.get(number, (Request, 0, 0.0))
        expected: Any = kind.answered_by
        if expected is not None and isinstance(answer, (expected, messages.Error)):
            del self._open[number]
            about = {"payload_bytes": size_bytes, "client": self._client, "name": self.name, "unix_s": time.time()}
            self._times.took(kind.__name__, time.monotonic() - began, **about)


async def paced(channel: AsyncChannel, rates: Rates, uid: int, cost: float = 1.0) -> None:
    """Returns once a request of the uid may be processed. The request counts `cost` against the rate. The reader of a
    connection waits here, so the sender gets backpressure. Does not wait if the channel is closed."""
    delay_s = rates.delay_s(uid, asyncio.get_running_loop().time(), cost)
    if delay_s and not channel.closed:
        await asyncio.sleep(delay_s)


@dataclass(eq=False, repr=False)
class Session:
    """Serves the client with the number `client` on `channel`, until one side closes the connection."""

    _client: int
    _channel: AsyncChannel
    _peer: Peer
    _store: Mailbox[StoreMessage]
    _governor: Mailbox[GovernorMessage]
    _rates: Rates
    _times: RequestTimes
    _welcome: messages.Welcome
    """For any Hello: without its id and version."""

    def __post_init__(self) -> None:
        self.inbox: Mailbox[Deliver | HangUp] = Mailbox(OUTBOX_MAX)
        self._sender: Sender = (self._peer.uid, self._client)
        self._who = {"client": self._client, "pid": self._peer.pid}
        self._timer = RequestTimer(self._times, self._client)
        self._joined = False
        self._passing = False
        self._query: int | None = None
        self._answered = asyncio.Event()

    async def run(self) -> None:
        sending = asyncio.create_task(self._send_messages())
        try:
            if await self._greet():
                async for message, fds in self._channel:
                    self._passing = True
                    self._timer.began(message)
                    if self._rates.limits(self._peer.uid):
                        await paced(self._channel, self._rates, self._peer.uid)
                    await self._pass_on(message, fds)
                    self._passing = False
            if self._channel.failure is not None:
                raise self._channel.failure
        except ProtocolError as error:
            if self._should_log("protocol error", type(error)):
                _log.warning("protocol error; connection closed", **self._who, why=str(error))
        except (TensordError, OSError) as error:
            if self._should_log("ended", type(error)):
                _log.info("connection ended", **self._who, why=str(error))
        finally:
            sending.cancel()
            self._channel.close()
            for delivery in self.inbox.close():
                if isinstance(delivery, Deliver):
                    _close(delivery.close)
            if self._joined:
                self._rates.left(self._peer.uid)
                self._store.tell_now(ClientLeft(self._client), self._sender)
                self._governor.tell_now(ClientLeft(self._client), self._sender)

    def stop_reading(self) -> None:
        """Handles the messages that have arrived, and reads no more."""
        self._channel.stop_reading()

    @property
    def settled(self) -> bool:
        """True if all messages that arrived are passed on, and all answers given to this session are sent."""
        channel = self._channel
        return channel.closed or not (self._passing or channel.unconsumed or len(self.inbox) or channel.unsent_bytes)

    async def _greet(self) -> bool:
        try:
            async with asyncio.timeout(HELLO_S_MAX):
                async for message, _ in self._channel:
                    self._timer.name = message.name
                    said = message.name, message.pid, message.fence
                    joined = Joined(self._client, self._peer, *said, self.inbox, message.version)
                    await self._store.tell(joined, self._sender)
                    self._governor.tell_now(joined, self._sender)
                    # From here on the store and the governor must get a ClientLeft, however the connection ends.
                    self._joined = True
                    self._rates.joined(self._peer.uid)
                    # Its version is one that the connection has accepted.
                    self._channel.send(replace(self._welcome, id=message.id, protocol=message.protocol))
                    return True
        except TimeoutError:
            if self._should_log("no Hello"):
                _log.warning("no Hello in time; connection closed", **self._who, hello_s_max=HELLO_S_MAX)
        return False

    def _should_log(self, *what: object) -> bool:
        """True if the event is to be logged. A refused client retries every second."""
        return _logged.is_new((self._peer.uid, self._peer.pid, *what), asyncio.get_running_loop().time())

    async def _pass_on(self, message: messages.ControlRequest, fds: Sequence[int]) -> None:
        """Hands a message to the part that its base class names. The protocol allows no second Hello."""
        match message:
            case messages.StoreRequest():
                await self._store.tell(Received(self._client, message), self._sender)
            case messages.GovernorRequest() | messages.GaugeRequest():
                await self._governor.tell(Governed(self._client, message), self._sender)
            case messages.AttachmentRequest():
                await self._store.tell(MemoryRequest(self._client, message, fds), self._sender)
            case messages.PrefixRequest():
                # One prefix query at a time: a client that sends many long queries waits only for its own.
                self._answered.clear()
                self._query = message.id
                await self._store.tell(Received(self._client, message), self._sender)
                await self._answered.wait()

    async def _send_messages(self) -> None:
        while True:
            await self.inbox.wait()
            deliveries = self.inbox.take(_TURN_MESSAGES)
            with self._channel.batched():
                for delivery in deliveries:
                    if isinstance(delivery, HangUp):
                        break
                    self._deliver(delivery)
            if isinstance(delivery, HangUp):
                _log.warning("connection closed by the daemon", **self._who, why=delivery.reason)
                self._channel.close()
                self._answered.set()
                return

    def _deliver(self, delivery: Deliver) -> None:
        message = delivery.message
        number = id_of(message)
        try:
            self._channel.send(message, fds=delivery.fds)
        except TensordError as error:
            _log.info("answer not delivered", **self._who, message=type(message).__name__, why=str(error))
            if number is not None and not isinstance(message, messages.Error):
                with suppress(TensordError):
                    self._channel.send(messages.Error.of(error, number))
        finally:
            _close(delivery.close)
            self._timer.answered(message)
            if self._query is not None and number == self._query:
                # `_pass_on` goes on, even if the answer could not be sent.
                self._query = None
                self._answered.set()


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
