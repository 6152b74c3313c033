"""A listening socket, and the actor that accepts its connections and starts a session for each.

Owns: the socket that is accepted from now, the wait for its next connection, and the session tasks. Does not own the
address (`sockets`), the limits (`Quotas`), nor the sessions' work. Accepted sockets are raw, since an asyncio transport
that reads loses descriptors. Invariant: at most as many sessions run, in total and for each uid, as the quotas allow.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Final

from ...errors import LimitReached, TensordError
from ...ipc.messages import control as messages
from ...ipc.wire.descriptors import lacks_descriptor, no_descriptor, peer_of
from ...ipc.wire.frames import pack
from ..claims.quotas import Kind, Quotas
from ..process.logs import Repeats, logger

_PAUSE_S: Final = 0.1
_log = logger("listener")


class Listening:
    """A non-blocking listening `socket`. One task accepts from it."""

    def __init__(self, listening: socket.socket) -> None:
        self.socket = listening
        self._look = asyncio.Event()

    async def accepted(
        self, failed: Callable[[OSError], object], ready: Callable[[], Awaitable[object]] | None = None
    ) -> AsyncIterator[socket.socket]:
        """The connections as they come. From the accept to the caller nothing is awaited: a cancellation there would
        lose the connection unclosed. `failed`: told why a connection cannot be accepted; it stays in the kernel's
        queue, and is accepted later. `ready`: awaited once a connection waits, before it is accepted."""
        while True:
            await self._readable()
            if ready is not None:
                await ready()
            try:
                accepted = self.socket.accept()[0]
            except BlockingIOError:
                continue
            except OSError as error:
                failed(error)
                await asyncio.sleep(_PAUSE_S)
                continue
            accepted.setblocking(False)
            yield accepted

    async def _readable(self) -> None:
        """Returns once a connection waits, or the socket was replaced. An accept may find none all the same."""
        self._look.clear()
        asyncio.get_running_loop().add_reader(self.socket, self._look.set)
        try:
            await self._look.wait()
        finally:
            asyncio.get_running_loop().remove_reader(self.socket)

    def replace(self, by: socket.socket) -> None:
        """Closes the socket, and accepts from another one from now on. Accepted connections go on."""
        asyncio.get_running_loop().remove_reader(self.socket)
        self.socket.close()
        self.socket = by
        self._look.set()

    @property
    def address(self) -> str:
        name = self.socket.getsockname()
        if isinstance(name, tuple):
            return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"
        return str(name)


@dataclass(eq=False, repr=False)
class Listener:
    """Runs `serve` for each connection on `listening`. `quotas` limit the simultaneous connections. A peer for which
    the process has no descriptor waits in the kernel's queue."""

    _listening: Listening
    _kind: Kind
    _quotas: Quotas
    _serve: Callable[[int, socket.socket], Coroutine[None, None, None]]

    def __post_init__(self) -> None:
        self._numbers = count(1)
        self._logged = Repeats()
        self.sessions: dict[asyncio.Task[None], int] = {}
        """The uid of each connection's peer."""
        self._accepting: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Accepts connections until `stop_accepting`. Ends every session when it is cancelled."""
        self._accepting = accepting = asyncio.create_task(self._accept())
        try:
            await asyncio.wait([accepting])
            if not accepting.cancelled():
                accepting.result()
            await asyncio.get_running_loop().create_future()
        finally:
            accepting.cancel()
            for task in self.sessions:
                task.cancel()
            await asyncio.gather(*self.sessions, return_exceptions=True)

    def stop_accepting(self) -> None:
        """Leaves new connections in the kernel's queue. The sessions go on."""
        if self._accepting is not None:
            self._accepting.cancel()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        async for accepted in self._listening.accepted(self._failed):
            peer = peer_of(accepted)
            try:
                self._admit(peer.uid)
            except LimitReached as refusal:
                if self._logged.is_new((peer.uid, peer.pid), loop.time()):
                    _log.warning("connection refused", pid=peer.pid, why=str(refusal))
                with suppress(OSError, TensordError):
                    accepted.send(pack(messages.Error.of(refusal)))
                accepted.close()
                continue
            task = asyncio.create_task(self._serve(next(self._numbers), accepted))
            self.sessions[task] = peer.uid
            task.add_done_callback(self._ended)

    def _failed(self, error: OSError) -> None:
        why = str(no_descriptor()) if lacks_descriptor(error) else str(error)
        if self._logged.is_new(error.errno, asyncio.get_running_loop().time()):
            _log.error("cannot accept a connection; retrying", why=why)

    def _admit(self, uid: int) -> None:
        rule = self._quotas.rules[self._kind]
        if len(self.sessions) >= rule.total:
            self._quotas.refusals[self._kind] += 1
            raise LimitReached(
                f"{rule.limit} is {rule.total}, and that many connections are open: raise it, or close connections"
            )
        self._quotas.admit(self._kind, uid, sum(each == uid for each in self.sessions.values()))

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self.sessions[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a session failed; its connection is closed", exc_info=error)
