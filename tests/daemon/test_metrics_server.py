"""The metrics actor on real sockets, with figures that are written down; the daemon itself: tests/integration."""

from __future__ import annotations

import asyncio
import http.client
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import pytest
import uvloop

from tensord.daemon.connections.listener import Listening
from tensord.daemon.web.pages import metrics_server
from tensord.errors import DaemonUnavailable

from ..client.ctl import documents
from ..daemon_process import PATIENCE_S
from ..http_reader import asked, connect

CONNECTIONS_MAX: Final = 2
ANSWER_S_MAX: Final = 0.2


class Serving:
    """A server in a thread of its own, on a Unix socket and on TCP."""

    def __init__(self, folder: Path, connection_s_max: float) -> None:
        self.path = folder / "metrics.sock"
        self.status: Callable[[], dict[str, Any]] = documents.status
        self.health: dict[str, Any] | None = {"healthy": True, "problems": []}
        self._sockets = [socket.socket(socket.AF_UNIX), socket.create_server(("127.0.0.1", 0))]
        self._sockets[0].bind(str(self.path))
        for each in self._sockets:
            each.listen(64)
            each.setblocking(False)
        self.port: int = self._sockets[1].getsockname()[1]
        self._connection_s_max = connection_s_max
        self._stop: Callable[[], object] = lambda: None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        for each in self._sockets:
            each.close()

    def _run(self) -> None:
        async def tell() -> dict[str, Any]:
            return self.status()

        async def tell_health() -> dict[str, Any]:
            """`health`, or no answer if that is None."""
            if self.health is None:
                await asyncio.get_running_loop().create_future()
            return dict(self.health or {})

        async def serve() -> None:
            server = metrics_server(
                [Listening(each) for each in self._sockets],
                tell,
                tell_health,
                connections_max=CONNECTIONS_MAX,
                connection_s_max=self._connection_s_max,
                answer_s_max=ANSWER_S_MAX,
            )
            serving = asyncio.create_task(server.run())
            loop = asyncio.get_running_loop()
            self._stop = lambda: loop.call_soon_threadsafe(serving.cancel)
            self._started.set()
            await asyncio.gather(serving, return_exceptions=True)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    def connect(self, *, tcp: bool = False) -> socket.socket:
        return connect(self.port if tcp else self.path)

    def ask(
        self, method: str = "GET", path: str = "/metrics", *, tcp: bool = False, **more: Any
    ) -> tuple[http.client.HTTPResponse, str]:
        return asked(self.port if tcp else self.path, path, method, **more)

    def say(self, said: bytes) -> bytes:
        with self.connect() as sock:
            sock.sendall(said)
            return b"".join(iter(lambda: sock.recv(65536), b""))


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path, PATIENCE_S) as running:
        yield running


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_a_scrape_gets_the_metrics_in_the_format_that_it_asks_for(serving: Serving, tcp: bool) -> None:
    for path in 2 * CONNECTIONS_MAX * ["/", "/metrics", "/metrics?name=x"]:
        response, text = serving.ask(path=path, tcp=tcp)
        assert response.status == 200
        assert (response.getheader("Content-Type") or "").startswith("text/plain; version=0.0.4")
        for figure in ("tensord_entries 640.0\n", "\nprocess_resident_memory_bytes ", "\nprocess_open_fds "):
            assert figure in text
    response, text = serving.ask(tcp=tcp, Accept="application/openmetrics-text; version=1.0.0")
    assert (response.getheader("Content-Type") or "").startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"\x00\x01\x02\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\n\r\n", b"400"),  # no Host
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nY: " + b"y" * 100_000, b"431"),
        (b"GET /" + b"x" * 100_000, b"431"),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.0\r\n\r\n", b"200"),
    ],
)
def test_no_request_bytes_end_the_metrics_server(serving: Serving, said: bytes, status: bytes) -> None:
    assert serving.say(said).split(b" ")[1] == status
    assert serving.ask()[0].status == 200


def test_a_scraper_that_disconnects_at_once_does_no_harm(serving: Serving) -> None:
    for said in (b"", b"GET /met", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"):
        for _ in range(2 * CONNECTIONS_MAX):
            with serving.connect() as sock:
                sock.sendall(said)
    assert serving.ask()[0].status == 200


def test_an_answer_that_is_being_made_is_not_cut_off(serving: Serving) -> None:
    """Its route takes ANSWER_S_MAX, others wait for its place meanwhile, and have no request."""
    serving.health = None
    with ExitStack() as opened:
        asking = opened.enter_context(serving.connect())
        asking.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(4 * CONNECTIONS_MAX):
            opened.enter_context(serving.connect())
        assert b"did not answer within" in b"".join(iter(partial(asking.recv, 65536), b""))


def test_figures_that_cannot_be_had_are_an_error_of_the_server_s(serving: Serving) -> None:
    def gone() -> dict[str, Any]:
        raise DaemonUnavailable("the store is going")

    serving.status = gone
    response, text = serving.ask()
    assert response.status == 503
    assert "the store is going" in text
    serving.status = dict
    assert serving.ask()[0].status == 500
    serving.status = documents.status
    assert serving.ask()[0].status == 200


SLOW = f"503 Service Unavailable: the daemon did not answer within {ANSWER_S_MAX} s\n"


@pytest.mark.parametrize(
    ("problems", "healthz", "readyz"),
    [
        ([], (200, "ok\n"), (200, "ready\n")),
        (
            ["a card is gone", "a small ring"],
            (200, "ok\na card is gone\na small ring\n"),
            (503, "a card is gone\na small ring\n"),
        ),
        (None, (503, SLOW), (503, SLOW)),
    ],
    ids=["no problem", "problems", "no answer"],
)
def test_a_daemon_that_answers_is_healthy_and_one_without_problems_is_ready(
    serving: Serving, problems: list[str] | None, healthz: tuple[int, str], readyz: tuple[int, str]
) -> None:
    serving.health = None if problems is None else {"healthy": not problems, "problems": problems}
    for path, told in (("/healthz", healthz), ("/readyz", readyz), ("/healthz?verbose", healthz)):
        response, text = serving.ask(path=path)
        assert (response.status, text) == told
    response, text = serving.ask("HEAD", "/healthz")
    assert (response.status, text) == (healthz[0], "")


def test_cancelling_the_metrics_server_ends_every_connection(tmp_path: Path) -> None:
    with Serving(tmp_path, PATIENCE_S) as serving:
        held = serving.connect()
        # One behind it was answered, so it has been accepted.
        assert serving.ask()[0].status == 200
    with held:
        assert held.recv(1) == b""


def test_a_daemon_does_not_load_the_library_of_metrics_before_it_is_scraped() -> None:
    loads = "import sys, tensord.daemon.app; print([name for name in sys.modules if 'prometheus' in name])"
    done = subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
