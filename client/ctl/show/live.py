"""`clients` and `watch`: the connected clients, and the daemon's events.

Owns: their rows. Does not own: the events.
"""

from __future__ import annotations

import json
from typing import Any

import click

from ..daemon import Daemon, pass_daemon
from ..output import as_json, counted, name, short, show, table


def clients_text(rows: list[dict[str, Any]]) -> str:
    """A table of clients and lanes."""
    return table(
        (">CLIENT", "NAME", ">PID", ">UID", ">LANE", ">LEASES", ">HITS", ">MISSES", "STATE"),
        [
            (
                row["client"],
                name(row["name"]),
                row["pid"],
                row["uid"],
                None if row["lane"] is None else f"{row['lane']:x}",
                row["pins"],
                short(row["hits"]),
                short(row["misses"]),
                "orphaned" if row["orphaned"] else "greeted" if row["lane"] is None else "attached",
            )
            for row in rows
        ],
    )


@click.command()
@as_json
@pass_daemon
def clients(daemon: Daemon, as_json: bool) -> None:
    """The connected clients, and every lane that a process holds.

    LEASES: entries that the client pins now. STATE: "attached"; "greeted" for a client that only sends orders;
    "orphaned" for a lane whose connection has ended while its process, or a fork of it, still has views. PID: as the
    client sees itself.
    """
    show({"clients": daemon.clients()}, as_json, lambda body: clients_text(body["clients"]))


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
