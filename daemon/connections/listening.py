"""A listening socket that may be replaced by another one while connections are accepted from it.

Owns: the socket that is accepted from now, and the wait for its next connection. Does not own the address (`sockets`),
nor what becomes of a connection (`listener`, `http`).

Accepted sockets are raw and non-blocking. asyncio transports are not used, because a transport that reads loses
descriptors.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

_PAUSE_S: Final = 0.1


class Listening:
    """A non-blocking listening `socket`. One task accepts from it."""

    def __init__(self, listening: socket.socket) -> None:
        self.socket = listening
        self._look = asyncio.Event()

    async def accepted(
        self, failed: Callable[[OSError], object], ready: Callable[[], Awaitable[object]] | None = None
    ) -> AsyncIterator[socket.socket]:
        """The connections as they come.

        From the accept to the caller nothing is awaited: a cancellation there would lose the connection unclosed, as
        one of `loop.sock_accept` does.

        Args:
            failed: told why a connection cannot be accepted: the peer has closed it already, or the machine is out of
                descriptors or memory. It stays in the kernel's queue, and is accepted later.
            ready: awaited once a connection waits, before it is accepted.
        """
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
        loop = asyncio.get_running_loop()
        self._look.clear()
        loop.add_reader(self.socket, self._look.set)
        try:
            await self._look.wait()
        finally:
            loop.remove_reader(self.socket)

    def replace(self, by: socket.socket) -> None:
        """Closes the socket, and accepts from another one from now on. Accepted connections go on."""
        asyncio.get_running_loop().remove_reader(self.socket)
        self.socket.close()
        self.socket = by
        self._look.set()

    @property
    def address(self) -> str:
        """A path, or HOST:PORT."""
        name = self.socket.getsockname()
        if isinstance(name, tuple):
            return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"
        return str(name)
