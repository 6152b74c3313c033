"""Converts the status document into Prometheus metrics: names, labels and help texts.

Owns: the name, the type and the help text of each metric. Does not own the figures (core), nor the socket
(web/pages.py). prometheus_client formats.

Invariants: pure. Metric names do not depend on past events, except that a label value without counts is left out. The
number of samples depends on those of gauges, devices, reasons and codes, never on those of entries or clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from types import SimpleNamespace
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

_GAUGES: Final = """
uptime_seconds uptime_s Time since this daemon began to serve.
epoch epoch Number of this incarnation of the daemon; it rises with each start.
ring_bytes ring_bytes Size of the ring.
ring_ready_bytes ring_ready_bytes Bytes of the ring that are allocated so far.
clients clients Connected clients.
lanes lanes Lanes that processes use.
leases pins Entries pinned by readers, counted once for each reader.
entries store.entries Entries in the host tier.
entries_max store.max_entries Entries that the host tier may have.
used_bytes store.used_bytes Bytes of the ring that entries take.
limit_bytes store.max_bytes Bytes of the ring that entries may take.
retired_bytes store.retired_bytes Memory of evicted entries that readers still view.
resident_bytes store.resident_bytes Bytes of the ring that are in memory now.
withdrawn_bytes store.withdrawn_bytes Bytes of the ring that were returned to the system under pressure.
grants_waiting store.grants_waiting Requests for a place of the ring that wait for room or for their turn.
claims_waiting store.claims_waiting Clients that wait for a missing key.
remote_serves remote.serves 1 while the remote store is used, 0 while it is left alone after errors.
remote_full remote.full 1 while the remote store takes no writes because it is full.
remote_read_only remote.read_only 1 while the remote store takes no writes because it is read-only.
remote_not_agreed remote.not_agreed Invalidated namespaces whose generation the remote store does not take.
remote_queued remote.queued Entries that wait to be written to the remote store.
gauge_used_bytes{gauge,tier} governor.gauges.used_bytes Used bytes of the memory that the gauge measures.
gauge_total_bytes{gauge,tier} governor.gauges.total_bytes Total bytes of the memory that the gauge measures.
gauge_baseline_bytes{gauge,tier} governor.gauges.baseline_bytes Used bytes held by plan; modes are about the rest.
gauge_stale{gauge,tier} governor.gauges.stale 1 while no source can read the gauge; the last reading is shown.
gauge_refuses{gauge,tier} governor.gauges.refuses 1 while new entries are refused.
gauge_source{gauge,tier,source} derived.sources.is 1 for the source of the gauge; `file` has made-up readings.
gauge_source_hanging{source,tier} derived.hanging.is 1 while a reading of the source has not returned within 3 s.
mode{gauge,tier,mode} derived.modes.is 1 for the current mode of the gauge, 0 for the others.
threshold_ratio{mode} derived.thresholds Share of a tier at which a mode begins.
device_entries_bytes{device} governor.devices.bytes Bytes of entries in the device tier.
device_ordered_bytes{device} governor.devices.ordered_bytes Bytes of entries that owners were ordered to release.
device_reserved_bytes{device} governor.devices.reserved_bytes Free memory that clients have reserved.
device_waiting_reservations{device} governor.devices.waiting_reservations Reservations that wait until memory is free.
device_stuck{device} derived.devices.stuck 1 after an eviction pass that did not lower the used bytes.
device_owners_unresponsive{device} derived.devices.unresponsive Owners that do not carry out orders.
"""
"""A line for each: the name without prefix, its labels, the path of the figure in the document, the help. A path
through a list gives a sample for each row, with labels of the row's fields; one that ends at a dict, for each key."""
_COUNTERS: Final = """
queries derived.queries Lookups.
hits{tier} derived.hits Lookups by the tier that had the entry, or miss.
sampled_requests store.hit_ratios.since_start.requests Uses and puts of a sample of the keys, scaled to all of them.
sampled_hits{cache} derived.sampled_hits Sampled uses and puts whose key the store had, or LRU would have had.
put_bytes store.put_bytes Bytes stored by puts.
evicted_bytes store.evicted_bytes Bytes of removed entries, for any reason.
scans store.scans Fences and scans of all lanes.
remote_read_bytes store.remote_read_bytes Bytes of payloads read from the remote store.
remote_written_bytes store.remote_written_bytes Bytes of payloads written to the remote store.
prefix_tokens_asked store.prefix_tokens_asked Tokens of the queried sequences.
prefix_tokens_matched store.prefix_tokens_matched Tokens of the queried sequences that were cached.
found_corrupt store.found_corrupt Must stay 0: entries that differ from what was stored.
remote_corrupt remote.corrupt Objects of the remote store that are not what was stored.
puts{outcome} store.puts Puts that have ended.
evictions{reason} store.evictions Removed entries, by reason.
refusals{code} store.refusals Requests for a place that the store refused, by the error's name. A put may ask again.
claims{answer} store.claims Requests for a claim, by the daemon's answer.
remote{outcome} store.remote Fetches from the remote store and writes to it, by outcome.
requests_delayed quotas.requests_delayed Requests that waited for the rate of their uid.
quota_refused{kind} quotas.refusals Requests and connections refused by a quota of one uid or of all uids, by kind.
device_registered governor.counters.registered Entries that owners have registered.
device_promoted governor.counters.promoted Registrations of entries that had been offloaded.
device_offloaded governor.counters.offloaded Entries offloaded to the host tier.
device_dropped governor.counters.dropped Entries removed without a copy in the host tier.
device_timed_out governor.counters.timed_out Entries whose owner did not answer in time.
device_freed_bytes governor.counters.freed_bytes Bytes returned to drivers, as owners report them.
device_refused{code} governor.counters.refused Requests that the governor refused, by the error's name.
"""
_HISTOGRAMS: Final = """
idle_at_eviction_seconds{reason} store.idle_at_eviction_s Time from the last use of an entry to its removal.
request_seconds{kind} latency.kinds Time from a request's arrival to its answer, by kind of request.
event_loop_lag_seconds latency.event_loop_lag Time by which the event loop ran a timer too late.
"""


def text(status: Figures, accept: str = "", process: Iterable[Metric] = ()) -> tuple[bytes, str]:
    """The metrics in the format of an HTTP `Accept` header, and the content type of that format. `status`: the answer
    to a StatusQuery, with that to a LatencyQuery as `latency`; `process`: metrics of the process, which follow."""
    encode, content_type = choose_encoder(accept)
    registry = SimpleNamespace(collect=lambda: chain(families(status), process))
    return escaped_lines(encode(registry)), content_type


def families(status: Figures) -> Iterator[Metric]:
    """All metric families, in a fixed order. Those of a remote store are left out without one."""
    yield InfoMetricFamily(
        "tensord", "The daemon.", {name: str(status[name]) for name in ("version", "instance", "protocol")}
    )
    figures = {**status, "derived": _derived(status)}
    for family, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, labels, path, help_text in _rows(table):
            if (samples := _samples(figures, path, labels)) is not None:
                made = family(name, help_text, labels=labels)
                for values, amount in samples:
                    made.add_metric(values, amount)
                yield made
    for name, labels, path, help_text in _rows(_HISTOGRAMS):
        histogram = HistogramMetricFamily(name, help_text, labels=labels)
        found = _at(figures, path)
        for values, each in [((value,), each) for value, each in sorted(found.items())] if labels else [((), found)]:
            bounds = [*map(floatToGoString, each["bounds"]), "+Inf"]
            histogram.add_metric(values, list(zip(bounds, accumulate(each["counts"]), strict=True)), each["sum"])
        yield histogram


def _rows(table: str) -> Iterator[tuple[str, list[str], str, str]]:
    """The full name, the labels, the path and the help of each line."""
    for line in table.strip().splitlines():
        named, path, help_text = line.split(maxsplit=2)
        name, _, labels = named.partition("{")
        yield f"tensord_{name}", labels.rstrip("}").split(",") if labels else [], path, help_text


def _derived(status: Figures) -> Figures:
    """Figures that the document has in another form."""
    store, governor = status["store"], status["governor"]
    gauges, since = governor["gauges"], store["hit_ratios"]["since_start"]
    # `hits` has the value `miss` too, so the sum of its samples is `queries`.
    tiers = {"device": governor["counters"].get("used", 0), "host": store["hits"], "miss": store["misses"]}
    silent = [owner["device"] for owner in governor["owners"] if owner["unresponsive"]]
    return {
        "queries": sum(tiers.values()),
        "hits": tiers,
        "sampled_hits": {"store": since["here"], "lru": since["lru"]},
        "sources": [{**each, "is": 1} for each in gauges],
        "hanging": [{**each, "is": each["state"] == "hanging"} for each in governor["sources"]],
        "modes": [{**each, "mode": mode.value, "is": each["mode"] == mode} for each in gauges for mode in Mode],
        "thresholds": {name: share for name, share in governor["thresholds"].items() if name != "hysteresis"},
        "devices": [
            {"device": each["device"], "stuck": bool(each["stuck"]), "unresponsive": silent.count(each["device"])}
            for each in governor["devices"]
        ],
    }


def _at(figures: Figures, path: str) -> Any:
    """The figure at a dotted path, None if there is none. For a list, the pairs of each row and its figure."""
    found: Any = figures
    for name in path.split("."):
        if isinstance(found, list):
            return [(row, row.get(name)) for row in found]
        if found is None:
            return None
        found = found.get(name)
    return found


def _samples(figures: Figures, path: str, labels: Sequence[str]) -> list[tuple[Sequence[str], float]] | None:
    """The label values and the amount of each sample; None if the document does not have the figure."""
    found = _at(figures, path)
    if isinstance(found, dict):
        return [((value,), amount) for value, amount in sorted(found.items())]
    if isinstance(found, list):
        numbers = [(row, amount) for row, amount in found if isinstance(amount, int | float)]
        return [(tuple(row[label] for label in labels), amount) for row, amount in numbers]
    return None if found is None else [((), found)]
