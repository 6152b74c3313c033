"""`status` and `health`: the state of the daemon.

Owns: the conversion of a status document to text. Does not own: the document. Pure, except for the two commands.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import click

from ...errors import TensordError
from ...ipc.messages import HealthQuery
from .daemon import Daemon, pass_daemon, understood
from .tables import age, counted, counts, number, pairs, share, size

_REDRAWN_EVERY_S: Final = 1.0
_MUST_STAY_0: Final = ("found_corrupt",)


def text(body: dict[str, Any]) -> str:
    """The status document as text, at most 100 columns wide."""
    with understood("status"):
        store = body["store"]
        head = (
            f"tensord {body['version']}, instance {body['instance']}: pid {body['pid']}, uid {body['uid']}, "
            f"epoch {body['epoch']}{' (recovered)' if body['recovered'] else ''}, up {age(body['uptime_s'])}"
        )
        rows = [*_memory(body, store).items(), *_traffic(body, store).items(), *_trouble(store)]
        rows += [("SOCKET", problem) for problem in body.get("socket_problems", ())]
        return "\n".join([head, "", pairs(rows), "", pairs(pressure(body["governor"]))])


def _memory(body: dict[str, Any], store: dict[str, Any]) -> dict[str, str]:
    used, limit = store["used_bytes"], store["max_bytes"]
    rows = {
        "ring": (
            f"{size(used)} of {size(limit)} used ({share(used, limit)}); "
            f"largest free {size(store['largest_free_bytes'])}, holes {number(store['holes'])}"
        )
    }
    if body["ring_ready_bytes"] < body["ring_bytes"]:
        growing = "growing" if store["ring_growing"] else "stays smaller than configured; see `tensorctl health`"
        rows["ready"] = f"{size(body['ring_ready_bytes'])} of {size(body['ring_bytes'])}: {growing}"
    if limit < body["ring_bytes"]:
        rows["limit"] = f"{size(limit)} of a ring of {size(body['ring_bytes'])}"
    return rows | {
        "entries": f"{number(store['entries'])} of {number(store['max_entries'])}, {_policy(store)}",
        "sizes": _sizes(body, store),
        "tokens": number(store["tokens"]) + (f" of {number(store['max_tokens'])}" if store["max_tokens"] else ""),
        "namespaces": number(store["namespaces"]),
        "pinned": (
            f"{counted(body['pins'], 'lease', 'leases')}, {counted(store['pins'], 'pin', 'pins')} for a time "
            f"({size(store['pinned_bytes'])}); evicted entries that readers hold {size(store['retired_bytes'])}"
        ),
    }


def _sizes(body: dict[str, Any], store: dict[str, Any]) -> str:
    """The present sizes of ring and index, and their configured values."""
    configured = body["configured"]

    def said(value: int | None, show: Callable[[int], str]) -> str:
        return "derived" if value is None else f"configured {show(value)}"

    return (
        f"ring_bytes {size(body['ring_bytes'])} ({said(configured['ring_bytes'], size)}), "
        f"max_entries {number(store['max_entries'])} ({said(configured['max_entries'], number)})"
    )


def _policy(store: dict[str, Any]) -> str:
    window = store["window_bytes"]
    if window is None:
        return f"policy {store['policy']}"
    return f"policy {store['policy']}, window {size(window)} ({share(window, store['used_bytes'])} of what is used)"


def _traffic(body: dict[str, Any], store: dict[str, Any]) -> dict[str, str]:
    looked = store["hits"] + store["misses"]
    return {
        "clients": (
            f"{number(body['clients'])}, lanes {number(body['lanes'])} "
            f"({number(body['lanes_orphaned'])} of closed connections), inboxes {number(body['inboxes'])}"
        ),
        "lookups": (
            f"{number(looked)}: hits {number(store['hits'])} ({share(store['hits'], looked)}), "
            f"misses {number(store['misses'])}"
        ),
        "hit ratio": _hit_ratio(store["hit_ratios"]),
        "beside lru": _beside_lru(store["hit_ratios"]),
        "puts": (
            f"{counts(store['puts'])}; {size(store['put_bytes'])} stored; "
            f"lent {size(store['lent_bytes'])} in {number(store['grants'])} places, "
            f"waiting for places {number(store['grants_waiting'])}"
        ),
        "evictions": f"{counts(store['evictions'])}; {size(store['evicted_bytes'])} in all",
        "made room": _made_room(store["at_eviction"]),
        "refusals": f"{counts(store['refusals'])}; by quota: {counts(body['quotas']['refusals'])}",
        "claims": (
            f"held {number(store['claims_held'])}, waited for {number(store['claims_waiting'])}; "
            f"granted {number(store['claims_granted'])}, handed over {number(store['claims_handed_over'])}"
        ),
        # The release before has no remote store.
        **({"remote": _remote(body["remote"], store)} if body.get("remote") else {}),
        "reclaim": (
            f"scans {number(store['scans'])}, spared {number(store['republished'])}, moved "
            f"{number(store['moves'])} ({size(store['moved_bytes'])}); fence {body['fence']}"
        ),
    }


def _remote(remote: dict[str, Any], store: dict[str, Any]) -> str:
    state = "serves" if remote["serves"] else f"LEFT ALONE ({remote['why']})"
    # Releases before have no such fields.
    if why := remote.get("refuses_writes"):
        state += f", {'FULL' if remote.get('full') else 'READ-ONLY'} ({why})"
    if why := remote.get("refuses_removals"):
        state += f", REMOVES NOTHING ({why})"
    if count := remote.get("not_agreed"):
        state += f", {count} INVALIDATED NAMESPACES NOT SHARED ({remote.get('not_agreed_why')})"
    if why := remote.get("too_slow"):
        state += f", TOO SLOW TO ASK ({why})"
    for bad in remote.get("bad_generations", []):
        state += f"; NOT SHARED ({bad})"
    return (
        f"{remote['address']} {state}; {counts(store['remote'])}; read {size(store['remote_read_bytes'])}, "
        f"written {size(store['remote_written_bytes'])}, waiting {size(remote['queued_bytes'])}, "
        f"to be removed {number(remote.get('removals', 0))}, "
        f"corrupt {number(remote['corrupt'])}"
    )


def _hit_ratio(figures: dict[str, Any]) -> str:
    minute, ring = figures["minute"], figures["ring"]
    return (
        f"{share(minute['hits'], minute['lookups'])} in the last minute, "
        f"{share(ring['hits'], ring['lookups'])} over the last ring's worth of puts"
    )


def _beside_lru(figures: dict[str, Any]) -> str:
    """The hit ratio of a sample of requests, compared with the ratio that least recently used would have had."""
    ring = figures["ring"]
    if not ring["requests"]:
        return "no entry was used or stored yet"
    sample = "" if figures["sampled"] == 1 else f" (a sample, one key in {number(figures['sampled'])})"
    return (
        f"of uses and puts, {share(ring['here'], ring['requests'])} found here, "
        f"{share(ring['lru'], ring['requests'])} under lru, over the last ring's worth of puts{sample}"
    )


def _made_room(figures: dict[str, Any]) -> str:
    """Age and idle time of the last entries evicted for others. Short times mean that the ring is too small."""
    if not figures["entries"]:
        return "no entry has been evicted for other entries"
    age_s, idle_s = figures["age_s"], figures["idle_s"]
    return (
        f"the last {counted(figures['entries'], 'eviction', 'evictions')} for other entries: "
        f"median idle time {age(idle_s['median'])}, "
        f"median age {age(age_s['median'])}; one in ten was idle for less than {age(idle_s['tenth'])}"
    )


def unstorable(reason: Mapping[str, Any]) -> str:
    """Why values of a namespace cannot be stored."""
    return (
        f"namespace {reason['namespace']}: {counted(reason['count'], 'value', 'values')}, "
        f"the last {age(reason['ago_s'])} ago: {reason['code']}: {reason['text']}"
    )


def _trouble(store: dict[str, Any]) -> list[tuple[str, str]]:
    found = [name for name in _MUST_STAY_0 if store[name]]
    rows = [("TROUBLE", f"{name} is {number(store[name])} and must stay 0: report it") for name in found]
    # The release before tells no such reasons.
    rows += [("NOT STORED", unstorable(each)) for each in store.get("unstorable", ())]
    if store["log_lost"]:
        rows.append(
            (
                "log lost",
                f"{counted(store['log_lost'], 'hit', 'hits')} overwritten in logs of clients: unknown to the policy",
            )
        )
    return rows


def pressure(governor: dict[str, Any]) -> list[tuple[str, str]]:
    """The fill of the tiers, its consequences, and the owners that do not carry out orders."""
    rows: list[tuple[str, str]] = []
    for gauge in governor["gauges"]:
        rows.append(("gauge", _gauge(gauge)))
        rows += [("process", _process(gauge["gauge"], each)) for each in gauge.get("processes", ())]
    if not rows:
        rows = [("gauges", "none: the use of the tiers is unknown")]
    rows += [("SOURCE", source_text(source)) for source in governor.get("sources", ()) if source["problem"]]
    host = governor["host"]
    if host["resident_bytes_max"] is not None:
        kept = f"{size(host['resident_bytes'])} of {size(host['wanted_bytes'])} in memory"
        rows.append(("ring", f"under pressure, {kept}; may have {size(host['resident_bytes_max'])}"))
    for device in governor["devices"]:
        rows.append(("device", _device(device)))
        if device["stuck"]:
            rows.append(("STUCK", f"{device['device']}: {device['stuck']}"))
    rows += [
        (
            "NO ANSWER",
            (
                f"client {owner['client']} ({owner['name']}, pid {owner['pid']}) does not carry out orders for "
                f"{counted(owner['ordered_entries'], 'entry', 'entries')} on {owner['device']}"
            ),
        )
        for owner in governor["owners"]
        if owner["unresponsive"]
    ]
    done = governor["counters"]
    if governor["devices"] or done["registered"]:
        rows.append(
            (
                "device tier",
                (
                    f"registered {number(done['registered'])}: offloaded {number(done['offloaded'])}, "
                    f"dropped {number(done['dropped'])}, released {number(done['released'])}, "
                    f"removed with their owner {number(done['gone_with_owner'])}; refused {counts(done['refused'])}"
                ),
            )
        )
    rows += [("neighbour", _neighbour(each)) for each in governor.get("neighbours", ())]
    rows += [
        (
            "workflow",
            (
                f"{flow['workflow']}: client {flow['client']}, at step {number(flow['step'])}; "
                f"{counted(flow['steps'], 'step', 'steps')} of {counted(flow['agents'], 'agent', 'agents')}"
            ),
        )
        for flow in governor["workflows"]
    ]
    return rows


def _gauge(gauge: dict[str, Any]) -> str:
    said = [
        (
            f"{gauge['gauge']}: {gauge['mode']} for {age(gauge['since_s'])}, "
            f"{share(gauge['share'], 1)} of {size(gauge['total_bytes'])}"
        ),
        f"from {gauge['source']}" + (f", read {age(gauge['age_s'])} ago" if "age_s" in gauge else ""),
    ]
    if gauge.get("baseline_bytes"):
        said[0] += f" beside a {gauge['baseline']} baseline of {size(gauge['baseline_bytes'])}"
    if gauge["source"] == "drill":
        said[1] = "a DRILL: made-up readings"
    if gauge["source"] == "file":
        said[1] = "from a FILE, and no measurement"
    if gauge["stale"]:
        said.append("STALE: it cannot be read, its last value is used")
    if gauge["refuses"]:
        said.append("REFUSES new entries")
    return "; ".join(said)


def _process(gauge: str, process: dict[str, Any]) -> str:
    """A process on a card. Its name is missing if it is in another pid namespace than the daemon, or hidden from it."""
    held = "bytes unknown" if process["bytes"] is None else size(process["bytes"])
    if not process["seen"]:
        client = "unknown whether a client"
    else:
        client = "no client" if process["client"] is None else f"client {process['client']}"
    name = process["name"] or "unknown"
    return f"{gauge}: pid {process['pid']} ({name}), {held}, {client}"


def _neighbour(neighbour: dict[str, Any]) -> str:
    """A server that is no client, and what it did when it was asked last."""
    card = f" on {neighbour['card']}" if neighbour["card"] else ""
    return f"{neighbour['neighbour']}{card}: {neighbour_text(neighbour)}"


def neighbour_text(neighbour: Mapping[str, Any]) -> str:
    """What a neighbour did when it was asked last."""
    said: str = neighbour["outcome"]
    if neighbour["freed_bytes"]:
        said += f", {size(neighbour['freed_bytes'])}"
    if neighbour["since_s"] is not None:
        said += f", {age(neighbour['since_s'])} ago"
    if neighbour["why"]:
        said += f": {neighbour['why']}"
    return f"{'is being asked; before: ' if neighbour['asking'] else ''}{said}"


def source_text(source: dict[str, Any]) -> str:
    """A source of gauges that a person must look at: its state, since when, and why."""
    return f"{source['source']} {source['state']} for {age(source['since_s'])}: {source['why']}"


def _device(device: dict[str, Any]) -> str:
    said = [
        (
            f"{device['device']}: {counted(device['entries'], 'entry', 'entries')} "
            f"of {counted(device['owners'], 'client', 'clients')}, "
            f"{size(device['bytes'])}, tokens {number(device['tokens'])}"
        )
    ]
    if device["ordered_entries"]:
        said.append(f"leaving {number(device['ordered_entries'])} ({size(device['ordered_bytes'])})")
    if device["reserved_bytes"]:
        said.append(f"reserved {size(device['reserved_bytes'])}")
    if device["waiting_reservations"]:
        said.append(
            f"{counted(device['waiting_reservations'], 'reservation waits', 'reservations wait')} for "
            f"{size(device['waiting_bytes'])}"
        )
    if device["floor_blocks"]:
        said.append(f"floor {number(device['floor_blocks'])} of {number(device['capacity_blocks'])} blocks")
    return "; ".join(said)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the daemon's JSON.")
@click.option("--watch", "watching", is_flag=True, help="Redraw every second, until Ctrl-C.")
@pass_daemon
def status(daemon: Daemon, as_json: bool, watching: bool) -> None:
    """What the daemon holds, and its counters so far.

    With --json and --watch, one document a line.
    """
    if not watching:
        body = daemon.status()
        click.echo(json.dumps(body, indent=2) if as_json else text(body))
        return
    try:
        while True:
            shown = _drawn(daemon, as_json)
            if not as_json:
                click.clear()
            click.echo(shown)
            time.sleep(_REDRAWN_EVERY_S)
    except KeyboardInterrupt:
        return


def _drawn(daemon: Daemon, as_json: bool) -> str:
    """The present status; an error text while the daemon is away, since a watch continues through a restart."""
    try:
        body = daemon.status()
    except TensordError as error:
        return json.dumps({"error": error.code, "text": str(error)}) if as_json else f"{error}\n\ntrying again ..."
    return json.dumps(body) if as_json else text(body)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the daemon's JSON.")
@pass_daemon
@click.pass_context
def health(ctx: click.Context, daemon: Daemon, as_json: bool) -> None:
    """Whether the daemon serves and is healthy.

    \b
    Exit code 0: it answered within --timeout, and reports no problem.
    Exit code 1: no daemon, no answer in time, no permission, or it reports problems: the ring could
    not be allocated in full, or not again after a limit was raised; /dev/shm has no room for the next
    client; an entry was found corrupt, or was evicted while it was pinned; a gauge cannot be read;
    a pass over a device lowered nothing; or an owner does not carry out orders.
    """
    body = daemon.ask(HealthQuery)
    with understood("health"):
        problems: list[str] = body["problems"]
        notices: list[str] = body.get("notices", [])
        healthy = body["healthy"] and not problems
    if as_json:
        click.echo(json.dumps(body, indent=2))
    elif healthy:
        click.echo("healthy")
    for problem in problems:
        click.echo(f"tensorctl: unhealthy: {problem}", err=True)
    for notice in notices:
        click.echo(f"tensorctl: notice: {notice}", err=True)
    ctx.exit(0 if healthy else 1)
