"""A small HTTP server: read-only answers to GET and HEAD on listening sockets.

Owns: the connections, and the part of HTTP that a scraper or a browser needs (h11 parses and formats it). Does not own
the answers (metrics.py, page.py) nor the sockets.

Invariants:
- The number of simultaneous connections on each socket, the size of a request and the duration of a connection are
  limited. Further connections wait in the kernel's queue.
- Each connection serves one request: a connection kept open by one peer would block other peers.
- No error here ends the daemon.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Final

import h11

from ...errors import TensordError
from ..logs import logger

CONNECTIONS_MAX: Final = 8
CONNECTION_S_MAX: Final = 10.0
REQUEST_BYTES_MAX: Final = 16 << 10
_METHODS: Final = (b"GET", b"HEAD")
_READ_BYTES: Final = 16 << 10
# The most bytes of an unwanted request body that are read and discarded, so that its sender can read the answer.
_LINGER_BYTES_MAX: Final = 256 << 10
_ACCEPT_PAUSE_S: Final = 0.1
_PLAIN: Final = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """One answer. `headers`: those besides Content-Type, Content-Length and Connection."""

    status: HTTPStatus
    body: bytes
    content_type: str = _PLAIN
    headers: Sequence[tuple[str, str]] = ()


Route = Callable[[h11.Request], Awaitable[HttpAnswer]]
"""Answers one request. A TensordError becomes status 503 with its text, any other error status 500."""


class HttpServer:
    """Serves `routes`, the answers by path.

    Args:
        what: the name of the served thing, for the log.
        listening: non-blocking sockets, Unix or TCP. The caller still owns and closes them.
        elsewhere: the text of the answer 404: which paths there are.
        guard: returns the refusal of a request, or None for a request that may be answered.
        headers: headers of every answer.
        connections_max: the most connections on each socket.
        connection_s_max: the longest duration of a connection, in seconds.
    """

    def __init__(
        self,
        what: str,
        listening: Sequence[socket.socket],
        routes: Mapping[bytes, Route],
        elsewhere: str,
        *,
        guard: Callable[[h11.Request], HttpAnswer | None] = lambda _: None,
        headers: Sequence[tuple[str, str]] = (),
        connections_max: int = CONNECTIONS_MAX,
        connection_s_max: float = CONNECTION_S_MAX,
    ) -> None:
        self._what = what
        self._log = logger(what)
        self._listening = tuple(listening)
        self._routes = routes
        self._elsewhere = elsewhere
        self._guard = guard
        self._headers = tuple(headers)
        self._connections_max = connections_max
        self._connection_s_max = connection_s_max

    async def run(self) -> None:
        """Serves until it is cancelled. Then it ends every connection. Without a socket it ends at once."""
        if self._listening:
            self._log.info(f"serving {self._what}", at=[_shown(each) for each in self._listening])
        async with asyncio.TaskGroup() as tasks:
            for each in self._listening:
                tasks.create_task(self._accept(each))

    async def _accept(self, listening: socket.socket) -> None:
        room = asyncio.Semaphore(self._connections_max)
        async with asyncio.TaskGroup() as connections:
            while True:
                await room.acquire()
                try:
                    accepted = await _accepted(listening)
                except OSError as error:
                    # The peer has closed the connection already, or the process is out of descriptors.
                    self._log.warning("cannot accept a connection; retrying", why=str(error))
                    room.release()
                    await asyncio.sleep(_ACCEPT_PAUSE_S)
                    continue
                accepted.setblocking(False)
                serving = connections.create_task(self._serve(accepted))
                serving.add_done_callback(partial(self._served, accepted, room))

    async def _serve(self, accepted: socket.socket) -> None:
        try:
            async with asyncio.timeout(self._connection_s_max):
                await self._converse(accepted)
        except TimeoutError:
            self._log.info("connection took too long; closed", connection_s_max=self._connection_s_max)
        except OSError as error:
            self._log.info("connection ended", why=str(error))
        except Exception:
            self._log.exception("a connection failed; closed")

    def _served(self, accepted: socket.socket, room: asyncio.Semaphore, _: asyncio.Task[None]) -> None:
        """Releases a connection, however it ended. A callback, since a task cancelled before it starts runs no code."""
        accepted.close()
        room.release()

    async def _converse(self, peer: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_BYTES_MAX)
        method, whole = b"", True
        try:
            while (event := http.next_event()) is h11.NEED_DATA:
                http.receive_data(await loop.sock_recv(peer, _READ_BYTES))
            if not isinstance(event, h11.Request):
                return
            method = event.method
            answer = await self._answer(event)
            whole = isinstance(http.next_event(), h11.EndOfMessage)
        except h11.RemoteProtocolError as error:
            answer = refusal(HTTPStatus(error.error_status_hint), str(error))
            whole = False
        headers = [
            ("Content-Type", answer.content_type),
            ("Content-Length", str(len(answer.body))),
            ("Connection", "close"),
            *self._headers,
            *answer.headers,
        ]
        if answer.status is HTTPStatus.METHOD_NOT_ALLOWED:
            headers.append(("Allow", ", ".join(name.decode() for name in _METHODS)))
        response = h11.Response(status_code=answer.status, reason=answer.status.phrase, headers=headers)
        parts = [http.send(response)]
        if method != b"HEAD":
            parts.append(http.send(h11.Data(answer.body)))
        parts.append(http.send(h11.EndOfMessage()))
        await loop.sock_sendall(peer, b"".join(part for part in parts if part))
        if not whole:
            await self._linger(peer)

    async def _linger(self, peer: socket.socket) -> None:
        """Reads the rest of the request before the socket is closed.

        If a socket is closed with unread bytes, the kernel resets the connection and the peer may lose the answer.
        """
        loop = asyncio.get_running_loop()
        peer.shutdown(socket.SHUT_WR)
        left = _LINGER_BYTES_MAX
        while left > 0 and (read := await loop.sock_recv(peer, _READ_BYTES)):
            left -= len(read)

    async def _answer(self, request: h11.Request) -> HttpAnswer:
        refused = self._guard(request)
        if refused is not None:
            return refused
        route = self._routes.get(request.target.partition(b"?")[0])
        if route is None:
            return refusal(HTTPStatus.NOT_FOUND, self._elsewhere)
        if request.method not in _METHODS:
            return refusal(HTTPStatus.METHOD_NOT_ALLOWED, "this socket is read-only")
        try:
            return await route(request)
        except TensordError as error:
            return refusal(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        except Exception:
            self._log.exception(
                "cannot answer an HTTP request; the peer gets status 500", target=request.target.decode()
            )
            return refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "the request failed; see the daemon's log")


def refusal(status: HTTPStatus, why: str) -> HttpAnswer:
    """An answer of one line of text."""
    return HttpAnswer(status, f"{status.value} {status.phrase}: {why}\n".encode())


async def _accepted(listening: socket.socket) -> socket.socket:
    """Waits for the next connection and returns its socket.

    `loop.sock_accept` is not used: if it is cancelled after the connection was accepted and before the caller runs, the
    connection is lost without being closed.
    """
    loop = asyncio.get_running_loop()
    while True:
        with suppress(BlockingIOError):
            return listening.accept()[0]
        readable = asyncio.Event()
        loop.add_reader(listening, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(listening)


def _shown(listening: socket.socket) -> str:
    name = listening.getsockname()
    if isinstance(name, tuple):
        return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"
    return str(name)
