"""`status` and `health`: the state of the daemon.

Owns: the rows in which a status is shown, as data. Does not own: the documents, nor which figures are a problem (the
daemon).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import click

from ...ipc.messages.control import HealthQuery
from .daemon import Daemon, pass_daemon
from .output import as_json, number, pairs, parts, share, show, size, words

Rows = list[tuple[str, str]]

_HEAD: Final = "tensord {version}, instance {instance}: pid {pid}, uid {uid}, epoch {epoch}, up {uptime_s}"
_STORE: Final = {
    "pinned": "pins for a time {pins} ({pinned_bytes}); evicted entries that readers hold {retired_bytes}",
    "lookups": "hits {hits}, misses {misses}",
    "puts": "{puts}; {put_bytes} stored; lent {lent_bytes} in {grants} places, waiting for places {grants_waiting}",
    "evictions": "{evictions}; {evicted_bytes} in all",
    "claims": "held {claims_held}, waited for {claims_waiting}; granted {claims_granted}",
}
_CLIENTS: Final = "{clients}, with leases {pins}; lanes {lanes}, {lanes_orphaned} of closed connections"
_REMOTE: Final = "; {remote}; read {remote_read_bytes}, written {remote_written_bytes}"
_UNSTORABLE: Final = "namespace {namespace}: values {count}, the last {ago_s} ago: {code}: {text}"
_WORKFLOW: Final = "{workflow}: client {client}, at step {step}; steps {steps} of agents {agents}"
_MADE_ROOM: Final = (
    "the last {entries} evictions for other entries: median idle time {idle_s[median]}, median age {age_s[median]}; "
    "one in ten was idle for less than {idle_s[tenth]}"
)
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
    """A status as text."""
    store, governor = body["store"], body["governor"]
    rows = [("PROBLEM", problem) for problem in health["problems"]]
    rows += [("notice", notice) for notice in health["notices"]]
    rows += [("NOT STORED", unstorable(each)) for each in store["unstorable"]]
    rows += [*_memory(body, store), ("clients", words(body, _CLIENTS))]
    rows += [(name, words(store, template)) for name, template in _STORE.items()]
    rows.append(("refusals", words(body, "{store[refusals]}; by quota: {quotas[refusals]}")))
    rows += _ratios(store["hit_ratios"])
    made = store["at_eviction"]
    rows.append(("made room", words(made, _MADE_ROOM) if made["entries"] else "nothing was evicted for other entries"))
    if remote := body["remote"]:
        serves = f"{remote['address']} {'serves' if remote['serves'] else 'LEFT ALONE'}"
        rows.append(("remote", serves + words(store, _REMOTE)))
    return f"{words(body, _HEAD)}\n\n{pairs(rows)}\n\n{pairs(_pressure(governor))}"


def unstorable(reason: Mapping[str, Any]) -> str:
    """Why values of a namespace cannot be stored."""
    return words(reason, _UNSTORABLE)


def _memory(body: dict[str, Any], store: dict[str, Any]) -> Rows:
    used, limit, window = store["used_bytes"], store["max_bytes"], store["window_bytes"]
    ring = (
        f"{size(used)} of {size(limit)} used ({share(used, limit)}); largest free {size(store['largest_free_bytes'])}"
    )
    if limit < body["ring_bytes"]:
        ring += f"; limited to {size(limit)} of a ring of {size(body['ring_bytes'])}"
    if body["ring_ready_bytes"] < body["ring_bytes"]:
        ring += f"; {size(body['ring_ready_bytes'])} ready" + (", growing" if store["ring_growing"] else "")
    entries = f"{number(store['entries'])} of {number(store['max_entries'])}, policy {store['policy']}"
    if window is not None:
        entries += f", window {size(window)} ({share(window, used)} of what is used)"
    in_force = {"ring_bytes": body["ring_bytes"], "max_entries": store["max_entries"]}
    sizes = [
        words(in_force, f"{name} {{{name}}} (")
        + ("not configured)" if asked is None else words(body["configured"], f"configured {{{name}}})"))
        for name, asked in body["configured"].items()
    ]
    return [("ring", ring), ("entries", entries), ("sizes", ", ".join(sizes))]


def _ratios(figures: dict[str, Any]) -> Rows:
    """The hit ratio, and that of a sample of requests beside the ratio that least recently used would have had."""
    minute, ring = figures["minute"], figures["ring"]
    lookups = f"{share(minute['hits'], minute['lookups'])} in the last minute, {share(ring['hits'], ring['lookups'])}"
    lru = "no entry was used or stored yet"
    if requests := ring["requests"]:
        lru = f"of uses and puts, {share(ring['here'], requests)} found here, {share(ring['lru'], requests)} under lru"
        lru += f", over the last ring's worth of puts (one key in {number(figures['sampled'])})"
    return [("hit ratio", f"{lookups} over the last ring's worth of puts"), ("beside lru", lru)]


def _pressure(governor: dict[str, Any]) -> Rows:
    """The fill of the tiers, its consequences, and who is concerned."""
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
