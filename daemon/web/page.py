"""The figures of the page for browsers: those of `tensorctl status`, with clients, entries, slow requests.

Owns: the choice of figures, and how many rows each list has. Does not own: the figures, their display (page.html), and
how the page is served (web/page_server.py). Pure: documents in, a document out.

Invariant: the size of the answer is limited, however many clients, entries, gauges and namespaces there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

ROWS_MAX: Final = 10
"""The most rows of each list that may be long, such as clients and entries."""
CARDS_MAX: Final = 64
"""The most gauges, devices and failing sources of gauges."""

KEY_DIGITS: Final = 28
"""The first hexadecimal digits of an entry's key, as in `tensorctl ls`. Nobody can ask for an entry by them."""

Document = Mapping[str, Any]

_DAEMON: Final = ("version", "instance", "pid", "epoch", "uptime_s")
_STORE: Final = (
    "entries",
    "tokens",
    "used_bytes",
    "max_bytes",
    "largest_free_bytes",
    "policy",
    "hits",
    "misses",
    "puts",
    "evictions",
    "hit_ratios",
)


def figures(
    status: Document,
    health: Document,
    clients: Sequence[Document],
    entries: Sequence[Document],
    slow: Document,
    advice: Document,
    unix_s: float,
) -> dict[str, Any]:
    """The document that the page shows.

    Args:
        status, health, slow, advice: the bodies of the answers to StatusQuery, HealthQuery, SlowQuery and AdviseQuery.
        clients, entries: the rows of the answers to ClientsQuery and EntriesQuery.
        unix_s: the present Unix time.
    """
    governor = status["governor"]
    failing = [source for source in governor["sources"] if source["problem"]]
    slowest = sorted(slow["requests"], key=lambda row: -row["took_s"])
    return {
        "unix_s": unix_s,
        **{name: status[name] for name in _DAEMON},
        "problems": _first(health["problems"]),
        "store": {name: status["store"][name] for name in _STORE},
        "device_hits": governor["counters"].get("used", 0),
        "resident_bytes": governor["host"]["resident_bytes"],
        "thresholds": governor["thresholds"],
        "gauges": _first([_without_processes(gauge) for gauge in governor["gauges"]], CARDS_MAX),
        "devices": _first(governor["devices"], CARDS_MAX),
        "sources": _first(failing, CARDS_MAX),
        "processes": _first(_processes(governor["gauges"])),
        "neighbours": _first(governor["neighbours"]),
        "transitions": _first(governor["transitions"][::-1]),
        "clients": _first(_ranked(clients, governor["owners"])),
        "entries": {
            **_first(_most_used(entries)),
            "examined": len(entries),
            "stored": status["store"]["entries"],
        },
        "slow": {**_first(slowest), "slow_s": slow["slow_s"]},
        "namespaces": {**_first(_namespaces(advice)), "policy": advice["policy"]},
    }


def _first(rows: Sequence[Any], most: int = ROWS_MAX) -> dict[str, Any]:
    return {"rows": list(rows[:most]), "more": max(0, len(rows) - most)}


def _without_processes(gauge: Document) -> dict[str, Any]:
    return {name: value for name, value in gauge.items() if name != "processes"}


def _processes(gauges: Sequence[Document]) -> list[dict[str, Any]]:
    """The processes on all cards, those with the most bytes first."""
    rows = [{**each, "card": gauge["gauge"]} for gauge in gauges for each in gauge.get("processes", ())]
    return sorted(rows, key=lambda each: -(each["bytes"] or 0))


def _most_used(entries: Sequence[Document]) -> list[dict[str, Any]]:
    return [
        {
            **{name: entry[name] for name in ("uses", "payload_bytes", "tokens", "used_unix_s")},
            "key": entry["key"][:KEY_DIGITS],
        }
        for entry in sorted(entries, key=lambda entry: -entry["uses"])
    ]


def _ranked(clients: Sequence[Document], owners: Sequence[Document]) -> list[dict[str, Any]]:
    """Clients that do not answer orders, then those with the most bytes on devices, then the busiest."""
    held: dict[object, list[Document]] = {}
    for owner in owners:
        held.setdefault(owner["client"], []).append(owner)
    rows = []
    for client in clients:
        owned = held.get(client["client"], ())
        rows.append(
            {
                **{name: client[name] for name in ("client", "name", "pid", "pins", "hits", "misses", "orphaned")},
                "attached": client["lane"] is not None,
                "device_bytes": sum(owner["bytes"] for owner in owned),
                "unresponsive": any(owner["unresponsive"] for owner in owned),
            }
        )
    return sorted(
        rows, key=lambda row: (row["unresponsive"], row["device_bytes"], row["pins"] + row["hits"]), reverse=True
    )


def _namespaces(advice: Document) -> list[dict[str, Any]]:
    """The tag of each of the busiest namespaces, its sampled requests, and the estimated hit ratio at the present
    size."""
    return [
        {
            "namespace": curve["namespace"],
            "requests": curve["requests"],
            "hit_ratio": next(ratio for size, ratio, _ in curve["points"] if size == advice["capacity_bytes"]),
        }
        for curve in advice["curves"]
        if curve["namespace"] is not None
    ]
