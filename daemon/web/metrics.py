"""Converts the status document into Prometheus metrics: names, labels and help texts.

Owns: the name, the type and the help text of each metric. Does not own the figures (core), the times at which they are
read, nor the socket (actors/metrics.py). prometheus_client formats.

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
    ("recovered", "recovered", "1 if this daemon took over the ring of an earlier one."),
    ("ring_bytes", "ring_bytes", "Size of the ring."),
    ("ring_ready_bytes", "ring_ready_bytes", "Bytes of the ring that are allocated so far."),
    ("index_bytes", "index_bytes", "Size of the index."),
    ("clients", "clients", "Connected clients."),
    ("lanes", "lanes", "Lanes that processes use."),
    ("lanes_orphaned", "lanes_orphaned", "Lanes whose connection has ended."),
    ("leases", "pins", "Entries pinned by readers, counted once for each reader."),
    ("inboxes", "inboxes", "Open inboxes of clients that do not write into the ring."),
)
_STORE: Final = (
    ("entries", "entries", "Entries in the host tier."),
    ("entries_max", "max_entries", "Entries that the host tier may have."),
    ("tokens", "tokens", "Encoder tokens of all entries, as clients count them."),
    ("namespaces", "namespaces", "Namespaces with entries."),
    ("used_bytes", "used_bytes", "Bytes of the ring that entries take."),
    ("limit_bytes", "max_bytes", "Bytes of the ring that entries may take."),
    ("largest_free_bytes", "largest_free_bytes", "Size of the largest entry that would fit without an eviction."),
    ("holes", "holes", "Free ranges of the ring."),
    ("retired_bytes", "retired_bytes", "Memory of evicted entries that readers still view."),
    ("resident_bytes", "resident_bytes", "Bytes of the ring that are in memory now."),
    ("withdrawn_bytes", "withdrawn_bytes", "Bytes of the ring that were returned to the system under pressure."),
    (
        "window_bytes",
        "window_bytes",
        "Bytes of recently put entries, which are evicted only if no other entry can be.",
    ),
    ("message_pins", "pins", "Entries pinned for a time, by message."),
    ("message_pinned_bytes", "pinned_bytes", "Bytes of entries pinned for a time, by message."),
    ("grants", "grants", "Places of the ring that are lent to clients to write in."),
    ("lent_bytes", "lent_bytes", "Bytes of these places, as far as nothing is stored there."),
    ("grants_waiting", "grants_waiting", "Requests for such places that wait for room or for their turn."),
    ("claims_held", "claims_held", "Missing keys that a client computes."),
    ("claims_waiting", "claims_waiting", "Clients that wait for a missing key."),
    ("prefix_blocks", "prefix_blocks", "Blocks and snapshots of cached sequences."),
    ("prefix_rebuilding", "prefix_rebuilding", "Blocks and snapshots that cannot be matched yet after a restart."),
    ("prefix_queries_waiting", "prefix_queries_waiting", "Prefix queries that wait until all blocks can be matched."),
)
_STORE_TOTALS: Final = (
    ("put_bytes", "put_bytes", "Bytes stored by puts."),
    ("evicted_bytes", "evicted_bytes", "Bytes of removed entries, for any reason."),
    ("claims_granted", "claims_granted", "Claims granted."),
    ("claims_handed_over", "claims_handed_over", "Claims handed over to a waiting client."),
    ("scans", "scans", "Fences and scans of all lanes."),
    ("republished", "republished", "Chosen victims that were kept because a reader had pinned them."),
    ("moves", "moves", "Entries that were moved to another place of the ring to make room for a put."),
    ("moved_bytes", "moved_bytes", "Bytes of moved entries."),
    ("log_lost", "log_lost", "Hits that are missing in recency and frequency, because an access log overflowed."),
    ("remote_read_bytes", "remote_read_bytes", "Bytes of payloads read from the remote store."),
    ("remote_written_bytes", "remote_written_bytes", "Bytes of payloads written to the remote store."),
    ("recovered_entries", "recovered", "Entries taken over from a former daemon."),
    ("prefix_queries", "prefix_queries", "Queries for a cached prefix."),
    ("prefix_hits", "prefix_hits", "Queries of which at least one token was cached."),
    ("prefix_tokens_asked", "prefix_tokens_asked", "Tokens of the queried sequences."),
    ("prefix_tokens_matched", "prefix_tokens_matched", "Tokens of the queried sequences that were cached."),
    ("prefix_uses_lost", "prefix_uses_lost", "Uses of blocks by queries that are missing in recency and frequency."),
    ("found_corrupt", "found_corrupt", "Must stay 0: entries that differ from what was stored."),
)
_REMOTE: Final = (
    ("remote_serves", "serves", "1 while the remote store is used, 0 while it is left alone after errors."),
    ("remote_full", "full", "1 while the remote store takes no writes because it is full."),
    ("remote_read_only", "read_only", "1 while the remote store takes no writes because it is read-only."),
    ("remote_not_agreed", "not_agreed", "Invalidated namespaces whose generation the remote store does not take."),
    ("remote_queued_bytes", "queued_bytes", "Payload bytes that wait to be written to the remote store."),
    ("remote_removals", "removals", "Evicted entries that wait to be removed from the remote store."),
)
_REMOTE_TOTALS: Final = (("remote_corrupt", "corrupt", "Objects of the remote store that are not what was stored."),)
_STORE_BY: Final = (
    ("puts", "puts", "outcome", "Puts that have ended."),
    ("evictions", "evictions", "reason", "Removed entries, by reason."),
    ("refusals", "refusals", "code", "Requests that the store refused, by the error's name."),
    ("claims", "claims", "answer", "Requests for a claim, by the daemon's answer."),
    (
        "claims_unstorable",
        "claims_unstorable",
        "code",
        "Claims that ended because the value cannot be stored, by the error's name.",
    ),
    ("remote", "remote", "outcome", "Fetches from the remote store and writes to it, by outcome."),
)
_DEVICE: Final = (
    ("entries", "entries", "Entries in the device tier."),
    ("entries_bytes", "bytes", "Bytes of entries in the device tier."),
    ("tokens", "tokens", "Encoder tokens of entries in the device tier."),
    (
        "ordered_entries",
        "ordered_entries",
        "Entries that their owners were ordered to release, and have not released yet.",
    ),
    (
        "ordered_bytes",
        "ordered_bytes",
        "Bytes of the entries that their owners were ordered to release, and have not released yet.",
    ),
    ("reserved_bytes", "reserved_bytes", "Free memory that clients have reserved."),
    ("waiting_reservations", "waiting_reservations", "Reservations that wait until memory is free."),
    ("owners", "owners", "Clients with entries on the device."),
    ("floor_blocks", "floor_blocks", "Number of blocks below which no entry is evicted; from the queueing model."),
    ("capacity_blocks", "capacity_blocks", "Blocks that the device has."),
)
_DEVICE_TOTALS: Final = (
    ("registered", "registered", "Entries that owners have registered."),
    ("renewed", "renewed", "Registrations of entries that were registered already."),
    ("promoted", "promoted", "Registrations of entries that had been offloaded."),
    ("offloaded", "offloaded", "Entries offloaded to the host tier."),
    ("dropped", "dropped", "Entries removed without a copy in the host tier."),
    ("released", "released", "Entries that their owners deleted without an order."),
    ("gone_with_owner", "gone_with_owner", "Entries removed because their owner disconnected."),
    ("kept", "kept", "Entries that their owner could not release when ordered."),
    ("timed_out", "timed_out", "Entries whose owner did not answer in time."),
    ("ordered", "ordered", "Entries that owners were ordered to release."),
    ("passes", "passes", "Times that victims were chosen."),
    ("offloaded_bytes", "offloaded_bytes", "Bytes of offloaded entries."),
    ("dropped_bytes", "dropped_bytes", "Bytes of dropped entries."),
    ("freed_bytes", "freed_bytes", "Bytes returned to drivers, as owners report them."),
)
_QUEUEING: Final = (
    ("arrivals_per_second", "arrivals_per_s", "Arriving requests, as clients report them."),
    ("service_seconds", "service_s", "Mean time to serve a request."),
    ("blocks_per_request", "blocks_per_request", "Mean number of blocks that a request holds while it is served."),
    ("offered_load", "offered_load", "Mean number of requests served at once (Erlang)."),
    ("minimum_stable_blocks", "minimum_stable_blocks", "Blocks below which the queue of requests grows without end."),
    ("utilisation_ratio", "utilisation", "Mean share of the device's blocks that requests hold."),
    ("stable", "stable", "1 while the floor is below the number of blocks of the device."),
    ("samples", "samples", "Completed requests in the means of the queueing model."),
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
    yield from _hit_ratios(store["hit_ratios"])
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
    yield from _histograms(store.get("departures", {}))
    yield from _latency(status["latency"])
    if governor:
        yield from _tiers(governor)
        yield from _devices(governor)


def _lookups(store: Figures, counters: Figures) -> Iterator[Metric]:
    """Lookups by tier. `hits` has the value `miss` too, so the sum of its samples is `queries`."""
    # There is no distributed store yet. Its series exists, so that later no sum or dashboard has to change.
    tiers = {"device": counters.get("used", 0), "host": store["hits"], "remote": 0, "miss": store["misses"]}
    yield _counter("queries", "Lookups.", (), [((), sum(tiers.values()))])
    yield _counter("hits", "Lookups by the tier that had the entry, or miss.", *_by("tier", tiers.items()))


def _hit_ratios(ratios: Figures) -> Iterator[Metric]:
    """Hit ratios, from the document's counts. A ratio without lookups is left out."""
    lately = [(over, ratios[over]) for over in ("minute", "ring")]
    for name, help_text, hits, of in (
        (
            "hit_ratio",
            "Share of lookups that hit, in the last minute, and while the last ring's worth of bytes was put.",
            "hits",
            "lookups",
        ),
        ("requests_here_ratio", "Share of uses and puts whose key was stored.", "here", "requests"),
        ("requests_lru_ratio", "Share of the same uses and puts whose key LRU would have stored.", "lru", "requests"),
    ):
        shares = ((over, sums[hits] / sums[of]) for over, sums in lately if sums[of])
        yield _gauge(name, help_text, *_by("over", shares))
    since = ratios["since_start"]
    help_text = "Uses and puts of a sample of the keys, scaled to all of them."
    yield _counter("sampled_requests", help_text, (), [((), since["requests"])])
    help_text = "Sampled uses and puts whose key the store had, or LRU would have had."
    yield _counter("sampled_hits", help_text, *_by("cache", [("store", since["here"]), ("lru", since["lru"])]))


def _histograms(departures: Figures) -> Iterator[Metric]:
    for name, figure, help_text in (
        ("residence_seconds", "residence_s", "Time from the put of an entry to its removal."),
        ("idle_at_eviction_seconds", "idle_s", "Time from the last use of an entry to its removal."),
        ("uses_at_eviction", "uses", "Uses of an entry between its put and its removal."),
        ("worth_at_eviction", "worth", "The policy's worth of an entry at its removal, in the policy's unit."),
    ):
        family = HistogramMetricFamily(f"tensord_{name}", help_text, labels=("reason",))
        for reason, histogram in sorted(departures.get(figure, {}).items()):
            family.add_metric((reason,), *_buckets(histogram))
        yield family


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
        ("gauge_age_seconds", "age_s", "Time since the reading in use began."),
        ("gauge_refuses", "refuses", "1 while new entries are refused."),
        ("gauge_mode_seconds", "since_s", "Time since the gauge entered its mode."),
    ):
        yield _gauge(name, help_text, labels, (((each["gauge"], each["tier"]), each[figure]) for each in gauges))
    yield _gauge(
        "gauge_source",
        "1 for the source that the gauge is read from; `drill` and `file` have made-up readings.",
        (*labels, "source"),
        (((each["gauge"], each["tier"], each["source"]), 1) for each in gauges),
    )
    sources: list[Figures] = governor["sources"]
    for name, help_text, states in (
        ("gauge_source_failing", "1 while the source, or one of its gauges, cannot be read.", ("failing", "hanging")),
        ("gauge_source_hanging", "1 while a reading of the source has not returned within 3 s.", ("hanging",)),
    ):
        rows = (((each["source"], each["tier"]), each["state"] in states) for each in sources)
        yield _gauge(name, help_text, ("source", "tier"), rows)
    yield _gauge(
        "mode",
        "1 for the current mode of the gauge, 0 for the others.",
        (*labels, "mode"),
        (((each["gauge"], each["tier"], mode.value), each["mode"] == mode) for each in gauges for mode in Mode),
    )
    shares = ((name, share) for name, share in governor["thresholds"].items() if name != "hysteresis")
    yield _gauge("threshold_ratio", "Share of a tier at which a mode begins.", *_by("mode", shares))
    transitions: Figures = governor["counters"]["transitions"]
    into = ((mode.value, transitions.get(mode.value, 0)) for mode in Mode)
    yield _counter("transitions", "Changes into a mode, of any gauge.", *_by("mode", into))


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
    queueing = [{"device": each["device"], **each["queueing"]} for each in devices]
    for name, figure, help_text in _QUEUEING:
        yield _gauge(f"queueing_{name}", help_text, ("device",), _by_device(queueing, figure))
    counters: Figures = governor["counters"]
    yield from _counters(counters, _DEVICE_TOTALS, "device_")
    refused = sorted(counters["refused"].items())
    yield _counter("device_refused", "Requests that the governor refused, by the error's name.", *_by("code", refused))
    for name, count, help_text in (
        ("workflows", len(governor["workflows"]), "Workflows with a step graph."),
        ("reservations", governor["reservations"], "Reservations of device memory."),
        ("remembered_entries", governor["remembered"], "Offloaded entries that may be promoted later."),
    ):
        yield _gauge(name, help_text, (), [((), count)])


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
