"""`clients` and `watch`: the connected clients, and the daemon's events.

Owns: their display. Does not own: the events.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

import click

from .daemon import Daemon, pass_daemon, understood
from .tables import counted, cut, short, table

_HEAD: Final = ("CLIENT", "NAME", "PID", "UID", "LANE", "LEASES", "HITS", "MISSES", "STATE")
_NAME_CHARS_MAX: Final = 24


def clients_text(rows: Iterable[dict[str, Any]]) -> str:
    """A table of clients and lanes, within 100 columns."""
    with understood("list of clients"):
        return table(
            _HEAD,
            [
                (
                    _or_dash(row["client"]),
                    cut(row["name"], _NAME_CHARS_MAX, "...") or "-",
                    _or_dash(row["pid"]),
                    _or_dash(row["uid"]),
                    "-" if row["lane"] is None else f"{row['lane']:x}",
                    str(row["pins"]),
                    short(row["hits"]),
                    short(row["misses"]),
                    client_state(row),
                )
                for row in rows
            ],
            right=(0, 2, 3, 4, 5, 6, 7),
        )


def client_state(row: Mapping[str, Any]) -> str:
    """The state of a client or lane; see `clients`."""
    if row["orphaned"]:
        return "orphaned"
    return "greeted" if row["lane"] is None else "attached"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the daemon's JSON.")
@pass_daemon
def clients(daemon: Daemon, as_json: bool) -> None:
    """The connected clients, and every lane that a process holds.

    LEASES: entries that the client pins now. STATE: "attached"; "greeted" for a client that only sends orders;
    "orphaned" for a lane whose connection has ended while its process, or a fork of it, still has views. PID: as the
    client sees itself.
    """
    rows = daemon.clients()
    click.echo(json.dumps({"clients": rows}, indent=2) if as_json else clients_text(rows))


@click.command()
@click.option("-n", "--count", type=click.IntRange(min=1), metavar="N", help="End after N events.")
@pass_daemon
def watch(daemon: Daemon, count: int | None) -> None:
    """Prints the daemon's events as they happen: one JSON object a line, until Ctrl-C.

    Each has `event` (attach, put, evict, expire, refuse, claim, limit, mode, order, ...), `unix_s`, its Unix time, and
    `dropped`: the number of events just before it that were dropped because this reader was too slow. A last line on
    stderr counts the dropped events, if any.
    """
    dropped = 0
    try:
        for seen, event in enumerate(daemon.events(), 1):
            dropped += event.dropped
            click.echo(json.dumps({**event.body, "dropped": event.dropped}))
            if seen == count:
                break
    except KeyboardInterrupt:
        pass
    finally:
        if dropped:
            message = f"{counted(dropped, 'event was', 'events were')} dropped: they came faster than they were read"
            click.echo(f"tensorctl: {message}", err=True)
