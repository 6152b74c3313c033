"""What is served over HTTP: metrics and health checks for machines, a page with its figures for browsers.

Owns: the answers by path, the headers of the page that keep other sites out, and how often the daemon is asked for the
page: at most every FRESH_S, however many browsers read. Does not own HTTP and its limits (http.py), the text of the
metrics (metrics.py), the figures, nor their display (daemon/page.html).

Invariants: the page's figures have no key. A request for the page whose Host is not this host's own is refused, so that
a name of another site that resolves to the loopback address reads nothing (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import time
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import h11
import msgspec

from ...errors import DaemonUnavailable
from ...ipc.messages import control as messages
from ..connections.listener import Listening
from ..connections.status import Documents
from .http import HttpAnswer, HttpServer, lines, refusal

ANSWER_S_MAX: Final = 5.0
"""The most seconds that the daemon's actors may take for the answer to a health check."""
FRESH_S: Final = 0.5
CLIENTS_MAX: Final = 20
"""The most clients that are listed: the busiest."""
PAGE: Final = Path(__file__).parents[1] / "page.html"
_HOST: Final = re.compile(rb"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
_INLINE: Final = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


def metrics_server(listening: Sequence[Listening], documents: Documents) -> HttpServer:
    rendering = asyncio.Lock()

    async def metrics(request: h11.Request) -> HttpAnswer:
        accept = b",".join(value for name, value in request.headers if name == b"accept").decode("latin-1")
        # One at a time, so that many scrapers do not slow the rest of the daemon.
        async with rendering:
            body, content_type = await asyncio.to_thread(_rendered, await documents.status(), accept)
        return HttpAnswer(HTTPStatus.OK, body, content_type)

    async def problems() -> list[str]:
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                return list((await documents.health())["problems"])
        except TimeoutError:
            raise DaemonUnavailable(f"the daemon did not answer within {ANSWER_S_MAX:g} s") from None

    async def healthz(request: h11.Request) -> HttpAnswer:
        """200 if the daemon answers in time. Its problems are listed only: a restart mends none of them."""
        return lines(HTTPStatus.OK, "ok", *await problems())

    async def readyz(request: h11.Request) -> HttpAnswer:
        """200 if the daemon has no problem, as in `tensorctl health`; else 503 and the problems."""
        found = await problems()
        return lines(HTTPStatus.SERVICE_UNAVAILABLE, *found) if found else lines(HTTPStatus.OK, "ready")

    routes = {b"/": metrics, b"/metrics": metrics, b"/healthz": healthz, b"/readyz": readyz}
    elsewhere = "the metrics are at /metrics; health is at /healthz and /readyz"
    return HttpServer("metrics", listening, routes, elsewhere)


def _rendered(status: dict[str, Any], accept: str) -> tuple[bytes, str]:
    # Imported here because prometheus_client also imports an HTTP server and TLS. A daemon without scrapers never loads
    # them, and they do not delay the start.
    from prometheus_client import PROCESS_COLLECTOR

    from . import metrics

    return metrics.text(status, accept, PROCESS_COLLECTOR.collect())


def page_server(listening: Sequence[Listening], documents: Documents) -> HttpServer:
    """Serves `/`, the page, and `/page.json`, its figures; nothing without a socket."""
    page = PAGE.read_bytes() if listening else b""
    asking, told, told_at = asyncio.Lock(), b"", float("-inf")

    async def show(request: h11.Request) -> HttpAnswer:
        return HttpAnswer(HTTPStatus.OK, page, "text/html; charset=utf-8")

    async def tell(request: h11.Request) -> HttpAnswer:
        nonlocal told, told_at
        async with asking:
            if time.monotonic() >= told_at + FRESH_S:
                told = msgspec.json.encode(await _figures(documents))
                told_at = time.monotonic()
        return HttpAnswer(HTTPStatus.OK, told, "application/json")

    return HttpServer(
        "page",
        listening,
        {b"/": show, b"/page.json": tell},
        "the page is at /, its figures are at /page.json",
        guard=_foreign,
        headers=_headers(page),
    )


async def _figures(documents: Documents) -> dict[str, Any]:
    """The status, what an operator must look at, and the busiest clients."""
    clients = (await documents.answer(messages.ClientsQuery(0)))["clients"]
    return {
        "unix_s": time.time(),
        "status": await documents.answer(messages.StatusQuery(0)),
        "problems": (await documents.health())["problems"],
        "clients": sorted(clients, key=lambda row: -(row["pins"] + row["hits"]))[:CLIENTS_MAX],
    }


def _foreign(request: h11.Request) -> HttpAnswer | None:
    """The refusal of a request that was not sent to this host by one of its own names."""
    host = b",".join(value for name, value in request.headers if name == b"host")
    if _HOST.fullmatch(host):
        return None
    return refusal(
        HTTPStatus.FORBIDDEN,
        f"the Host of the request is {host.decode('latin-1')!r}; use localhost, 127.0.0.1 or [::1], with any port",
    )


def _headers(html: bytes) -> list[tuple[str, str]]:
    """Headers by which a browser runs the page's own script and style alone, and shows the page in no other site."""
    own = {b"script": "", b"style": ""}
    for kind, text in _INLINE.findall(html):
        own[kind] += f" 'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
    policy = (
        f"default-src 'none'; script-src{own[b'script']}; style-src{own[b'style']}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return [
        ("Cache-Control", "no-store"),
        ("Content-Security-Policy", policy),
        ("Cross-Origin-Resource-Policy", "same-origin"),
        ("Referrer-Policy", "no-referrer"),
        ("X-Content-Type-Options", "nosniff"),
    ]
