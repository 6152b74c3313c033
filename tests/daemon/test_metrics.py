from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tensord.daemon.web import metrics
from tensord.ipc.messages.modes import Mode

from ..client.ctl import documents
from ..client.ctl.documents import CARD, OTHER

Sample = tuple[str, frozenset[tuple[str, str]]]


def read(families: Iterable[Metric]) -> dict[Sample, float]:
    return {(each.name, frozenset(each.labels.items())): each.value for one in families for each in one.samples}


def told(status: dict[str, Any]) -> dict[Sample, float]:
    return read(parse_text(metrics.text(status)[0].decode()))


def at(samples: dict[Sample, float], name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


SHOWN: dict[str, dict[str, float]] = {
    "info": {"version=0.1.0 instance=system protocol=1": 1},
    "uptime_seconds": {"": 5025.5},
    "evictions_total": {"reason=ttl": 60},
    "puts_total": {"outcome=existed": 20},
    "gauge_source": {f"gauge={OTHER} tier=device source=file": 1},
    "gauge_used_bytes": {f"gauge={CARD} tier=device": 70 << 30},
    "threshold_ratio": {"mode=critical": 0.92},
    "device_entries_bytes": {f"device={CARD}": 6 << 30},
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


@pytest.mark.parametrize("name", SHOWN)
def test_a_scraper_reads_what_the_status_says(name: str) -> None:
    samples = told(documents.status())
    for labels, value in SHOWN[name].items():
        assert at(samples, f"tensord_{name}", **dict(label.split("=") for label in labels.split())) == value


def test_both_formats_say_the_same() -> None:
    status = documents.status()
    wanted = "application/openmetrics-text; version=1.0.0"
    body, content_type = metrics.text(status, wanted)
    assert content_type.startswith(wanted)
    families = parse_openmetrics(body.decode())  # type: ignore[no-untyped-call]
    assert read(families) == told(status)
    assert metrics.text(status, "text/plain")[1].startswith("text/plain; version=0.0.4")


def test_hits_by_tier_and_misses_are_all_the_queries() -> None:
    status = documents.status()
    status["governor"]["counters"]["used"] = 500
    samples = told(status)
    by_tier = {tier: at(samples, "tensord_hits_total", tier=tier) for tier in ("device", "host", "miss")}
    assert by_tier == {"device": 500, "host": 9000, "miss": 1000}
    assert at(samples, "tensord_queries_total") == sum(by_tier.values())


def test_a_gauge_is_in_one_mode_and_faults_of_a_tier_are_shown() -> None:
    samples = told(documents.status())
    for name, tier, mode in (("host", "host", "relaxed"), (CARD, "device", "pressure"), (OTHER, "device", "emergency")):
        modes = {each: at(samples, "tensord_mode", gauge=name, tier=tier, mode=each.value) for each in Mode}
        assert modes == {each: float(each == mode) for each in Mode}
    assert at(samples, "tensord_gauge_refuses", gauge=OTHER, tier="device") == 1
    governor = documents.governor(
        gauges=[documents.gauge(CARD, 1, 2, "normal", stale=True)],
        devices=[documents.device(CARD, stuck="it lowered nothing"), documents.device(OTHER)],
        owners=[documents.owner(1, unresponsive=True), documents.owner(2)],
    )
    samples = told(documents.status(governor=governor))
    assert at(samples, "tensord_gauge_stale", gauge=CARD, tier="device") == 1
    for name in ("stuck", "owners_unresponsive"):
        assert [at(samples, f"tensord_device_{name}", device=device) for device in (CARD, OTHER)] == [1, 0]


def test_names_cannot_break_out_of_their_label_and_have_no_character_that_a_terminal_obeys() -> None:
    names = {'a"} 1\nb{x="\\': 'a"} 1\nb{x="\\', "card\x1b[2J\x00\u202e\r": r"card\x1b[2J\x00\u202e\r"}
    for name, shown in names.items():
        status = documents.status(
            instance=name, governor=documents.governor(gauges=[documents.gauge(name, 1, 2, "normal")])
        )
        assert metrics.text(status)[0].decode().replace("\n", "").isprintable()
        assert at(told(status), "tensord_gauge_used_bytes", gauge=shown, tier="device") == 1
        assert at(told(status), "tensord_info", version="0.1.0", instance=shown, protocol="1") == 1


def test_names_follow_the_conventions() -> None:
    for family in metrics.families(documents.status()):
        assert family.name.startswith("tensord")
        assert family.documentation.endswith(".")
        # A counter's samples end in _total, and nothing else does.
        assert all(sample.name.endswith("_total") == (family.type == "counter") for sample in family.samples)
        assert not any(word in family.name for word in ("_ms", "_mib", "_kib", "_percent"))


def test_a_daemon_without_gauges_or_devices_has_the_same_families() -> None:
    bare = documents.governor(gauges=[], devices=[], owners=[], workflows=[])
    names = [family.name for family in metrics.families(documents.status(governor=bare))]
    full = [family.name for family in metrics.families(documents.status())]
    assert names == full
    assert len(set(full)) == len(full)
