"""Requests to a neighbour over HTTP, within a deadline and a size.

Owns: one connection at a time, its deadline, and the size of answers. Does not own what is asked (the adapters).

No redirect is followed and no proxy is used, so nothing but the configured server is asked.

Invariants: all requests of one Http end by its deadline, however slowly the server sends. At most ANSWER_BYTES_MAX of
an answer are read. Every failure of a server is an NeighbourFailed.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from typing import Any, Final, TypeVar

import msgspec

ANSWER_BYTES_MAX: Final = 4 << 20
_REASON_CHARS_MAX: Final = 160
_OK: Final = range(200, 300)

Answer = TypeVar("Answer")


class NeighbourFailed(Exception):
    """A neighbour did not answer, or not as documented. The text says which, in one line. `status`: of the answer;
    None if there was none."""

    def __init__(self, text: str, status: int | None = None) -> None:
        line = " ".join(text.split())[:_REASON_CHARS_MAX]
        super().__init__("".join(letter if letter.isprintable() else "?" for letter in line))
        self.status = status


class Http:
    """A server, and the time that is left for it.

    Args:
        answer_s: the seconds from now on for all requests together.
        clock: gives monotonic seconds.
    """

    def __init__(self, host: str, port: int, answer_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._port = port
        self._answer_s = answer_s
        self._clock = clock
        self._until = clock() + answer_s

    def get(self, path: str) -> bytes:
        """The body of the answer. Raises NeighbourFailed."""
        return self._exchange("GET", path, None)

    def post(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Sends `body` as JSON, and returns the answer's body. Raises NeighbourFailed."""
        return self._exchange("POST", path, b"" if body is None else json.dumps(body).encode())

    def get_as(self, path: str, form: type[Answer]) -> Answer:
        """The answer's JSON in its form. Raises NeighbourFailed, also if it has another form."""
        body = self.get(path)
        try:
            return msgspec.json.decode(body, type=form)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise NeighbourFailed(f"{path} does not answer as documented: {error}") from None

    def _exchange(self, method: str, path: str, body: bytes | None) -> bytes:
        left_s = self._until - self._clock()
        if left_s <= 0:
            raise self._late(path)
        connection = HTTPConnection(self._host, self._port, timeout=left_s)
        late = threading.Event()
        try:
            connection.connect()
            timer = threading.Timer(self._until - self._clock(), _cut, [late, connection.sock])
            timer.daemon = True
            timer.start()
            try:
                connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
                response = connection.getresponse()
                answer = response.read(ANSWER_BYTES_MAX + 1)
            finally:
                timer.cancel()
        except TimeoutError:
            raise self._late(path) from None
        except (OSError, HTTPException, ValueError) as error:
            if late.is_set():
                raise self._late(path) from None
            raise NeighbourFailed(f"{method} {path}: {type(error).__name__}: {error}") from None
        finally:
            connection.close()
        if late.is_set():
            raise self._late(path)
        if len(answer) > ANSWER_BYTES_MAX:
            raise NeighbourFailed(f"{path} answers with more than {ANSWER_BYTES_MAX} bytes")
        if response.length:
            # `read` with a size takes the end of the connection for the end of the answer.
            raise NeighbourFailed(f"the answer to {path} was cut off, {response.length} bytes before its end")
        if response.status not in _OK:
            why = f"{method} {path} is refused: HTTP {response.status} {response.reason}"
            raise NeighbourFailed(why, response.status)
        return answer

    def _late(self, path: str) -> NeighbourFailed:
        return NeighbourFailed(f"no answer to {path} within {self._answer_s:g} s")


def _cut(late: threading.Event, sock: socket.socket) -> None:
    """Ends the exchange: a server that sends a byte now and then passes every timeout of a socket."""
    late.set()
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
