"""`clients` and `watch`: who is there, and what happens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

import click

from .daemon import Daemon, pass_daemon, understood
from .tables import number, short, table

_HEAD: Final = ("CLIENT", "NAME", "PID", "UID", "LANE", "LEASES", "HITS", "MISSES", "STATE")
_NAME_CHARS_MAX: Final = 24


def clients_text(rows: Iterable[dict[str, Any]]) -> str:
    """Clients and lanes for people, within 100 columns."""
    with understood("list of clients"):
        return table(
            _HEAD,
            [
                (
                    _or_dash(row["client"]),
                    _cut(row["name"]) or "-",
                    _or_dash(row["pid"]),
                    _or_dash(row["uid"]),
                    "-" if row["lane"] is None else f"{row['lane']:x}",
                    str(row["pins"]),
                    short(row["hits"]),
                    short(row["misses"]),
                    _state(row),
                )
                for row in rows
            ],
            right=(0, 2, 3, 4, 5, 6, 7),
        )


def _state(row: dict[str, Any]) -> str:
    if row["orphaned"]:
        return "orphaned"
    return "greeted" if row["lane"] is None else "attached"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _cut(name: str) -> str:
    return name if len(name) <= _NAME_CHARS_MAX else name[: _NAME_CHARS_MAX - 3] + "..."


@click.command()
@click.option("--json", "as_json", is_flag=True, help="The rows as the daemon gives them.")
@pass_daemon
def clients(daemon: Daemon, as_json: bool) -> None:
    """Who is connected, and every lane that somebody still holds.

    LEASES are entries that this client keeps in place now. STATE is "attached"; "greeted" of who only sends orders;
    "orphaned" of a lane whose connection ended while its process, or a fork of it, still holds views. PID as the client
    sees itself.
    """
    rows = daemon.clients()
    click.echo(json.dumps({"clients": rows}, indent=2) if as_json else clients_text(rows))


@click.command()
@click.option("-n", "--count", type=click.IntRange(min=1), metavar="N", help="End after N events.")
@pass_daemon
def watch(daemon: Daemon, count: int | None) -> None:
    """What happens, as it happens: one JSON object a line, until Ctrl-C.

    Each has `event` (put, evict, expire, refuse, claim, limit, mode, order, ...) and `dropped`: how many events just
    before it were not told, because this reader did not keep up. The end says how many were dropped before the last
    event that was read, if any.
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
            told = f"{number(dropped)} events were dropped: they came faster than they were read"
            click.echo(f"tensorctl: {told}", err=True)
