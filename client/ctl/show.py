"""The commands that show a running daemon: its status and health, entries, clients, events, times and settings.

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

from ...ipc.messages.control import AdviseQuery, ClientsQuery, ConfigQuery, HealthQuery, LatencyQuery, WhyQuery
from .daemon import NAME, Daemon, pass_daemon
from .output import (
    age,
    as_json,
    counted,
    document,
    local_time,
    name,
    number,
    pairs,
    parts,
    share,
    show,
    size,
    table,
    words,
)
from .parameters import KEY, TAG_DIGITS, keys_meant, namespace_tag

# The namespace's tag, and enough digits of the digest to distinguish the keys of one namespace.
_SHOWN_DIGITS: Final = TAG_DIGITS + 12
_SHARES: Final = (0.5, 0.9, 0.99, 0.999)
Rows = list[tuple[str, str]]

_STORE: Final = {
    "pinned": "pins for a time {pins} ({pinned_bytes}); evicted entries that readers hold {retired_bytes}",
    "lookups": "hits {hits}, misses {misses}",
    "puts": "{puts}; {put_bytes} stored; lent {lent_bytes} in {grants} places, waiting for places {grants_waiting}",
    "evictions": "{evictions}; {evicted_bytes} in all",
    "claims": "held {claims_held}, waited for {claims_waiting}; granted {claims_granted}",
}
_REMOTE: Final = "; {remote}; read {remote_read_bytes}, written {remote_written_bytes}"
_UNSTORABLE: Final = "namespace {namespace}: values {count}, the last {ago_s} ago: {code}: {text}"
_WORKFLOW: Final = "{workflow}: client {client}, at step {step}; steps {steps} of agents {agents}"
_TIER: Final = (
    "registered {registered}: offloaded {offloaded}, dropped {dropped}, released {released}, "
    "removed with their owner {gone_with_owner}; refused {refused}"
)

# A part is shown if its field is neither 0, false, empty nor missing.
_GAUGE: Final = {
    "gauge": "{gauge}: {mode} for {since_s}, {share} of {total_bytes}",
    "baseline_bytes": " beside a baseline of {baseline_bytes}",
    "source": "; from {source}, read {age_s} ago",
    "stale": "; STALE: its last value is used",
    "refuses": "; REFUSES new entries",
}
_DEVICE: Final = {
    "device": "{device}: {entries} entries of {owners} clients, {bytes}, tokens {tokens}",
    "ordered_entries": "; leaving {ordered_entries} ({ordered_bytes})",
    "reserved_bytes": "; reserved {reserved_bytes}",
    "waiting_reservations": "; {waiting_reservations} reservations wait for {waiting_bytes}",
    "floor_blocks": "; floor {floor_blocks} of {capacity_blocks} blocks",
    "stuck": "; STUCK",
}


def status_text(body: dict[str, Any], health: dict[str, Any]) -> str:
    store, governor = body["store"], body["governor"]
    head = "tensord {version}, instance {instance}: pid {pid}, uid {uid}, epoch {epoch}, up {uptime_s}"
    rows = [("PROBLEM", problem) for problem in health["problems"]]
    rows += [("notice", notice) for notice in health["notices"]]
    rows += [("NOT STORED", words(each, _UNSTORABLE)) for each in store["unstorable"]]
    rows += _memory(body, store)
    rows.append(
        ("clients", words(body, "{clients}, with leases {pins}; lanes {lanes}, {lanes_orphaned} of closed connections"))
    )
    rows += [(name, words(store, template)) for name, template in _STORE.items()]
    rows.append(("refusals", words(body, "{store[refusals]}; by quota: {quotas[refusals]}")))
    rows += _ratios(store["hit_ratios"])
    made_room = "nothing was evicted for the bytes of other entries"
    if idle := store["idle_at_eviction_s"].get("capacity"):
        median, tenth = (age(percentile_s(idle, share)) for share in (0.5, 0.1))
        made_room = f"median idle time of evicted entries {median}; one in ten was idle for less than {tenth}"
    rows.append(("made room", made_room))
    if remote := body["remote"]:
        serves = f"{remote['address']} {'serves' if remote['serves'] else 'LEFT ALONE'}"
        rows.append(("remote", serves + words(store, _REMOTE)))
    return f"{words(body, head)}\n\n{pairs(rows)}\n\n{pairs(_pressure(governor))}"


def _memory(body: dict[str, Any], store: dict[str, Any]) -> Rows:
    used, limit = store["used_bytes"], store["max_bytes"]
    ring = (
        f"{size(used)} of {size(limit)} used ({share(used, limit)}); largest free {size(store['largest_free_bytes'])}"
    )
    if limit < body["ring_bytes"]:
        ring += f"; limited to {size(limit)} of a ring of {size(body['ring_bytes'])}"
    if body["ring_ready_bytes"] < body["ring_bytes"]:
        ring += f"; {size(body['ring_ready_bytes'])} ready" + (", growing" if store["ring_growing"] else "")
    entries = f"{number(store['entries'])} of {number(store['max_entries'])}, policy {store['policy']}"
    return [("ring", ring), ("entries", entries)]


def _ratios(figures: dict[str, Any]) -> Rows:
    """The hit ratio, and that of a sample of requests beside the ratio that least recently used would have had."""
    minute, ring, since = figures["minute"], figures["ring"], figures["since_start"]
    lookups = f"{share(minute['hits'], minute['lookups'])} in the last minute, {share(ring['hits'], ring['lookups'])}"
    lru = "no entry was used or stored yet"
    if requests := since["requests"]:
        here, under_lru = share(since["here"], requests), share(since["lru"], requests)
        lru = f"of uses and puts since the start, {here} found here, {under_lru} under lru"
        if figures["sampled"] > 1:
            lru += f" (one key in {number(figures['sampled'])} counts)"
    return [("hit ratio", f"{lookups} over the last ring's worth of puts"), ("beside lru", lru)]


def _pressure(governor: dict[str, Any]) -> Rows:
    rows: Rows = []
    for gauge in governor["gauges"]:
        source = "a FILE, and no measurement" if gauge["source"] == "file" else gauge["source"]
        rows.append(("gauge", parts({**gauge, "source": source}, _GAUGE)))
    host, done = governor["host"], governor["counters"]
    if host["resident_bytes_max"] is not None:
        kept = "under pressure, {resident_bytes} of {wanted_bytes} in memory; may have {resident_bytes_max}"
        rows.append(("ring", words(host, kept)))
    rows += [("device", parts(device, _DEVICE)) for device in governor["devices"]]
    if governor["devices"] or done["registered"]:
        rows.append(("device tier", words(done, _TIER)))
    rows += [("workflow", words(flow, _WORKFLOW)) for flow in governor["workflows"]]
    return rows or [("gauges", "none: the use of the tiers is unknown")]


@click.command()
@as_json
@pass_daemon
def status(daemon: Daemon, as_json: bool) -> None:
    """What the daemon holds, and its counters so far."""
    show(daemon.status(), as_json, lambda body: status_text(body, daemon.ask(HealthQuery)))


@click.command()
@as_json
@pass_daemon
@click.pass_context
def health(ctx: click.Context, daemon: Daemon, as_json: bool) -> None:
    """Whether the daemon serves and is healthy.

    \b
    Exit code 0: it answered within --timeout, and reports no problem.
    Exit code 1: no daemon, no answer in time, no permission, or it reports problems, one line each.
    """
    body = daemon.ask(HealthQuery)
    problems = body["problems"]
    if as_json or not problems:
        show(body, as_json, lambda _: "healthy")
    for problem in problems:
        click.echo(f"tensorctl: unhealthy: {problem}", err=True)
    for notice in body["notices"]:
        click.echo(f"tensorctl: notice: {notice}", err=True)
    ctx.exit(1 if problems else 0)


def entries_text(entries: list[dict[str, Any]], now_unix_s: float) -> str:
    """A table of entries, 100 columns wide."""
    rows = []
    for entry in entries:
        expires, pinned = entry["expires_unix_s"], "yes" if entry["pinned_by_message"] else ""
        what = (entry["key"][:_SHOWN_DIGITS], size(entry["payload_bytes"]))
        counts = (number(entry["tokens"]), number(entry["uses"]))
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
    if not answer["requests"]:
        return "nothing is known yet: no entry was put or used since the daemon started"
    now_bytes = answer["capacity_bytes"]
    rows = [
        ("requests", f"{number(round(answer['requests']))} uses of entries and puts of new ones"),
        ("of these", f"{number(answer['sampled_requests'])} in the sample: the fewer, the less they tell"),
        ("found here", f"{share(answer['here'], 1)}, under policy {answer['policy']}"),
    ]
    if not any(ratio for _, ratio in answer["points"]):
        rows.append(("reuse", "none seen: a larger ring would find nothing either"))
    points = [
        (f"{at / now_bytes:.2f}", size(at), share(ratio, 1), "now" if at == now_bytes else "")
        for at, ratio in answer["points"]
    ]
    sizes = table((">RING", ">SIZE", ">HIT RATIO", ""), points)
    return f"{pairs(rows)}\n\nestimated under least recently used:\n\n{sizes}"


@click.command()
@as_json
@pass_daemon
def advise(daemon: Daemon, as_json: bool) -> None:
    """The hit ratios that a ring of another size would give.

    The daemon estimates them from a sample of the keys, for least recently used. "found here" is what its own policy
    found of the same requests.
    """
    show(daemon.ask(AdviseQuery), as_json, advice_text)


def clients_text(rows: list[dict[str, Any]]) -> str:
    shown = []
    for row in rows:
        lane, state = None, "greeted"
        if row["lane"] is not None:
            lane, state = f"{row['lane']:x}", "orphaned" if row["orphaned"] else "attached"
        who = (row["client"], name(row["name"]), row["pid"], row["uid"])
        shown.append((*who, lane, row["pins"], number(row["hits"]), number(row["misses"]), state))
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
