"""A small HTTP server: read-only answers to GET and HEAD on listening sockets.

Owns: the connections, and the part of HTTP that a scraper or a browser needs (h11 parses and formats it). Does not own
the answers (metrics.py, page.py) nor the sockets.

Invariants:
- The number of simultaneous connections on each socket, the size of a request and the duration of a connection are
  limited. Further connections wait in the kernel's queue until one has ended. One that makes the server wait ends for
  them: so connections without a request keep no health check out.
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
from operator import itemgetter
from typing import Final

import h11

from ...errors import TensordError
from ..connections.listening import Listening
from ..connections.repeats import Repeats
from ..process.logs import logger

CONNECTIONS_MAX: Final = 64
CONNECTION_S_MAX: Final = 10.0
GRACE_S: Final = 0.25
"""How long a connection may make the server wait for a request, or for a part of an answer to be taken, while others
wait for its place."""
REQUEST_BYTES_MAX: Final = 16 << 10
_METHODS: Final = (b"GET", b"HEAD")
_READ_BYTES: Final = 16 << 10
_WRITE_BYTES: Final = 64 << 10
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


class _Peer:
    """A connection. `waits_since`: since when the server has waited for it; None while its answer is made."""

    def __init__(self, accepted: socket.socket, now: float) -> None:
        self.socket = accepted
        self.waits_since: float | None = now
        self.task: asyncio.Task[None] | None = None


class _Peers:
    """The connections of one listening socket, at most `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: set[_Peer] = set()
        self._changed = asyncio.Event()

    async def room(self) -> None:
        """Returns once there is room for one more."""
        loop = asyncio.get_running_loop()
        while len(self._open) >= self._most:
            waiting = [(peer.waits_since, peer) for peer in self._open if peer.waits_since is not None]
            since, peer = min(waiting, key=itemgetter(0), default=(None, None))
            left_s = None if since is None else since + GRACE_S - loop.time()
            if left_s is not None and left_s <= 0:
                assert peer is not None and peer.task is not None
                peer.task.cancel()
                left_s = None
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()

    def add(self, peer: _Peer, task: asyncio.Task[None]) -> None:
        peer.task = task
        self._open.add(peer)
        task.add_done_callback(partial(self._ended, peer))

    def answered(self, peer: _Peer) -> None:
        """The server waits for the peer again."""
        peer.waits_since = asyncio.get_running_loop().time()
        self._changed.set()

    def _ended(self, peer: _Peer, _: asyncio.Task[None]) -> None:
        """However it ended. A callback, since a task cancelled before it starts runs no code."""
        peer.socket.close()
        self._open.discard(peer)
        self._changed.set()


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
        listening: Sequence[Listening],
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
        self._logged = Repeats()
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
            self._log.info(f"serving {self._what}", at=[each.address for each in self._listening])
        async with asyncio.TaskGroup() as tasks:
            for each in self._listening:
                tasks.create_task(self._accept(each))

    async def _accept(self, listening: Listening) -> None:
        loop = asyncio.get_running_loop()
        peers = _Peers(self._connections_max)
        async with asyncio.TaskGroup() as connections:
            while True:
                await listening.readable()
                await peers.room()
                # From here to `add` nothing is awaited: a cancellation there would lose the connection unclosed, as one
                # of `loop.sock_accept` does.
                try:
                    accepted = listening.socket.accept()[0]
                except BlockingIOError:
                    continue
                except OSError as error:
                    # The peer has closed the connection already, or the process is out of descriptors.
                    if self._logged.is_new(error.errno, loop.time()):
                        self._log.warning("cannot accept a connection; retrying", why=str(error))
                    await asyncio.sleep(_ACCEPT_PAUSE_S)
                    continue
                accepted.setblocking(False)
                peer = _Peer(accepted, loop.time())
                peers.add(peer, connections.create_task(self._serve(peer, peers)))

    async def _serve(self, peer: _Peer, peers: _Peers) -> None:
        try:
            async with asyncio.timeout(self._connection_s_max):
                await self._converse(peer, peers)
        except TimeoutError:
            self._log.info("connection took too long; closed", connection_s_max=self._connection_s_max)
        except OSError as error:
            self._log.info("connection ended", why=str(error))
        except Exception:
            self._log.exception("a connection failed; closed")

    async def _converse(self, peer: _Peer, peers: _Peers) -> None:
        loop = asyncio.get_running_loop()
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_BYTES_MAX)
        method, whole = b"", True
        try:
            while (event := http.next_event()) is h11.NEED_DATA:
                http.receive_data(await loop.sock_recv(peer.socket, _READ_BYTES))
            if not isinstance(event, h11.Request):
                return
            method = event.method
            peer.waits_since = None
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
        said = b"".join(part for part in parts if part)
        for start in range(0, len(said), _WRITE_BYTES):
            peers.answered(peer)
            await loop.sock_sendall(peer.socket, said[start : start + _WRITE_BYTES])
        if not whole:
            await self._linger(peer.socket)

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
