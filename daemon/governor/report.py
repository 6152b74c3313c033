"""The governor's part of the status. Owns only its form. Invariants: nothing is changed, and the cost does not depend
on the number of entries."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...ipc.messages.modes import Tier
from .forms.events import SourceState
from .modes.configured_cards import missing_cards
from .modes.tiers import Gauge

if TYPE_CHECKING:
    from .governor import Governor


def status(governor: Governor, now: float) -> dict[str, Any]:
    """Sizes in bytes, counts, times in seconds; counters since the daemon started."""
    host, tiers = governor.host, governor.tiers
    return {
        "gauges": [_gauge(governor, gauge, now) for gauge in sorted(tiers, key=_place)],
        "sources": [_source(each, now) for each in governor.sources or ()],
        "missing_cards": missing_cards(governor.limits, tiers),
        "thresholds": asdict(governor.limits.thresholds),
        "devices": _devices(governor, now),
        "owners": governor.devices.owners(),
        "workflows": governor.workflows.status(),
        "host": {
            "resident_bytes": host.resident_bytes,
            "wanted_bytes": host.wanted_bytes,
            "resident_bytes_max": host.press.resident_bytes_max,
        },
        "remembered": governor.devices.remembered,
        "reservations": len(governor.reservations),
        "counters": governor.counters.as_dict(),
    }


def _place(gauge: Gauge) -> tuple[bool, str]:
    """The host first, then devices by name. So a device has the same number whichever was found first."""
    return gauge.sample.tier is Tier.DEVICE, gauge.sample.gauge


def _gauge(governor: Governor, gauge: Gauge, now: float) -> dict[str, Any]:
    sample = gauge.sample
    return {
        **sample.shown,
        "gauge": sample.gauge,
        "tier": sample.tier.value,
        "source": sample.source,
        "used_bytes": sample.used_bytes,
        "total_bytes": sample.total_bytes,
        "baseline_bytes": gauge.baseline_bytes,
        "share": round(gauge.share, 4),
        "mode": gauge.mode.value,
        "level": gauge.level.value,
        "stale": sample.stale,
        "age_s": max(0.0, now - sample.began_at),
        "since_s": 0.0 if gauge.since is None else max(0.0, now - gauge.since),
        "refuses": gauge.refuses,
    }


def _source(source: SourceState, now: float) -> dict[str, Any]:
    return {
        "source": source.source,
        "tier": source.tier.value,
        "state": source.state,
        "since_s": max(0.0, now - source.since),
        "why": source.why,
        "problem": source.problem,
    }


_EMPTY: dict[str, Any] = {
    "entries": 0,
    "bytes": 0,
    "tokens": 0,
    "ordered_entries": 0,
    "ordered_bytes": 0,
    "owners": 0,
    "stuck": "",
}


def _devices(governor: Governor, now: float) -> list[dict[str, Any]]:
    """The devices with entries, with reservations, or with counted requests."""
    floors, reservations, queue = governor.floors, governor.reservations, governor.queue
    rows = {row["device"]: row for row in governor.devices.status()}
    for device in sorted((floors.devices() | reservations.devices() | {*queue.devices()}) - rows.keys()):
        rows[device] = {"device": device, **_EMPTY}
    found = []
    for device, row in rows.items():
        gauge = governor.tiers.find(device)
        capacity_blocks = governor.limits.capacity_blocks(None if gauge is None else gauge.sample.total_bytes)
        found.append(
            row
            | {
                "reserved_bytes": reservations.bytes_of(device),
                "waiting_reservations": queue.count(device),
                "waiting_bytes": queue.waiting_bytes(device),
                "floor_blocks": floors.blocks(device, now),
                "capacity_blocks": capacity_blocks,
            }
        )
    return found
