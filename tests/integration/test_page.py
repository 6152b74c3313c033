"""The page for browsers as a daemon serves it over TCP, and what it refuses. In a real browser:
test_page_in_a_browser.py."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tensord.daemon.web.http import CONNECTIONS_MAX

from ..daemon_process import Daemon, until
from ..http_reader import asked, connect

OWN_NAMES: Final = ("localhost", "LOCALHOST:80", "127.0.0.1:9478", "[::1]:9478", "[::1]")
FOREIGN: Final = (
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example:80",
    "10.0.0.1",
    "0.0.0.0",
    "x@localhost",
)


def figures(at: Path | int) -> dict[str, Any]:
    response, text = asked(at, "/page.json")
    assert response.status == 200, text
    told: dict[str, Any] = json.loads(text)
    return told


def port_of(daemon: Daemon) -> int:
    found = until(lambda: re.findall(r"serving page.*127\.0\.0\.1:(\d+)'\]", daemon.log), "the address")
    return int(found[-1])


@pytest.fixture
def serving() -> Iterator[Daemon]:
    with Daemon(http="127.0.0.1:0") as running:
        yield running.start()


@pytest.mark.parametrize("path", ["/", "/page.json"])
def test_only_a_request_to_a_name_of_this_host_reads_anything(serving: Daemon, path: str) -> None:
    port = port_of(serving)
    for host in OWN_NAMES:
        assert asked(port, path, host=host)[0].status == 200
    for host in FOREIGN:
        response, text = asked(port, path, host=host)
        assert response.status == 403
        assert repr(host) in text and "use localhost, 127.0.0.1 or [::1]" in text
        assert serving.instance not in text


def test_the_page_can_be_read_and_nothing_else(serving: Daemon) -> None:
    port = port_of(serving)
    assert asked(port, "/", "HEAD")[1] == ""
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        response, _ = asked(port, "/page.json", method, body=b"x" * 100_000)
        assert (response.status, response.getheader("Allow")) == (405, "GET, HEAD")
    for path in ("/metrics", "/page.html", "/../etc/passwd", "//evil.example/"):
        assert asked(port, path)[0].status == 404


def test_every_answer_forbids_what_the_page_does_not_need(serving: Daemon) -> None:
    for path, host in (("/", "localhost"), ("/page.json", "localhost"), ("/x", "localhost"), ("/", "x")):
        response, _ = asked(port_of(serving), path, host=host)
        policy = response.getheader("Content-Security-Policy") or ""
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy and "http" not in policy and "*" not in policy
        assert response.getheader("X-Content-Type-Options") == "nosniff"
        assert response.getheader("Cache-Control") == "no-store"
        assert response.getheader("Access-Control-Allow-Origin") is None


def test_a_reader_learns_no_key(serving: Daemon) -> None:
    key = bytes(range(100, 132))
    serving.client().put(key, np.zeros(100, np.uint8), wait=True)
    response, text = asked(port_of(serving), "/page.json")
    assert response.status == 200 and key.hex()[:16] not in text


def test_connections_that_say_nothing_keep_no_reader_and_no_client_out(serving: Daemon) -> None:
    port, client = port_of(serving), serving.client()
    with ExitStack() as silent:
        for number in range(CONNECTIONS_MAX - 1):
            sock = silent.enter_context(connect(port))
            sock.sendall(b"GET /page.json HTTP/1.1\r\nHo"[: number % 27])
        assert figures(port)["status"]["pid"] == serving.pid
        for _ in range(2 * CONNECTIONS_MAX):
            silent.enter_context(connect(port))
        client.put(b"k" * 32, np.zeros(100, np.uint8), wait=True)
        assert serving.store("entries") == 1
    until(lambda: figures(port)["status"]["store"]["entries"] == 1, "newer figures")
