"""The server of the page: serves the page for browsers, and its figures, over HTTP on the given sockets.

Owns: the two paths, the headers that keep other sites out, and how often the daemon is asked. Does not own HTTP and its
limits (http.py), the figures, nor their display (daemon/page.html).

Invariants:
- The figures are asked for at most every FRESH_S, however many browsers read. They have no key.
- A request whose Host is not this host's own is refused, so that a name of another site that resolves to the loopback
  address reads nothing (DNS rebinding).
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

from ...ipc.messages import control as messages
from ..connections.listening import Listening
from ..connections.status import Documents
from .http import HttpAnswer, HttpServer, refusal

FRESH_S: Final = 0.5
CLIENTS_MAX: Final = 20
"""The most clients that are listed: the busiest."""
CONNECTIONS_MAX: Final = 32
"""The most connections. A browser opens up to six, some of them in advance."""
PAGE: Final = Path(__file__).parents[1] / "page.html"

_HOST: Final = re.compile(rb"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
_INLINE: Final = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


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
        connections_max=CONNECTIONS_MAX,
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
    """Headers by which a browser runs the page's own script and style, and nothing else, and shows the page in no other
    site."""
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
