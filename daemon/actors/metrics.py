"""The metrics actor: serves Prometheus text and health checks over HTTP on the given sockets.

Owns: the connections, the part of HTTP that a scraper needs (h11 parses and formats it), and the answers to health
checks. Does not own the text of the metrics (daemon/metrics.py) nor the figures.

Invariants:
- The number of simultaneous connections on each socket, the size of a request and the duration of a connection are
  limited. Further connections wait in the kernel's queue.
- Each connection serves one request: a connection kept open by one scraper would block other scrapers.
- No error here ends the daemon.
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

from ...errors import DaemonUnavailable, TensordError
from ..logs import logger

CONNECTIONS_MAX: Final = 8
CONNECTION_S_MAX: Final = 10.0
REQUEST_BYTES_MAX: Final = 16 << 10
ANSWER_S_MAX: Final = 5.0
"""The most seconds that the daemon's actors may take for the answer to a health check."""
_METHODS: Final = (b"GET", b"HEAD")
_READ_BYTES: Final = 16 << 10
# The most bytes of an unwanted request body that are read and discarded, so that its sender can read the answer.
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
    """Serves `/metrics`, `/healthz` and `/readyz`.

    Args:
        listening: non-blocking sockets, Unix or TCP. The caller still owns and closes them.
        status: returns the body of the answer to a StatusQuery.
        health: returns the body of the answer to a HealthQuery.
        connections_max: the most connections on each socket.
        connection_s_max: the longest duration of a connection, in seconds.
        answer_s_max: the longest wait of a health check for `health`, in seconds.
    """

    def __init__(
        self,
        listening: Sequence[socket.socket],
        status: Callable[[], Awaitable[dict[str, Any]]],
        health: Callable[[], Awaitable[dict[str, Any]]],
        *,
        connections_max: int = CONNECTIONS_MAX,
        connection_s_max: float = CONNECTION_S_MAX,
        answer_s_max: float = ANSWER_S_MAX,
    ) -> None:
        self._listening = tuple(listening)
        self._status = status
        self._health = health
        self._connections_max = connections_max
        self._connection_s_max = connection_s_max
        self._answer_s_max = answer_s_max
        self._answers = {
            b"/": self._metrics,
            b"/metrics": self._metrics,
            b"/healthz": self._healthz,
            b"/readyz": self._readyz,
        }
        self._rendering = asyncio.Lock()

    async def run(self) -> None:
        """Serves until it is cancelled. Then it ends every connection."""
        _log.info("serving metrics", at=[_shown(each) for each in self._listening])
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
                    _log.warning("cannot accept a connection; retrying", why=str(error))
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
            _log.info("connection took too long; closed", connection_s_max=self._connection_s_max)
        except OSError as error:
            _log.info("connection ended", why=str(error))
        except Exception:
            _log.exception("a connection failed; closed")

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

    async def _answer(self, request: h11.Request) -> _Answer:
        answer = self._answers.get(request.target.partition(b"?")[0])
        if answer is None:
            return _refusal(HTTPStatus.NOT_FOUND, "the metrics are at /metrics; health is at /healthz and /readyz")
        if request.method not in _METHODS:
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED, "this socket is read-only")
        try:
            return await answer(request)
        except TensordError as error:
            return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        except Exception:
            _log.exception("cannot answer an HTTP request; the peer gets status 500", target=request.target.decode())
            return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "the request failed; see the daemon's log")

    async def _metrics(self, request: h11.Request) -> _Answer:
        accept = b",".join(value for name, value in request.headers if name == b"accept").decode("latin-1")
        # One at a time, so that many scrapers do not slow the rest of the daemon.
        async with self._rendering:
            body, content_type = await asyncio.to_thread(_rendered, await self._status(), accept)
        return _Answer(HTTPStatus.OK, body, content_type)

    async def _healthz(self, request: h11.Request) -> _Answer:
        """200 if the daemon answers in time. Its problems are listed only: a restart mends none of them."""
        return _lines(HTTPStatus.OK, ["ok", *await self._problems()])

    async def _readyz(self, request: h11.Request) -> _Answer:
        """200 if the daemon has no problem, as in `tensorctl health`; else 503 and the problems."""
        problems = await self._problems()
        return _lines(HTTPStatus.SERVICE_UNAVAILABLE, problems) if problems else _lines(HTTPStatus.OK, ["ready"])

    async def _problems(self) -> list[str]:
        try:
            async with asyncio.timeout(self._answer_s_max):
                return list((await self._health())["problems"])
        except TimeoutError:
            raise DaemonUnavailable(f"the daemon did not answer within {self._answer_s_max:g} s") from None


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


def _rendered(status: dict[str, Any], accept: str) -> tuple[bytes, str]:
    # Imported here because prometheus_client also imports an HTTP server and TLS. A daemon without scrapers never loads
    # them, and they do not delay the start.
    from prometheus_client import PROCESS_COLLECTOR

    from .. import metrics

    return metrics.text(status, accept, PROCESS_COLLECTOR.collect())


def _lines(status: HTTPStatus, lines: Sequence[str]) -> _Answer:
    return _Answer(status, "".join(f"{each}\n" for each in lines).encode())


def _refusal(status: HTTPStatus, why: str) -> _Answer:
    return _Answer(status, f"{status.value} {status.phrase}: {why}\n".encode())


def _shown(listening: socket.socket) -> str:
    name = listening.getsockname()
    if isinstance(name, tuple):
        return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"
    return str(name)
