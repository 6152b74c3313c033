"""The metrics actor: serves Prometheus text and health checks over HTTP on the given sockets.

Owns: the answers to scrapes and to health checks. Does not own HTTP and its limits (http.py), the text of the metrics
(daemon/web/metrics.py) nor the figures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any, Final

import h11

from ...errors import DaemonUnavailable
from ..connections.listening import Listening
from .http import CONNECTION_S_MAX, CONNECTIONS_MAX, HttpAnswer, HttpServer

ANSWER_S_MAX: Final = 5.0
"""The most seconds that the daemon's actors may take for the answer to a health check."""


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
        listening: Sequence[Listening],
        status: Callable[[], Awaitable[dict[str, Any]]],
        health: Callable[[], Awaitable[dict[str, Any]]],
        *,
        connections_max: int = CONNECTIONS_MAX,
        connection_s_max: float = CONNECTION_S_MAX,
        answer_s_max: float = ANSWER_S_MAX,
    ) -> None:
        self._status = status
        self._health = health
        self._answer_s_max = answer_s_max
        self._rendering = asyncio.Lock()
        routes = {
            b"/": self._metrics,
            b"/metrics": self._metrics,
            b"/healthz": self._healthz,
            b"/readyz": self._readyz,
        }
        self._server = HttpServer(
            "metrics",
            listening,
            routes,
            "the metrics are at /metrics; health is at /healthz and /readyz",
            connections_max=connections_max,
            connection_s_max=connection_s_max,
        )

    async def run(self) -> None:
        """Serves until it is cancelled. Then it ends every connection."""
        await self._server.run()

    async def _metrics(self, request: h11.Request) -> HttpAnswer:
        accept = b",".join(value for name, value in request.headers if name == b"accept").decode("latin-1")
        # One at a time, so that many scrapers do not slow the rest of the daemon.
        async with self._rendering:
            body, content_type = await asyncio.to_thread(_rendered, await self._status(), accept)
        return HttpAnswer(HTTPStatus.OK, body, content_type)

    async def _healthz(self, request: h11.Request) -> HttpAnswer:
        """200 if the daemon answers in time. Its problems are listed only: a restart mends none of them."""
        return _lines(HTTPStatus.OK, ["ok", *await self._problems()])

    async def _readyz(self, request: h11.Request) -> HttpAnswer:
        """200 if the daemon has no problem, as in `tensorctl health`; else 503 and the problems."""
        problems = await self._problems()
        return _lines(HTTPStatus.SERVICE_UNAVAILABLE, problems) if problems else _lines(HTTPStatus.OK, ["ready"])

    async def _problems(self) -> list[str]:
        try:
            async with asyncio.timeout(self._answer_s_max):
                return list((await self._health())["problems"])
        except TimeoutError:
            raise DaemonUnavailable(f"the daemon did not answer within {self._answer_s_max:g} s") from None


def _rendered(status: dict[str, Any], accept: str) -> tuple[bytes, str]:
    # Imported here because prometheus_client also imports an HTTP server and TLS. A daemon without scrapers never loads
    # them, and they do not delay the start.
    from prometheus_client import PROCESS_COLLECTOR

    from . import metrics

    return metrics.text(status, accept, PROCESS_COLLECTOR.collect())


def _lines(status: HTTPStatus, lines: Sequence[str]) -> HttpAnswer:
    return HttpAnswer(status, "".join(f"{each}\n" for each in lines).encode())
