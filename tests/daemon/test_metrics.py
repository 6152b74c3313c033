from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tensord.daemon.web import metrics

from ..client.ctl import documents
from ..client.ctl.documents import CARD, OTHER

Sample = tuple[str, frozenset[tuple[str, str]]]


def read(families: Iterable[Metric]) -> dict[Sample, float]:
    return {(each.name, frozenset(each.labels.items())): each.value for one in families for each in one.samples}


def told(status: dict[str, Any]) -> dict[Sample, float]:
    return read(parse_text(metrics.text(status)[0].decode()))


def at(samples: dict[Sample, float], name: str, **labels: str) -> float:
    return samples[f"tensord_{name}", frozenset(labels.items())]


SHOWN: dict[str, dict[str, float]] = {
    "info": {"version=0.1.0 instance=system protocol=1": 1},
    "uptime_seconds": {"": 5025.5},
    "evictions_total": {"reason=ttl": 60},
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
    "gauge_refuses": {f"gauge={OTHER} tier=device": 1},
    "gauge_used_bytes": {f"gauge={CARD} tier=device": 70 << 30},
    "gauge_stale": {f"gauge={OTHER} tier=device": 1, f"gauge={CARD} tier=device": 0},
    "threshold_ratio": {"mode=critical": 0.92},
    "device_entries_bytes": {f"device={CARD}": 6 << 30},
    "device_stuck": {f"device={CARD}": 1, f"device={OTHER}": 0},
    "device_owners_unresponsive": {f"device={CARD}": 1, f"device={OTHER}": 0},
    "device_offloaded_total": {"": 120},
    "device_refused_total": {"code=UnderPressure": 6},
    "request_seconds_bucket": {"kind=Commit le=0.001": 5, "kind=Commit le=0.01": 7},
    "request_seconds_count": {"kind=Commit": 8},
    "event_loop_lag_seconds_bucket": {"le=+Inf": 91},
    "event_loop_lag_seconds_sum": {"": 0.02},
    "idle_at_eviction_seconds_bucket": {
        "reason=capacity le=1.0": 10,
        "reason=capacity le=60.0": 90,
        "reason=capacity le=+Inf": 100,
    },
    "idle_at_eviction_seconds_count": {"reason=capacity": 100},
    "idle_at_eviction_seconds_sum": {"reason=capacity": 4000.0},
    "sampled_requests_total": {"": 4096},
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
