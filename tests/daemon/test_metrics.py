"""Metrics of figures that are written down, and their server on real sockets; the daemon itself: tests/integration."""

from __future__ import annotations

import asyncio
import http.client
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Self

import pytest
import uvloop
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tensord.daemon.connections.listener import Listening
from tensord.daemon.web import metrics
from tensord.daemon.web.http import REQUEST_BYTES_MAX
from tensord.daemon.web.pages import metrics_server
from tensord.errors import DaemonUnavailable

from ..client.ctl import documents
from ..client.ctl.documents import CARD, OTHER
from ..daemon_process import PATIENCE_S
from ..http_reader import asked, connect

CONNECTIONS_MAX: Final = 2
ANSWER_S_MAX: Final = 0.2


class Serving:
    """A server in a thread of its own, on a Unix socket and on TCP."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.sock"
        self.status: Callable[[], dict[str, Any]] = documents.status
        self.health: dict[str, Any] | None = {"healthy": True, "problems": []}
        self._sockets = [socket.socket(socket.AF_UNIX), socket.create_server(("127.0.0.1", 0))]
        self._sockets[0].bind(str(self.path))
        for each in self._sockets:
            each.listen(64)
            each.setblocking(False)
        self.port: int = self._sockets[1].getsockname()[1]
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
            documents: Any = SimpleNamespace(status=tell, health=tell_health)
            server = metrics_server([Listening(each) for each in self._sockets], documents)
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
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    monkeypatch.setattr("tensord.daemon.web.http.CONNECTIONS_MAX", CONNECTIONS_MAX)
    monkeypatch.setattr("tensord.daemon.web.http.CONNECTION_S_MAX", PATIENCE_S)
    monkeypatch.setattr("tensord.daemon.web.pages.ANSWER_S_MAX", ANSWER_S_MAX)
    with Serving(tmp_path) as running:
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
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nY: " + b"y" * REQUEST_BYTES_MAX, b"431"),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.0\r\n\r\n", b"200"),
    ],
)
def test_no_request_bytes_end_the_metrics_server(serving: Serving, said: bytes, status: bytes) -> None:
    assert serving.say(said).split(b" ")[1] == status
    assert serving.ask()[0].status == 200


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


def test_a_daemon_does_not_load_the_library_of_metrics_before_it_is_scraped() -> None:
    loads = "import sys, tensord.daemon.app; print([name for name in sys.modules if 'prometheus' in name])"
    done = subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# ---- the text

Sample = tuple[str, frozenset[tuple[str, str]]]


def read(families: Iterable[Metric]) -> dict[Sample, float]:
    return {(each.name, frozenset(each.labels.items())): each.value for one in families for each in one.samples}


def told(status: dict[str, Any]) -> dict[Sample, float]:
    return read(parse_text(metrics.text(status)[0].decode()))


def at(samples: dict[Sample, float], name: str, **labels: str) -> float:
    return samples[f"tensord_{name}", frozenset(labels.items())]


SHOWN: dict[str, dict[str, float]] = {
    "info": {"version=0.1.0 instance=system protocol=1": 1},
    "puts_total": {"outcome=existed": 20},
    # The values of `hits` are all the queries.
    "hits_total": {"tier=device": 500, "tier=host": 9000, "tier=miss": 1000},
    "queries_total": {"": 10_500},
    "mode": {
        "gauge=host tier=host mode=relaxed": 1,
        f"gauge={CARD} tier=device mode=pressure": 1,
        f"gauge={CARD} tier=device mode=relaxed": 0,
        f"gauge={OTHER} tier=device mode=emergency": 1,
    },
    "gauge_source": {f"gauge={OTHER} tier=device source=file": 1},
    "gauge_stale": {f"gauge={OTHER} tier=device": 1, f"gauge={CARD} tier=device": 0},
    "threshold_ratio": {"mode=critical": 0.92},
    "device_stuck": {f"device={CARD}": 1, f"device={OTHER}": 0},
    "device_owners_unresponsive": {f"device={CARD}": 1, f"device={OTHER}": 0},
    "request_seconds_bucket": {"kind=Commit le=0.001": 5, "kind=Commit le=0.01": 7},
    "request_seconds_count": {"kind=Commit": 8},
    "event_loop_lag_seconds_bucket": {"le=+Inf": 91},
    "event_loop_lag_seconds_sum": {"": 0.02},
    "sampled_hits_total": {"cache=store": 3072, "cache=lru": 2048},
}


def test_a_scraper_reads_what_the_status_says() -> None:
    status = documents.status()
    governor = status["governor"]
    governor["counters"]["used"] = 500
    governor["gauges"][2]["stale"] = True
    governor["devices"][0]["stuck"] = "it lowered nothing"
    governor["owners"][0]["unresponsive"] = True
    samples = told(status)
    for name, values in SHOWN.items():
        found = {each: at(samples, name, **dict(label.split("=") for label in each.split())) for each in values}
        assert found == values, name
    assert sum(value for (name, _), value in samples.items() if name == "tensord_mode") == 3, "a gauge is in one mode"


def test_both_formats_say_the_same() -> None:
    status = documents.status()
    wanted = "application/openmetrics-text; version=1.0.0"
    body, content_type = metrics.text(status, wanted)
    assert content_type.startswith(wanted)
    families = parse_openmetrics(body.decode())  # type: ignore[no-untyped-call]
    assert read(families) == told(status)
    assert metrics.text(status, "text/plain")[1].startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize(
    ("name", "shown"), [('a"} 1\nb{x="\\', 'a"} 1\nb{x="\\'), ("card\x1b[2J\x00\u202e\r", r"card\x1b[2J\x00\u202e\r")]
)
def test_a_name_breaks_out_of_no_label_and_has_no_character_that_a_terminal_obeys(name: str, shown: str) -> None:
    governor = documents.governor(gauges=[documents.gauge(name, 1, 2, "normal")])
    status = documents.status(instance=name, governor=governor)
    samples = told(status)
    assert at(samples, "gauge_used_bytes", gauge=shown, tier="device") == 1
    assert at(samples, "info", version="0.1.0", instance=shown, protocol="1") == 1
    assert metrics.text(status)[0].decode().replace("\n", "").isprintable()


def test_names_follow_the_conventions_and_are_the_same_without_gauges_or_devices() -> None:
    full = list(metrics.families(documents.status()))
    for family in full:
        assert family.name.startswith("tensord")
        assert family.documentation.endswith(".")
        # A counter's samples end in _total, and nothing else does.
        assert all(sample.name.endswith("_total") == (family.type == "counter") for sample in family.samples)
        assert not any(word in family.name for word in ("_ms", "_mib", "_kib", "_percent"))
    bare = documents.governor(gauges=[], devices=[], owners=[], workflows=[])
    names = [family.name for family in metrics.families(documents.status(governor=bare))]
    assert names == [family.name for family in full]
    assert len(set(names)) == len(names)
