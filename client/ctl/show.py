"""The commands that show a part of a running daemon: `ls`, `why`, `advise`, `clients`, `watch`, `latency`, `config`.

Owns: the rows in which a document is shown. Does not own: the documents (the daemon).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import accumulate, islice
from typing import Any, Final

import click
from click.exceptions import Exit

from ...ipc.messages.control import AdviseQuery, ClientsQuery, ConfigQuery, LatencyQuery, WhyQuery
from .daemon import NAME, Daemon, pass_daemon
from .output import age, as_json, counted, document, local_time, name, number, pairs, share, short, show, size, table
from .parameters import KEY, TAG_DIGITS, keys_meant, namespace_tag

# The namespace's tag, and enough digits of the digest to distinguish the keys of one namespace.
_SHOWN_DIGITS: Final = TAG_DIGITS + 12
_SHARES: Final = (0.5, 0.9, 0.99, 0.999)


def entries_text(entries: list[dict[str, Any]], now_unix_s: float) -> str:
    """A table of entries, 100 columns wide."""
    rows = []
    for entry in entries:
        expires, pinned = entry["expires_unix_s"], "yes" if entry["pinned_by_message"] else ""
        what = (entry["key"][:_SHOWN_DIGITS], size(entry["payload_bytes"]))
        counts = (short(entry["tokens"]), short(entry["uses"]))
        since = (age(now_unix_s - entry[name]) for name in ("created_unix_s", "used_unix_s"))
        ends = "never" if expires is None else age(expires - now_unix_s)
        rows.append((*what, *counts, *since, ends, entry["owner_uid"], pinned))
    return table(("KEY", ">SIZE", ">TOKENS", ">USES", ">AGE", ">IDLE", ">ENDS", ">UID", "PIN"), rows)


@click.command()
@namespace_tag
@click.option("-n", "--count", type=click.IntRange(min=1), metavar="N", help="At most N entries; by default all.")
@as_json
@pass_daemon
def ls(daemon: Daemon, namespace_tag: str | None, count: int | None, as_json: bool) -> None:
    """The stored entries, in no particular order.

    KEY: its first digits, of which 16 are the namespace's tag. AGE: time since it was stored. IDLE: time since its last
    use. ENDS: time until it expires. PIN: whether a client has pinned it for a time; leases are not listed, since they
    come and go with every lookup.
    """
    listed = list(islice(daemon.entries(bytes.fromhex(namespace_tag) if namespace_tag else None), count))
    show({"entries": listed}, as_json, lambda body: entries_text(body["entries"], time.time()))


@click.command()
@click.argument("key", type=KEY)
@as_json
@pass_daemon
def why(daemon: Daemon, key: str, as_json: bool) -> None:
    """What an entry is, and why it is kept, or why it was removed.

    For a stored entry: its size, its worth to the policy, its class, and the number of colder entries. For a removed
    entry: when and why it was removed, and its state then. KEY is hexadecimal. A prefix of a
    stored key is enough if no other stored key begins with it.

    Exit code 1 if the key is unknown: neither stored nor remembered.
    """
    (meant,) = keys_meant(daemon, [key])
    answer = daemon.ask(WhyQuery, meant)
    show(answer, as_json, document)
    raise Exit(1 if answer["state"] == "unknown" else 0)


def advice_text(answer: dict[str, Any]) -> str:
    """The daemon's estimates of the hit ratios of rings of other sizes."""
    if not answer["requests"]:
        return "nothing is known yet: no entry was put or used since the daemon started"
    now_bytes = answer["capacity_bytes"]
    rows = [
        ("requests", f"{number(round(answer['requests']))} uses of entries and puts of new ones"),
        ("found here", f"{share(answer['here'], 1)}, under policy {answer['policy']}, since the daemon started"),
    ]
    if not any(ratio for _, ratio, _ in answer["points"]):
        rows.append(("reuse", "none seen: a larger ring would find nothing either"))
    points = [
        (f"{at / now_bytes:.2f}", size(at), share(ratio, 1), f"± {100 * error:.1f}", "now" if at == now_bytes else "")
        for at, ratio, error in answer["points"]
    ]
    sizes = table((">RING", ">SIZE", ">HIT RATIO", ">ERROR", ""), points)
    return f"{pairs(rows)}\n\nestimated under least recently used:\n\n{sizes}"


@click.command()
@as_json
@pass_daemon
def advise(daemon: Daemon, as_json: bool) -> None:
    """The hit ratios that a ring of another size would give.

    The daemon estimates them from a sample of the keys, for least recently used. "found here" is what its own policy
    found of the same requests. ERROR: in points, of the sampling and of the histogram's resolution.
    """
    show(daemon.ask(AdviseQuery), as_json, advice_text)


def clients_text(rows: list[dict[str, Any]]) -> str:
    """A table of clients and lanes."""
    shown = []
    for row in rows:
        lane, state = None, "greeted"
        if row["lane"] is not None:
            lane, state = f"{row['lane']:x}", "orphaned" if row["orphaned"] else "attached"
        who = (row["client"], name(row["name"]), row["pid"], row["uid"])
        shown.append((*who, lane, row["pins"], short(row["hits"]), short(row["misses"]), state))
    return table((">CLIENT", "NAME", ">PID", ">UID", ">LANE", ">LEASES", ">HITS", ">MISSES", "STATE"), shown)


@click.command()
@as_json
@pass_daemon
def clients(daemon: Daemon, as_json: bool) -> None:
    """The connected clients, and every lane that a process holds.

    LEASES: entries that the client pins now. STATE: "attached"; "greeted" for a client that only sends orders;
    "orphaned" for a lane whose connection has ended while its process, or a fork of it, still has views. PID: as the
    client sees itself.
    """
    show(daemon.ask(ClientsQuery), as_json, lambda body: clients_text(body["clients"]))


@click.command()
@click.option("-n", "--count", type=click.IntRange(min=1), metavar="N", help="End after N events.")
@pass_daemon
def watch(daemon: Daemon, count: int | None) -> None:
    """Prints the daemon's events as they happen.

    One JSON object a line, until Ctrl-C. Each has `event` (attach, put, evict, expire, refuse, claim, limit, mode,
    order, ...), `unix_s`, its Unix time, and `dropped`: the number of events just before it that were dropped because
    this reader was too slow. A last line on stderr counts the dropped events, if any.
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
            click.echo(f"{NAME}: {message}", err=True)


def percentile_s(histogram: Mapping[str, Any], share: float) -> float:
    """The time in seconds that `share` of the requests did not exceed, within its bucket by a straight line. The last
    bucket has no end: its beginning stands for it. 0 without requests."""
    bounds: Sequence[float] = histogram["bounds"]
    counts: Sequence[int] = histogram["counts"]
    wanted = share * sum(counts)
    for at, reached in enumerate(accumulate(counts)):
        if counts[at] and reached >= wanted:
            low = bounds[at - 1] if at else 0.0
            high = bounds[at] if at < len(bounds) else low
            return low + (high - low) * (1 - (reached - wanted) / counts[at])
    return 0.0


def latency_text(body: Mapping[str, Any], slowest: int = 10) -> str:
    """One row for each kind that occurred, and one for the event loop; then the slowest of the slow requests."""
    rows = []
    for kind, histogram in [*body["kinds"].items(), ("event loop lag", body["event_loop_lag"])]:
        if count := sum(histogram["counts"]):
            times = (histogram["sum"] / count, *(percentile_s(histogram, share) for share in _SHARES))
            rows.append((kind, number(count), *map(_ms, times)))
    kinds = table(("REQUEST", ">COUNT", ">MEAN ms", *(f">p{100 * share:g}" for share in _SHARES)), rows)
    slow = sorted(body["slow"], key=lambda row: -row["took_s"])[:slowest]
    if not slow:
        return f"{kinds}\n\nno request took longer than {1000 * body['slow_s']:g} ms"
    slowest_rows = []
    for row in slow:
        payload = size(row["payload_bytes"]) if row["payload_bytes"] else None
        who = f"{name(row['name'])} ({row['client']})" if row["client"] else row["name"]
        slowest_rows.append((local_time(row["unix_s"]), row["kind"], _ms(row["took_s"]), payload, who))
    return f"{kinds}\n\n{table(('WHEN', 'REQUEST', '>ms', '>SIZE', 'CLIENT'), slowest_rows)}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"


@click.command()
@click.option("-n", "--count", type=click.IntRange(min=0), default=10, show_default=True, help="Slow requests shown.")
@as_json
@pass_daemon
def latency(daemon: Daemon, count: int, as_json: bool) -> None:
    """How long requests took, by kind, and the slowest ones.

    The time is that from a request's arrival to its answer.

    The percentiles are since the daemon started. The row "event loop lag" is how late the loop ran its timers: every
    request waits for it. A hit asks nothing of the daemon, so no row has its time.

    Slow is what took longer than log.slow_s; the daemon keeps the latest 128. For a put the time is that until it is
    stored, the client's own copying included.
    """
    show(daemon.ask(LatencyQuery), as_json, lambda body: latency_text(body, count))


@click.command()
@click.argument("name", required=False)
@as_json
@pass_daemon
def config(daemon: Daemon, name: str | None, as_json: bool) -> None:
    """The settings of the running daemon, and where each came from.

    NAME is a setting, such as limits.clients_max, or a table, such as limits. FROM: "default", "file PATH", "env
    VARIABLE", "flag --NAME"; "ring" where existing memory decides, and "tensorctl limit" after that command.
    """
    body = daemon.ask(ConfigQuery)
    rows, verdict = body["settings"], body["reload"]
    if name is not None:
        rows = [row for row in rows if row["key"] == name or row["key"].startswith(f"{name}.")]
        if not rows:
            near = get_close_matches(name, [row["key"] for row in body["settings"]], n=1)
            hint = f"did you mean {near[0]!r}?" if near else "`tensorctl config` has all"
            raise click.UsageError(f"No such setting {name!r}; {hint}")
    shown = ((row["key"], row["value"], row["source"]) for row in rows)
    show(rows, as_json, lambda _: table(("SETTING", "VALUE", "FROM"), shown))
    if verdict["refused"]:
        click.echo(f"{NAME}: the last reload was refused: {verdict['refused']}", err=True)
    if verdict["waiting"]:
        keys = ", ".join(row["key"] for row in verdict["waiting"])
        click.echo(f"{NAME}: these wait for a restart: {keys}", err=True)
