"""What a scraper reads of a daemon that runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from ..daemon_process import MIB, Daemon
from ..http_reader import asked

Sample = tuple[str, frozenset[tuple[str, str]]]


def scraped(at: Path) -> dict[Sample, float]:
    """Every sample that there is."""
    response, text = asked(at, "/metrics")
    assert response.status == 200, text
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
