"""A small HTTP server: read-only answers to GET and HEAD on listening sockets.

Owns: the connections, and the part of HTTP that a scraper or a browser needs (h11 parses and formats it). Does not own
the answers (pages.py) nor the sockets.

Invariants:
- The number of simultaneous connections on each socket, the size of a request and the duration of a connection are
  limited. At the limit the oldest connection that has not sent its request ends for the next one: so connections
  without a request keep no health check out.
- Each connection serves one request: a connection kept open by one peer would block other peers.
- No error here ends the daemon.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from http import HTTPStatus
from typing import Final

import h11

from ...errors import TensordError
from ..connections.listener import Listening
from ..process.logs import Repeats, logger

CONNECTIONS_MAX: Final = 32
"""The most connections on one socket. A browser opens up to six, some of them in advance."""
CONNECTION_S_MAX: Final = 10.0
REQUEST_BYTES_MAX: Final = 16 << 10
_METHODS: Final = (b"GET", b"HEAD")
_READ_BYTES: Final = 16 << 10
_PLAIN: Final = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: HTTPStatus
    body: bytes
    content_type: str = _PLAIN


Route = Callable[[h11.Request], Awaitable[HttpAnswer]]
"""Answers one request. A TensordError becomes status 503 with its text, any other error status 500."""


@dataclass(eq=False, repr=False)
class HttpServer:
    """Serves `routes`, the answers by path.

    Args:
        what: the name of the served thing, for the log.
        listening: non-blocking sockets, Unix or TCP. The caller still owns and closes them.
        elsewhere: the text of the answer 404: which paths there are.
        guard: returns the refusal of a request, or None for a request that may be answered.
        headers: headers of every answer.
    """

    _what: str
    _listening: Sequence[Listening]
    _routes: Mapping[bytes, Route]
    _elsewhere: str
    _: KW_ONLY
    guard: Callable[[h11.Request], HttpAnswer | None] = lambda _: None
    headers: Sequence[tuple[str, str]] = ()

    def __post_init__(self) -> None:
        self._log = logger(self._what)
        self._logged = Repeats()

    async def run(self) -> None:
        """Serves until it is cancelled. Then it ends every connection. Without a socket it ends at once."""
        if self._listening:
            self._log.info(f"serving {self._what}", at=[each.address for each in self._listening])
        async with asyncio.TaskGroup() as tasks:
            for each in self._listening:
                tasks.create_task(self._accept(each))

    async def _accept(self, listening: Listening) -> None:
        loop = asyncio.get_running_loop()
        peers: dict[socket.socket, asyncio.Task[None]] = {}
        silent: dict[socket.socket, None] = {}  # those without a request yet, the oldest first

        async def make_room() -> None:
            while len(peers) >= CONNECTIONS_MAX:
                if silent:
                    peers[next(iter(silent))].cancel()
                await asyncio.wait(peers.values(), return_when=asyncio.FIRST_COMPLETED)

        def failed(error: OSError) -> None:
            if self._logged.is_new(error.errno, loop.time()):
                self._log.warning("cannot accept a connection; retrying", why=str(error))

        async with asyncio.TaskGroup() as connections:
            async for accepted in listening.accepted(failed, make_room):

                def ended(_: asyncio.Task[None], peer: socket.socket = accepted) -> None:
                    """However it ended: a task that is cancelled before it starts runs no code."""
                    peer.close()
                    del peers[peer]
                    silent.pop(peer, None)

                silent[accepted] = None
                peers[accepted] = connections.create_task(self._serve(accepted, silent))
                peers[accepted].add_done_callback(ended)

    async def _serve(self, peer: socket.socket, silent: dict[socket.socket, None]) -> None:
        try:
            async with asyncio.timeout(CONNECTION_S_MAX):
                await self._converse(peer, silent)
        except TimeoutError:
            self._log.info("connection took too long; closed", connection_s_max=CONNECTION_S_MAX)
        except OSError as error:
            self._log.info("connection ended", why=str(error))
        except Exception:
            self._log.exception("a connection failed; closed")

    async def _converse(self, peer: socket.socket, silent: dict[socket.socket, None]) -> None:
        loop = asyncio.get_running_loop()
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_BYTES_MAX)
        method = b""
        try:
            while (event := http.next_event()) is h11.NEED_DATA:
                http.receive_data(await loop.sock_recv(peer, _READ_BYTES))
            if not isinstance(event, h11.Request):
                return
            del silent[peer]
            method = event.method
            answer = await self._answer(event)
        except h11.RemoteProtocolError as error:
            answer = refusal(HTTPStatus(error.error_status_hint), str(error))
        about = {"Content-Type": answer.content_type, "Content-Length": str(len(answer.body)), "Connection": "close"}
        headers = [*about.items(), *self.headers]
        if answer.status is HTTPStatus.METHOD_NOT_ALLOWED:
            headers.append(("Allow", ", ".join(name.decode() for name in _METHODS)))
        response = h11.Response(status_code=answer.status, reason=answer.status.phrase, headers=headers)
        said = http.send(response) or b""
        await loop.sock_sendall(peer, said if method == b"HEAD" else said + answer.body)

    async def _answer(self, request: h11.Request) -> HttpAnswer:
        refused = self.guard(request)
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
            target = request.target.decode()
            self._log.exception("cannot answer an HTTP request; the peer gets status 500", target=target)
            return refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "the request failed; see the daemon's log")


def lines(status: HTTPStatus, *told: str) -> HttpAnswer:
    return HttpAnswer(status, "".join(f"{each}\n" for each in told).encode())


def refusal(status: HTTPStatus, why: str) -> HttpAnswer:
    return lines(status, f"{status.value} {status.phrase}: {why}")
