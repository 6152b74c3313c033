"""`latency` and `slowlog`: how long the daemon took for requests.

Owns: the percentiles and the output. Does not own: the histograms and the list (the daemon's).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import click

from ...ipc.messages import LatencyQuery, SlowQuery
from .daemon import Daemon, pass_daemon, understood
from .parameters import DURATION
from .tables import cut, number, size, table

LAG: Final = "event loop lag"
HIT: Final = "hit"
_SHARES: Final = (0.5, 0.9, 0.99, 0.999)
_NAME_CHARS_MAX: Final = 24


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


def since(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The histograms of the requests between two answers. A restart in between gives those since the restart."""

    def less(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> dict[str, Any]:
        if old is None or sum(old["counts"]) > sum(new["counts"]):
            return dict(new)
        counts = [most - least for most, least in zip(new["counts"], old["counts"], strict=True)]
        return {"bounds": new["bounds"], "counts": counts, "sum": new["sum"] - old["sum"]}

    return {
        "kinds": {kind: less(before["kinds"].get(kind), found) for kind, found in after["kinds"].items()},
        **{name: less(before[name], after[name]) for name in ("event_loop_lag", "hits")},
    }


def latency_text(body: Mapping[str, Any]) -> str:
    """A table of percentiles: one row for each kind that occurred, one for hits, and one for the event loop."""
    rows = []
    for kind, histogram in [*body["kinds"].items(), (HIT, body["hits"]), (LAG, body["event_loop_lag"])]:
        count = sum(histogram["counts"])
        if count:
            mean = histogram["sum"] / count
            rows.append(
                (kind, number(count), *map(_ms, (mean, *(percentile_s(histogram, share) for share in _SHARES))))
            )
    head = ("REQUEST", "COUNT", "MEAN ms", *(f"p{100 * share:g}" for share in _SHARES))
    return table(head, rows, right=range(1, len(head)))


def slowlog_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of slow requests."""
    return table(
        ("WHEN", "REQUEST", "ms", "SIZE", "CLIENT"),
        [
            (
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["unix_s"])),
                row["kind"],
                _ms(row["took_s"]),
                size(row["payload_bytes"]) if row["payload_bytes"] else "-",
                f"{cut(row['name'], _NAME_CHARS_MAX, '...')} ({row['client']})" if row["client"] else row["name"],
            )
            for row in rows
        ],
        right=(2, 3),
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"


@click.command()
@click.option("--over", "over_s", type=DURATION, metavar="TIME", help="Only requests of the next TIME, such as 10s.")
@click.option("--json", "as_json", is_flag=True, help="Print the histograms as JSON.")
@pass_daemon
def latency(daemon: Daemon, over_s: float | None, as_json: bool) -> None:
    """Percentiles of the time from a request's arrival to its answer, by kind, since the daemon started.

    The row "hit" is the time of a get of a stored entry in the client's process, which asks nothing of the daemon:
    each client times about one a second. The last row is how late the event loop ran its timers: every request waits
    for it.
    """
    body = daemon.ask(LatencyQuery)
    with understood("latency"):
        if over_s is not None:
            time.sleep(over_s)
            body = since(body, daemon.ask(LatencyQuery))
        click.echo(json.dumps(body, indent=2) if as_json else latency_text(body))


@click.command()
@click.option("-n", "--count", type=click.IntRange(min=1), default=10, show_default=True, metavar="N", help="Rows.")
@click.option("--latest", is_flag=True, help="The latest first, and not the slowest.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@pass_daemon
def slowlog(daemon: Daemon, count: int, latest: bool, as_json: bool) -> None:
    """The slowest of the last requests that took longer than log.slow_s.

    The daemon keeps log.slow_max of them. ms: from the request's arrival to its answer, for a put until it is stored,
    the client's own copying included.
    """
    body = daemon.ask(SlowQuery)
    with understood("slow requests"):
        rows: list[dict[str, Any]] = body["requests"]
        if not latest:
            rows = sorted(rows, key=lambda row: -row["took_s"])
        rows = rows[:count]
        if as_json:
            click.echo(json.dumps(rows, indent=2))
        elif rows:
            click.echo(slowlog_text(rows))
        else:
            click.echo(f"no request took longer than {1000 * body['slow_s']:g} ms")
