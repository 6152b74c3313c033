"""Documents as a daemon tells them, written out: what a test needs of one, without a daemon or a GPU."""

from __future__ import annotations

from typing import Any

GIB = 1 << 30
MIB = 1 << 20
CARD = "0000:65:00.0"
OTHER = "0000:b3:00.0"


def status(**changed: Any) -> dict[str, Any]:
    """A daemon with a card under pressure, and another of a file. `changed` replaces figures of the first level."""
    latency = {
        "kinds": {"Commit": {"bounds": [0.001, 0.01], "counts": [5, 2, 1], "sum": 0.05}},
        "event_loop_lag": {"bounds": [0.001, 0.01], "counts": [90, 1, 0], "sum": 0.02},
    }
    return (
        {"version": "0.1.0", "latency": latency, "protocol": 1, "instance": "system", "epoch": 3}
        | {"pid": 4242, "uid": 997, "uptime_s": 5025.5, "ring_bytes": 8 * GIB, "ring_ready_bytes": 8 * GIB}
        | {"clients": 3, "lanes": 3, "lanes_orphaned": 1}
        | {"quotas": {"refusals": {"clients": 2}, "requests_delayed": 5}, "pins": 12, "fence": "expedited"}
        | {"remote": remote(), "store": store(), "governor": governor()}
        | changed
    )


def remote(**changed: Any) -> dict[str, Any]:
    return (
        {"address": "valkey://cache.example:6379", "serves": True, "why": "", "corrupt": 2, "full": False}
        | {"read_only": False, "not_agreed": 0, "writes": 2}
        | changed
    )


def store(**changed: Any) -> dict[str, Any]:
    ratios = {
        "minute": {"hits": 90, "lookups": 120},
        "ring": {"hits": 700, "lookups": 1000},
        "since_start": {"requests": 4096, "here": 3072, "lru": 2048},
        "sampled": 8,
    }
    idle_s = {"bounds": [1.0, 60.0], "counts": [10, 80, 10], "sum": 4000.0}
    return (
        {"epoch": 3, "policy": "hazard", "entries": 640, "max_entries": 131072, "tokens": 655360, "used_bytes": 5 * GIB}
        | {"max_bytes": 8 * GIB, "ring_bytes": 8 * GIB, "ring_growing": False, "largest_free_bytes": 2 * GIB}
        | {"resident_bytes": 8 * GIB, "withdrawn_bytes": 0, "retired_bytes": 9 * MIB}
        | {"hit_ratios": ratios, "idle_at_eviction_s": {"capacity": idle_s}}
        | {"grants": 3, "lent_bytes": 6 * MIB, "grants_waiting": 0, "pins": 1, "pinned_bytes": 9 * MIB, "namespaces": 2}
        | {"claims_held": 2, "claims_waiting": 5, "claims_granted": 900, "claims": {"compute": 900, "hit": 50}}
        | {"puts": {"stored": 800, "existed": 20, "refused": 4}, "evictions": {"capacity": 100, "ttl": 60}}
        | {"refusals": {"LimitReached": 4}, "remote": {"fetched": 30, "missed": 900}, "unstorable": []}
        | {"remote_read_bytes": 300 * MIB, "remote_written_bytes": 5 * GIB, "put_bytes": 7 * GIB}
        | {"evicted_bytes": 2 * GIB, "scans": 40, "hits": 9000, "misses": 1000, "found_corrupt": 0}
        | {"prefix_tokens_asked": 90_000, "prefix_tokens_matched": 60_000}
        | changed
    )


def gauge(name: str, used_bytes: int, total_bytes: int, mode: str, **changed: Any) -> dict[str, Any]:
    tier, source = ("host", "cgroup") if name == "host" else ("device", "nvidia")
    return (
        {"gauge": name, "tier": tier, "source": source, "used_bytes": used_bytes, "total_bytes": total_bytes}
        | {"baseline_bytes": 0, "share": used_bytes / total_bytes, "mode": mode, "level": mode, "stale": False}
        | {"age_s": 1.2, "since_s": 192.4, "refuses": mode == "emergency"}
        | changed
    )


def source(name: str, **changed: Any) -> dict[str, Any]:
    whole = {"source": name, "tier": "device", "state": "ok", "since_s": 300.0, "why": "", "problem": False}
    return whole | changed


def device(name: str, **changed: Any) -> dict[str, Any]:
    return (
        {"device": name, "entries": 300, "bytes": 6 * GIB, "tokens": 307200, "ordered_entries": 12}
        | {"ordered_bytes": 240 * MIB, "reserved_bytes": GIB, "waiting_reservations": 0, "waiting_bytes": 0}
        | {"owners": 2, "stuck": "", "floor_blocks": 35, "capacity_blocks": 40960}
        | changed
    )


def owner(client: int, **changed: Any) -> dict[str, Any]:
    return (
        {"client": client, "name": f"engine-{client}", "pid": 5000 + client, "device": CARD, "entries": 150}
        | {"bytes": 3 * GIB, "ordered_entries": 6, "unresponsive": False}
        | changed
    )


def governor(**changed: Any) -> dict[str, Any]:
    gauges = [
        gauge("host", 30 * GIB, 64 * GIB, "relaxed"),
        gauge(CARD, 70 * GIB, 80 * GIB, "pressure"),
        gauge(OTHER, 79 * GIB, 80 * GIB, "emergency", source="file"),
    ]
    counters = (
        {"registered": 500, "promoted": 30, "offloaded": 120, "dropped": 40, "released": 30, "gone_with_owner": 10}
        | {"kept": 5, "timed_out": 0, "ordered": 177, "freed_bytes": 4 * GIB, "refused": {"UnderPressure": 6}}
    )  # fmt: skip
    return {
        "gauges": gauges,
        "sources": [source("nvidia")],
        "thresholds": {"normal": 0.7, "pressure": 0.85, "critical": 0.92, "emergency": 0.96, "hysteresis": 0.02},
        "devices": [device(CARD), device(OTHER, entries=0, bytes=0, owners=0)],
        "owners": [owner(1), owner(2)],
        "workflows": [{"workflow": "w", "client": 1, "step": 2, "agents": 4, "steps": 6}],
        "host": {"resident_bytes": 5 * GIB, "wanted_bytes": 5 * GIB, "resident_bytes_max": None},
        "remembered": 17,
        "reservations": 1,
        "counters": counters,
        **changed,
    }


def client(number: int | None, **changed: Any) -> dict[str, Any]:
    return (
        {"client": number, "name": f"engine-{number}", "pid": 5000 + (number or 0), "uid": 1000}
        | {"lane": 10 + (number or 0), "orphaned": number is None, "pins": 4, "hits": 3000, "misses": 300}
        | changed
    )
