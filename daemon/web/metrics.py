"""Converts the status document into Prometheus metrics: names, labels and help texts.

Owns: the name, the type and the help text of each metric. Does not own the figures (core), the times at which they are
read, nor the socket (web/metrics_server.py). prometheus_client formats.

Invariants: pure. Metric names do not depend on past events, except that a label value without counts is left out. The
number of samples depends on those of gauges, devices, reasons and codes, never on those of entries or clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

from ...ipc.messages.modes import Mode
from ..process.printable import escaped_lines

Figures = Mapping[str, Any]
Labelled = Iterable[tuple[Sequence[str], float]]

# (name without prefix, name of the figure, help)
_DAEMON: Final = (
    ("uptime_seconds", "uptime_s", "Time since this daemon began to serve."),
    ("epoch", "epoch", "Number of this incarnation of the daemon; it rises with each start."),
    ("ring_bytes", "ring_bytes", "Size of the ring."),
    ("ring_ready_bytes", "ring_ready_bytes", "Bytes of the ring that are allocated so far."),
    ("clients", "clients", "Connected clients."),
    ("lanes", "lanes", "Lanes that processes use."),
    ("leases", "pins", "Entries pinned by readers, counted once for each reader."),
)
_STORE: Final = (
    ("entries", "entries", "Entries in the host tier."),
    ("entries_max", "max_entries", "Entries that the host tier may have."),
    ("used_bytes", "used_bytes", "Bytes of the ring that entries take."),
    ("limit_bytes", "max_bytes", "Bytes of the ring that entries may take."),
    ("retired_bytes", "retired_bytes", "Memory of evicted entries that readers still view."),
    ("resident_bytes", "resident_bytes", "Bytes of the ring that are in memory now."),
    ("withdrawn_bytes", "withdrawn_bytes", "Bytes of the ring that were returned to the system under pressure."),
    ("grants_waiting", "grants_waiting", "Requests for a place of the ring that wait for room or for their turn."),
    ("claims_waiting", "claims_waiting", "Clients that wait for a missing key."),
)
_STORE_TOTALS: Final = (
    ("put_bytes", "put_bytes", "Bytes stored by puts."),
    ("evicted_bytes", "evicted_bytes", "Bytes of removed entries, for any reason."),
    ("scans", "scans", "Fences and scans of all lanes."),
    ("remote_read_bytes", "remote_read_bytes", "Bytes of payloads read from the remote store."),
    ("remote_written_bytes", "remote_written_bytes", "Bytes of payloads written to the remote store."),
    ("prefix_tokens_asked", "prefix_tokens_asked", "Tokens of the queried sequences."),
    ("prefix_tokens_matched", "prefix_tokens_matched", "Tokens of the queried sequences that were cached."),
    ("found_corrupt", "found_corrupt", "Must stay 0: entries that differ from what was stored."),
)
_REMOTE: Final = (
    ("remote_serves", "serves", "1 while the remote store is used, 0 while it is left alone after errors."),
    ("remote_full", "full", "1 while the remote store takes no writes because it is full."),
    ("remote_read_only", "read_only", "1 while the remote store takes no writes because it is read-only."),
    ("remote_not_agreed", "not_agreed", "Invalidated namespaces whose generation the remote store does not take."),
    ("remote_queued_bytes", "queued_bytes", "Payload bytes that wait to be written to the remote store."),
)
_REMOTE_TOTALS: Final = (("remote_corrupt", "corrupt", "Objects of the remote store that are not what was stored."),)
_STORE_BY: Final = (
    ("puts", "puts", "outcome", "Puts that have ended."),
    ("evictions", "evictions", "reason", "Removed entries, by reason."),
    ("refusals", "refusals", "code", "Requests that the store refused, by the error's name."),
    ("claims", "claims", "answer", "Requests for a claim, by the daemon's answer."),
    ("remote", "remote", "outcome", "Fetches from the remote store and writes to it, by outcome."),
)
_DEVICE: Final = (
    ("entries_bytes", "bytes", "Bytes of entries in the device tier."),
    (
        "ordered_bytes",
        "ordered_bytes",
        "Bytes of the entries that their owners were ordered to release, and have not released yet.",
    ),
    ("reserved_bytes", "reserved_bytes", "Free memory that clients have reserved."),
    ("waiting_reservations", "waiting_reservations", "Reservations that wait until memory is free."),
)
_DEVICE_TOTALS: Final = (
    ("registered", "registered", "Entries that owners have registered."),
    ("promoted", "promoted", "Registrations of entries that had been offloaded."),
    ("offloaded", "offloaded", "Entries offloaded to the host tier."),
    ("dropped", "dropped", "Entries removed without a copy in the host tier."),
    ("timed_out", "timed_out", "Entries whose owner did not answer in time."),
    ("freed_bytes", "freed_bytes", "Bytes returned to drivers, as owners report them."),
)


def text(status: Figures, accept: str = "", process: Iterable[Metric] = ()) -> tuple[bytes, str]:
    """The metrics in the format of an HTTP `Accept` header, and the content type of that format.

    Args:
        status: the body of the answer to a StatusQuery.
        accept: the value of the header.
        process: metrics of the daemon's process, which follow those of the document.
    """
    encode, content_type = choose_encoder(accept)
    return escaped_lines(encode(_Collector(status, process))), content_type


@dataclass(frozen=True, slots=True)
class _Collector:
    """A collector in the sense of prometheus_client."""

    status: Figures
    process: Iterable[Metric]

    def collect(self) -> Iterator[Metric]:
        yield from families(self.status)
        yield from self.process


def families(status: Figures) -> Iterator[Metric]:
    """All metric families, in a fixed order. Figures that the document does not have are left out."""
    yield InfoMetricFamily(
        "tensord", "The daemon.", {name: str(status[name]) for name in ("version", "instance", "protocol")}
    )
    yield from _gauges(status, _DAEMON)
    store: Figures = status["store"]
    governor: Figures = status.get("governor", {})
    yield from _gauges(store, _STORE)
    yield from _lookups(store, governor.get("counters", {}))
    yield from _sampled(store["hit_ratios"]["since_start"])
    yield from _counters(store, _STORE_TOTALS)
    yield from _gauges(status["remote"] or {}, _REMOTE)
    yield from _counters(status["remote"] or {}, _REMOTE_TOTALS)
    for name, figure, label, help_text in _STORE_BY:
        yield _counter(name, help_text, *_by(label, sorted(store[figure].items())))
    quotas: Figures = status["quotas"]
    delayed = quotas["requests_delayed"]
    yield _counter("requests_delayed", "Requests that waited for the rate of their uid.", (), [((), delayed)])
    help_text = "Requests and connections refused by a quota of one uid or of all uids, by kind."
    yield _counter("quota_refused", help_text, *_by("kind", sorted(quotas["refusals"].items())))
    yield _idle_times(store["idle_at_eviction_s"])
    yield from _latency(status["latency"])
    if governor:
        yield from _tiers(governor)
        yield from _devices(governor)


def _lookups(store: Figures, counters: Figures) -> Iterator[Metric]:
    """Lookups by tier. `hits` has the value `miss` too, so the sum of its samples is `queries`."""
    tiers = {"device": counters.get("used", 0), "host": store["hits"], "miss": store["misses"]}
    yield _counter("queries", "Lookups.", (), [((), sum(tiers.values()))])
    yield _counter("hits", "Lookups by the tier that had the entry, or miss.", *_by("tier", tiers.items()))


def _sampled(since: Figures) -> Iterator[Metric]:
    """What the policy finds of a sample of the requests, and what LRU would have found."""
    help_text = "Uses and puts of a sample of the keys, scaled to all of them."
    yield _counter("sampled_requests", help_text, (), [((), since["requests"])])
    help_text = "Sampled uses and puts whose key the store had, or LRU would have had."
    yield _counter("sampled_hits", help_text, *_by("cache", [("store", since["here"]), ("lru", since["lru"])]))


def _idle_times(by_reason: Figures) -> Metric:
    help_text = "Time from the last use of an entry to its removal."
    family = HistogramMetricFamily("tensord_idle_at_eviction_seconds", help_text, labels=("reason",))
    for reason, histogram in sorted(by_reason.items()):
        family.add_metric((reason,), *_buckets(histogram))
    return family


def _latency(latency: Figures) -> Iterator[Metric]:
    """Times of requests by kind, and how late the event loop was."""
    family = HistogramMetricFamily(
        "tensord_request_seconds", "Time from a request's arrival to its answer, by kind of request.", labels=("kind",)
    )
    for kind, histogram in latency["kinds"].items():
        family.add_metric((kind,), *_buckets(histogram))
    yield family
    buckets, total = _buckets(latency["event_loop_lag"])
    lag = "Time by which the event loop ran a timer too late."
    yield HistogramMetricFamily("tensord_event_loop_lag_seconds", lag, buckets=buckets, sum_value=total)


def _buckets(histogram: Figures) -> tuple[list[tuple[str, int]], float]:
    """Cumulative buckets by upper bound, and the sum."""
    bounds = [*map(floatToGoString, histogram["bounds"]), "+Inf"]
    return list(zip(bounds, accumulate(histogram["counts"]), strict=True)), histogram["sum"]


def _tiers(governor: Figures) -> Iterator[Metric]:
    gauges: list[Figures] = governor["gauges"]
    labels = ("gauge", "tier")
    for name, figure, help_text in (
        ("gauge_used_bytes", "used_bytes", "Used bytes of the memory that the gauge measures."),
        ("gauge_total_bytes", "total_bytes", "Total bytes of the memory that the gauge measures."),
        ("gauge_baseline_bytes", "baseline_bytes", "Used bytes that are held by plan; modes are about the rest."),
        ("gauge_stale", "stale", "1 while no source can read the gauge; its other metrics show the last reading."),
        ("gauge_refuses", "refuses", "1 while new entries are refused."),
    ):
        yield _gauge(name, help_text, labels, (((each["gauge"], each["tier"]), each[figure]) for each in gauges))
    yield _gauge(
        "gauge_source",
        "1 for the source that the gauge is read from; `file` has made-up readings.",
        (*labels, "source"),
        (((each["gauge"], each["tier"], each["source"]), 1) for each in gauges),
    )
    sources: list[Figures] = governor["sources"]
    yield _gauge(
        "gauge_source_hanging",
        "1 while a reading of the source has not returned within 3 s.",
        ("source", "tier"),
        (((each["source"], each["tier"]), each["state"] == "hanging") for each in sources),
    )
    yield _gauge(
        "mode",
        "1 for the current mode of the gauge, 0 for the others.",
        (*labels, "mode"),
        (((each["gauge"], each["tier"], mode.value), each["mode"] == mode) for each in gauges for mode in Mode),
    )
    shares = ((name, share) for name, share in governor["thresholds"].items() if name != "hysteresis")
    yield _gauge("threshold_ratio", "Share of a tier at which a mode begins.", *_by("mode", shares))


def _devices(governor: Figures) -> Iterator[Metric]:
    devices: list[Figures] = governor["devices"]
    for name, figure, help_text in _DEVICE:
        yield _gauge(f"device_{name}", help_text, ("device",), _by_device(devices, figure))
    stuck = (
        "1 after an eviction pass that did not lower the used bytes; it is not repeated, unless a reservation waits."
    )
    yield _gauge("device_stuck", stuck, *_by("device", ((each["device"], bool(each["stuck"])) for each in devices)))
    yield _gauge(
        "device_owners_unresponsive",
        "Owners that do not carry out orders.",
        ("device",),
        (
            ((name,), sum(owner["device"] == name and owner["unresponsive"] for owner in governor["owners"]))
            for name in (each["device"] for each in devices)
        ),
    )
    counters: Figures = governor["counters"]
    yield from _counters(counters, _DEVICE_TOTALS, "device_")
    refused = sorted(counters["refused"].items())
    yield _counter("device_refused", "Requests that the governor refused, by the error's name.", *_by("code", refused))


def _by(label: str, amounts: Iterable[tuple[str, float]]) -> tuple[Sequence[str], Labelled]:
    """One label, and a sample for each of its values."""
    return (label,), (((value,), amount) for value, amount in amounts)


def _by_device(rows: Iterable[Figures], figure: str) -> Iterator[tuple[Sequence[str], float]]:
    """One sample for each device that has the figure as a number."""
    for row in rows:
        if isinstance(row.get(figure), int | float):
            yield (row["device"],), row[figure]


def _gauges(figures: Figures, wanted: Iterable[tuple[str, str, str]]) -> Iterator[Metric]:
    for name, figure, help_text in wanted:
        if figures.get(figure) is not None:
            yield _gauge(name, help_text, (), [((), figures[figure])])


def _counters(figures: Figures, wanted: Iterable[tuple[str, str, str]], prefix: str = "") -> Iterator[Metric]:
    for name, figure, help_text in wanted:
        if figure in figures:
            yield _counter(prefix + name, help_text, (), [((), figures[figure])])


def _gauge(name: str, help_text: str, labels: Sequence[str], samples: Labelled) -> Metric:
    family = GaugeMetricFamily(f"tensord_{name}", help_text, labels=labels)
    for values, amount in samples:
        family.add_metric(values, amount)
    return family


def _counter(name: str, help_text: str, labels: Sequence[str], samples: Labelled) -> Metric:
    family = CounterMetricFamily(f"tensord_{name}", help_text, labels=labels)
    for values, amount in samples:
        family.add_metric(values, amount)
    return family
