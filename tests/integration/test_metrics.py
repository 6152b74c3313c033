"""What a scraper reads of a daemon that runs."""

from __future__ import annotations

import http.client
import re
import socket
import stat
from pathlib import Path
from typing import Final

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from tensord.ipc.messages import control as messages
from tensord.ipc.messages.schema import PROTOCOL_VERSION
from tensord.ipc.wire.blocking import BlockingChannel

from ..daemon_process import MIB, PATIENCE_S, Daemon, until

CARD: Final = "0000:65:00.0"
Sample = tuple[str, frozenset[tuple[str, str]]]


def asked(at: Path | tuple[str, int], path: str) -> tuple[int, str]:
    """The status and the body of an answer."""
    if isinstance(at, Path):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(PATIENCE_S)
        sock.connect(str(at))
    else:
        sock = socket.create_connection(at, timeout=PATIENCE_S)
    connection = http.client.HTTPConnection("localhost")
    connection.sock = sock
    connection.request("GET", path)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def scraped(at: Path | tuple[str, int]) -> dict[Sample, float]:
    """Every sample that there is."""
    status, text = asked(at, "/metrics")
    assert status == 200, text
    families = text_string_to_metric_families(text)
    return {(each.name, frozenset(each.labels.items())): each.value for one in families for each in one.samples}


def figure(samples: dict[Sample, float], name: str, **labels: str) -> float:
    return samples.get((name, frozenset(labels.items())), 0.0)


def metrics_of(daemon: Daemon) -> Path:
    return daemon.socket.with_name("metrics.sock")


def test_puts_hits_misses_and_evictions_are_counted(daemon: Daemon) -> None:
    client = daemon.client()
    keys = [bytes([number]) * 32 for number in range(3)]
    for key in keys:
        client.put(key, np.zeros(MIB, np.uint8), tokens=5, wait=True)
    for _ in range(4):
        client.get(keys[0])
    client.get(b"\xff" * 32)
    daemon.until(lambda now: now["store"]["hits"] == 4 and now["store"]["misses"] == 1, "the lane was drained")
    samples = scraped(metrics_of(daemon))
    assert figure(samples, "tensord_puts_total", outcome="stored") == 3
    assert figure(samples, "tensord_entries") == 3
    assert figure(samples, "tensord_hits_total", tier="host") == 4
    assert figure(samples, "tensord_hits_total", tier="miss") == 1
    assert figure(samples, "tensord_queries_total") == 5
    assert figure(samples, "tensord_clients") == 1
    assert figure(samples, "tensord_used_bytes") >= 3 * MIB
    assert ("tensord_found_corrupt_total", frozenset()) in samples


def test_a_drill_that_acts_is_in_the_metrics_until_it_ends(daemon: Daemon) -> None:
    at = metrics_of(daemon)
    channel = BlockingChannel.connect(daemon.socket, PATIENCE_S)
    try:
        channel.send(messages.Hello(1, PROTOCOL_VERSION, "drill", 1, False), timeout_s=PATIENCE_S)
        channel.receive(PATIENCE_S)
        channel.send(messages.Drill(2, CARD, 97, 100, True), timeout_s=PATIENCE_S)
        channel.receive(PATIENCE_S)
        samples = scraped(at)
        assert figure(samples, "tensord_mode", gauge=CARD, tier="device", mode="emergency") == 1
        assert figure(samples, "tensord_gauge_source", gauge=CARD, tier="device", source="drill") == 1
    finally:
        channel.close()
    until(lambda: not figure(scraped(at), "tensord_gauge_source", gauge=CARD, tier="device", source="drill"), "its end")


def test_the_socket_has_its_mode_and_goes_with_the_daemon(daemon: Daemon) -> None:
    at = metrics_of(daemon)
    assert stat.S_IMODE(at.stat().st_mode) == 0o660
    daemon.kill()
    assert at.is_socket()
    daemon.start()
    assert figure(scraped(at), "tensord_epoch") == 2
    daemon.terminate()
    assert not at.exists()


def test_by_tcp_it_is_served_only_where_that_is_asked_for(daemon: Daemon) -> None:
    until(lambda: re.search(r"at=\['[^']*/metrics\.sock'\]", daemon.log), "nothing else is listened on")
    with Daemon(metrics_listen="127.0.0.1:0") as other:
        other.start()
        port = int(until(lambda: re.findall(r"127\.0\.0\.1:(\d+)'\]", other.log), "the address")[0])
        assert figure(scraped(("127.0.0.1", port)), "tensord_ring_bytes") == figure(
            scraped(metrics_of(other)), "tensord_ring_bytes"
        )


def test_a_wrong_address_is_refused_by_name() -> None:
    with Daemon(metrics_listen="9477") as daemon:
        assert "metrics.listen = '9477'" in daemon.refused()
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, Daemon(metrics_listen=f"127.0.0.1:{taken.getsockname()[1]}") as daemon:
        assert "metrics.listen" in daemon.refused()
        assert not daemon.segments()
