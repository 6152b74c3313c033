"""What vLLM's log says of the daemon: at the start, at each change, and nothing twice."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from tensord.client.link.link import Link
from tensord.client.vllm.connector import TensordECConnector
from tensord.client.vllm.encoder.stats import COUNTERS
from tensord.client.vllm.engine.presence import ATTACH_S
from tensord.client.vllm.processor.caches import TensordReceiverCache, TensordSenderCache
from tests.daemon_process import Daemon, until

from .conftest import fresh
from .step_bench import Steps, request, right, vllm_config

Lines = Callable[[], list[str]]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Lines:
    """The library's lines, as it logs them."""
    library = logging.getLogger("tensord")
    # So that the connector leaves the library's log where it is.
    monkeypatch.setattr(library, "handlers", [caplog.handler])
    monkeypatch.setattr(library, "propagate", False)
    caplog.set_level(logging.INFO, "tensord")
    return lambda: [
        f"{record.levelname} {record.getMessage()}" for record in caplog.records if record.name == "tensord"
    ]


def said(log: Lines, engine: Steps, *, lines: int) -> str:
    """The last line, once there are so many and the engine has answered a request."""
    until(lambda: len(log()) >= lines, f"{lines} lines; there are {log()}")
    asked = request(fresh())
    assert right([asked], engine.run(asked))
    assert len(log()) == lines, log()
    return log()[-1]


def test_an_engine_without_a_daemon_says_once_why_and_what_to_do_and_then_each_change(log: Lines) -> None:
    with Daemon() as daemon, Steps(daemon.socket) as engine:
        line = said(log, engine, lines=2)
        assert "are found and stored in namespace" in log()[0]
        assert line.startswith(f"WARNING tensord: no daemon at {daemon.socket} (")
        assert "`systemctl start tensord`" in line and "every lookup is a miss and nothing is stored" in line
        for lines in (3, 5):
            daemon.start()
            assert f"INFO tensord: connected to the daemon at {daemon.socket}" in said(log, engine, lines=lines)
            daemon.kill()
            assert f"WARNING tensord: the daemon at {daemon.socket} is away" in said(log, engine, lines=lines + 1)


def test_an_engine_does_not_start_later_for_a_daemon_that_hangs_and_says_so_once(
    log: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vllm_config()
    waits_s: list[float | None] = []
    start = Link.start

    def started(link: Link, wait_s: float | None = None) -> None:
        waits_s.append(wait_s)
        start(link, wait_s)

    monkeypatch.setattr(Link, "start", started)
    with Daemon() as daemon, ExitStack() as opened:
        daemon.start()
        daemon.pause()
        try:
            sender = TensordSenderCache(config, daemon.socket)
            opened.callback(sender.close)
            receiver = TensordReceiverCache(config, daemon.socket)
            opened.callback(receiver.cache._client.close)
            assert [wait_s for wait_s in waits_s if wait_s is not None] == [ATTACH_S] * 2 and ATTACH_S < 1
            engine = opened.enter_context(Steps(daemon.socket))
            assert "Until it answers, nothing is stored" in said(log, engine, lines=2)
        finally:
            daemon.resume()


def test_every_count_has_a_metric_of_its_name_and_a_gauge_follows_the_daemon() -> None:
    unregister_vllm_metrics()
    registry = CollectorRegistry()
    kinds: dict[Any, Any] = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    metrics = TensordECConnector.build_prom_metrics(vllm_config(), kinds, ["engine"], {0: ["0"], 1: ["1"]})
    metrics.observe(dict.fromkeys(COUNTERS, 2), 1)
    for name in COUNTERS:
        assert registry.get_sample_value(f"vllm:ec_tensord_{name}_total", {"engine": "1"}) == 2
        assert registry.get_sample_value(f"vllm:ec_tensord_{name}_total", {"engine": "0"}) == 0

    def gauge(engine: Steps) -> float | None:
        stats = engine.connector.get_ec_connector_stats()
        if stats is not None and not stats.is_empty():
            metrics.observe(stats.data)
        return registry.get_sample_value("vllm:ec_tensord_connected", {"engine": "0"})

    with Daemon() as daemon, Steps(daemon.socket) as engine:
        until(lambda: gauge(engine) == 0, "no daemon")
        daemon.start()
        until(lambda: gauge(engine) == 1, "a daemon")
        daemon.kill()
        until(lambda: gauge(engine) == 0, "none again")
