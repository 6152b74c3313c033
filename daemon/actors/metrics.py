"""The metrics actor: Prometheus text over HTTP, on the sockets that it is given.

Owns: connections, and the little of HTTP that a scraper needs (h11 reads and writes it). Does not own what is said
(daemon/metrics.py) nor the figures.

Everything is limited: connections at once on each socket (more wait in the kernel's queue), a request's size, the time
that a connection may take. One request a connection: a scraper that keeps one open would keep others out. Nothing that
happens here ends the daemon.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import h11

from ...errors import TensordError
from ..logs import logger

CONNECTIONS_MAX: Final = 8
CONNECTION_S_MAX: Final = 10.0
REQUEST_BYTES_MAX: Final = 16 << 10
_PATHS: Final = (b"/", b"/metrics")
_METHODS: Final = (b"GET", b"HEAD")
_READ_BYTES: Final = 16 << 10
# What is read and thrown away of a body that nobody asked for, so that its sender reads the answer first.
_LINGER_BYTES_MAX: Final = 256 << 10
_ACCEPT_PAUSE_S: Final = 0.1
_PLAIN: Final = "text/plain; charset=utf-8"

_log = logger("metrics")


@dataclass(frozen=True, slots=True)
class _Answer:
    status: HTTPStatus
    body: bytes
    content_type: str = _PLAIN


class MetricsServer:
    """Answers with what `status` says, which is the body of a StatusQuery's answer.

    `listening`: non-blocking sockets, Unix or TCP, which stay the caller's.
    """

    def __init__(
        self,
        listening: Sequence[socket.socket],
        status: Callable[[], Awaitable[dict[str, Any]]],
        *,
        connections_max: int = CONNECTIONS_MAX,
        connection_s_max: float = CONNECTION_S_MAX,
    ) -> None:
        self._listening = tuple(listening)
        self._status = status
        self._connections_max = connections_max
        self._connection_s_max = connection_s_max
        self._rendering = asyncio.Lock()

    async def run(self) -> None:
        """Serves until it is cancelled; then ends every connection."""
        _log.info("metrics", at=[_shown(each) for each in self._listening])
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
                    # A connection that was given up already, or no descriptor to be had.
                    _log.warning("cannot accept", why=str(error))
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
            _log.info("connection took too long", connection_s_max=self._connection_s_max)
        except OSError as error:
            _log.info("connection ended", why=str(error))
        except Exception:
            _log.exception("a connection failed")

    def _served(self, accepted: socket.socket, room: asyncio.Semaphore, _: asyncio.Task[None]) -> None:
        """Whatever ended it; also a task that was cancelled before it had begun."""
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
            answer = _refusal(HTTPStatus(error.error_status_hint), str(error))
            whole = False
        headers = [
            ("Content-Type", answer.content_type),
            ("Content-Length", str(len(answer.body))),
            ("Connection", "close"),
        ]
        if answer.status is HTTPStatus.METHOD_NOT_ALLOWED:
            headers.append(("Allow", ", ".join(name.decode() for name in _METHODS)))
        response = h11.Response(status_code=answer.status, reason=answer.status.phrase, headers=headers)
        said = [http.send(response)]
        if method != b"HEAD":
            said.append(http.send(h11.Data(answer.body)))
        said.append(http.send(h11.EndOfMessage()))
        await loop.sock_sendall(peer, b"".join(part for part in said if part))
        if not whole:
            await self._linger(peer)

    async def _linger(self, peer: socket.socket) -> None:
        """Closing with unread bytes would have the kernel throw away the answer at the other end."""
        loop = asyncio.get_running_loop()
        peer.shutdown(socket.SHUT_WR)
        left = _LINGER_BYTES_MAX
        while left > 0 and (read := await loop.sock_recv(peer, _READ_BYTES)):
            left -= len(read)

    async def _answer(self, request: h11.Request) -> _Answer:
        if request.target.partition(b"?")[0] not in _PATHS:
            return _refusal(HTTPStatus.NOT_FOUND, "the metrics are at /metrics")
        if request.method not in _METHODS:
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED, "nothing can be changed here")
        accept = b",".join(value for name, value in request.headers if name == b"accept").decode("latin-1")
        try:
            # One at a time: however many ask, the rest of the daemon gets its turns.
            async with self._rendering:
                body, content_type = await asyncio.to_thread(_rendered, await self._status(), accept)
        except TensordError as error:
            return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        except Exception:
            _log.exception("the metrics cannot be told")
            return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "the daemon's log says why")
        return _Answer(HTTPStatus.OK, body, content_type)


async def _accepted(listening: socket.socket) -> socket.socket:
    """The next connection.

    Not `loop.sock_accept`: cancelled after the connection was accepted, and before its caller runs, it loses the
    connection without closing it.
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


def _rendered(status: dict[str, Any], accept: str) -> tuple[bytes, str]:
    # prometheus_client brings an HTTP server and TLS along: a daemon that nobody scrapes never loads them, and one that
    # starts is not kept from serving by them.
    from .. import metrics

    return metrics.text(status, accept)


def _refusal(status: HTTPStatus, why: str) -> _Answer:
    return _Answer(status, f"{status.value} {status.phrase}: {why}\n".encode())


def _shown(listening: socket.socket) -> str:
    name = listening.getsockname()
    if isinstance(name, tuple):
        return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"
    return str(name)
