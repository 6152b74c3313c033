"""The server of metrics: Prometheus text and health checks over HTTP.

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
from .http import HttpAnswer, HttpServer

ANSWER_S_MAX: Final = 5.0
"""The most seconds that the daemon's actors may take for the answer to a health check."""


def metrics_server(
    listening: Sequence[Listening],
    status: Callable[[], Awaitable[dict[str, Any]]],
    health: Callable[[], Awaitable[dict[str, Any]]],
    *,
    answer_s_max: float = ANSWER_S_MAX,
    **limits: Any,
) -> HttpServer:
    """Serves `/metrics`, `/healthz` and `/readyz`.

    Args:
        status: returns the body of the answer to a StatusQuery, with that to a LatencyQuery as `latency`.
        health: returns the body of the answer to a HealthQuery.
        answer_s_max: the longest wait of a health check for `health`, in seconds.
        limits: those of HttpServer.
    """
    rendering = asyncio.Lock()

    async def metrics(request: h11.Request) -> HttpAnswer:
        accept = b",".join(value for name, value in request.headers if name == b"accept").decode("latin-1")
        # One at a time, so that many scrapers do not slow the rest of the daemon.
        async with rendering:
            body, content_type = await asyncio.to_thread(_rendered, await status(), accept)
        return HttpAnswer(HTTPStatus.OK, body, content_type)

    async def problems() -> list[str]:
        try:
            async with asyncio.timeout(answer_s_max):
                return list((await health())["problems"])
        except TimeoutError:
            raise DaemonUnavailable(f"the daemon did not answer within {answer_s_max:g} s") from None

    async def healthz(request: h11.Request) -> HttpAnswer:
        """200 if the daemon answers in time. Its problems are listed only: a restart mends none of them."""
        return _lines(HTTPStatus.OK, ["ok", *await problems()])

    async def readyz(request: h11.Request) -> HttpAnswer:
        """200 if the daemon has no problem, as in `tensorctl health`; else 503 and the problems."""
        found = await problems()
        return _lines(HTTPStatus.SERVICE_UNAVAILABLE, found) if found else _lines(HTTPStatus.OK, ["ready"])

    routes = {b"/": metrics, b"/metrics": metrics, b"/healthz": healthz, b"/readyz": readyz}
    elsewhere = "the metrics are at /metrics; health is at /healthz and /readyz"
    return HttpServer("metrics", listening, routes, elsewhere, **limits)


def _rendered(status: dict[str, Any], accept: str) -> tuple[bytes, str]:
    # Imported here because prometheus_client also imports an HTTP server and TLS. A daemon without scrapers never loads
    # them, and they do not delay the start.
    from prometheus_client import PROCESS_COLLECTOR

    from . import metrics

    return metrics.text(status, accept, PROCESS_COLLECTOR.collect())


def _lines(status: HTTPStatus, lines: Sequence[str]) -> HttpAnswer:
    return HttpAnswer(status, "".join(f"{each}\n" for each in lines).encode())
