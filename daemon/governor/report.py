"""The governor's part of the status. Nothing is changed, and the cost does not depend on the number of entries."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from ...ipc.messages.modes import Tier
from .forms.events import OWNERS_SOURCE, SourceState
from .tiers import Gauge

if TYPE_CHECKING:
    from .governor import Governor


def status(governor: Governor, now: float) -> dict[str, Any]:
    """Sizes in bytes, counts, times in seconds; counters since the daemon started."""
    host = governor.host
    return {
        "gauges": [_gauge(gauge, now) for gauge in sorted(governor.tiers, key=_place)],
        "sources": [_source(each, now) for each in governor.sources],
        "missing_cards": _missing_cards(governor),
        "thresholds": asdict(governor.limits.thresholds),
        "devices": _devices(governor, now),
        "owners": _owners(governor),
        "workflows": governor.workflows.status(),
        "host": {
            "resident_bytes": host.holds.resident_bytes,
            "wanted_bytes": host.holds.wanted_bytes,
            "resident_bytes_max": host.press.resident_bytes_max,
        },
        "remembered": governor.devices.remembered,
        "reservations": governor.reservations.granted,
        "counters": to_builtins(governor.outbox.counters),
    }


def _missing_cards(governor: Governor) -> list[dict[str, str]]:
    """The setting and the name of each card that the configuration names and no gauge has, by the last readings: most
    likely a name is mistyped. Nothing is missing while only the owners of tensors report devices: such a device has a
    gauge once an owner has opened it."""
    devices = [gauge.sample for gauge in governor.tiers if gauge.sample.tier is Tier.DEVICE]
    if all(sample.source == OWNERS_SOURCE for sample in devices):
        return []
    named = [("device.baseline", name) for name, _ in governor.limits.baselines if name]
    named += [("neighbours.servers", place.card) for place in governor.limits.neighbours if place.card]
    known = {sample.gauge for sample in devices}
    return [{"setting": setting, "card": name} for setting, name in dict.fromkeys(named) if name not in known]


def _place(gauge: Gauge) -> tuple[bool, str]:
    """The host first, then devices by name. So a device has the same number whichever was found first."""
    return gauge.sample.tier is Tier.DEVICE, gauge.sample.gauge


def _gauge(gauge: Gauge, now: float) -> dict[str, Any]:
    sample = gauge.sample
    return {
        **sample.shown,
        **to_builtins(gauge.to_message()),
        "source": sample.source,
        "share": round(gauge.share, 4),
        "level": gauge.level.value,
        "stale": sample.stale,
        "age_s": max(0.0, now - sample.began_at),
        "since_s": 0.0 if gauge.since is None else max(0.0, now - gauge.since),
    }


def _source(source: SourceState, now: float) -> dict[str, Any]:
    row: dict[str, Any] = to_builtins(source)
    row["since_s"] = max(0.0, now - row.pop("since"))
    return row


def _devices(governor: Governor, now: float) -> list[dict[str, Any]]:
    """The devices with entries, with reservations, or with counted requests."""
    floors, reservations = governor.floors, governor.reservations
    others = sorted(floors.devices().union(reservations.devices()))
    rows = []
    for name in dict.fromkeys([*(device.name for device in governor.devices), *others]):
        device, gauge = governor.devices.find(name), governor.tiers.find(name)
        row = {
            "device": name,
            "entries": len(device.entries),
            "bytes": device.held_bytes,
            "tokens": sum(owner.tokens for owner in device.owners.values()),
            "ordered_entries": len(device.entries) - device.staying_entries,
            "ordered_bytes": device.held_bytes - device.staying_bytes,
            "owners": len(device.owners),
            "stuck": device.stuck,
            "reserved_bytes": reservations.bytes_of(name),
            "waiting_reservations": len(reservations.waiting(name)),
            "waiting_bytes": reservations.waiting_bytes(name),
            "floor_blocks": floors.blocks(name, now),
            "capacity_blocks": governor.limits.capacity_blocks(None if gauge is None else gauge.sample.total_bytes),
        }
        rows.append(row)
    return rows


def _owners(governor: Governor) -> list[dict[str, Any]]:
    return [
        {
            "client": owner.client,
            "name": governor.outbox.clients[owner.client].name,
            "pid": governor.outbox.clients[owner.client].pid,
            "device": device.name,
            "entries": owner.entries,
            "bytes": owner.size_bytes,
            "ordered_entries": owner.ordered_entries,
            "unresponsive": owner.unresponsive,
        }
        for device in governor.devices
        for owner in device.owners.values()
    ]
