"""Requests to a neighbour over HTTP, within a time and a size.

A server may send a byte now and then for ever: who asks has a time of its own (the governor). No redirect is
followed and no proxy is used, so nothing but the configured server is asked.

Invariants: at most ANSWER_BYTES_MAX of an answer are read. Every failure of a server is a NeighbourFailed.
"""

from __future__ import annotations

import json
import time
from http.client import HTTPConnection, HTTPException
from typing import Any, Final, TypeVar

import msgspec

ANSWER_BYTES_MAX: Final = 4 << 20

Answer = TypeVar("Answer")


class NeighbourFailed(Exception):
    """A neighbour did not answer, or not as documented. `status`: of the answer; None if there was none."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class NeighbourBusy(Exception):
    """A neighbour is in use, or has nothing to give back. It is left alone."""


class Http:
    """A server, which has `answer_s` seconds from now on for all requests together."""

    def __init__(self, host: str, port: int, answer_s: float) -> None:
        self._host = host
        self._port = port
        self._answer_s = answer_s
        self._until = time.monotonic() + answer_s

    def post(self, path: str, body: dict[str, Any] | None = None) -> None:
        """Sends `body` as JSON. Raises NeighbourFailed."""
        self.get(path, "POST", b"" if body is None else json.dumps(body).encode())

    def get_as(self, path: str, form: type[Answer]) -> Answer:
        """The answer's JSON in its form. Raises NeighbourFailed, also if it has another form."""
        body = self.get(path)
        try:
            return msgspec.json.decode(body, type=form)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise NeighbourFailed(f"{path} does not answer as documented: {error}") from None

    def get(self, path: str, method: str = "GET", body: bytes | None = None) -> bytes:
        """The body of the answer. Raises NeighbourFailed."""
        connection = HTTPConnection(self._host, self._port, timeout=max(1e-3, self._until - time.monotonic()))
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            response = connection.getresponse()
            answer = response.read(ANSWER_BYTES_MAX + 1)
        except TimeoutError:
            raise NeighbourFailed(f"no answer to {path} within {self._answer_s:g} s") from None
        except (OSError, HTTPException, ValueError) as error:
            raise NeighbourFailed(f"{method} {path}: {type(error).__name__}: {error}") from None
        finally:
            connection.close()
        if len(answer) > ANSWER_BYTES_MAX:
            raise NeighbourFailed(f"{path} answers with more than {ANSWER_BYTES_MAX} bytes")
        if response.length:
            # `read` with a size takes the end of the connection for the end of the answer.
            raise NeighbourFailed(f"the answer to {path} was cut off, {response.length} bytes before its end")
        if not 200 <= response.status < 300:
            why = f"{method} {path} is refused: HTTP {response.status} {response.reason}"
            raise NeighbourFailed(why, response.status)
        return answer
