"""`latency` and `slowlog`: how long the daemon took for requests.

Owns: the percentiles and the rows. Does not own: the histograms and the list (the daemon's).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import click

from ....ipc.messages.control import LatencyQuery, SlowQuery
from ..daemon import Daemon, pass_daemon
from ..output import as_json, name, number, show, size, table
from ..parameters import DURATION

_SHARES: Final = (0.5, 0.9, 0.99, 0.999)


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
        "event_loop_lag": less(before["event_loop_lag"], after["event_loop_lag"]),
    }


def latency_text(body: Mapping[str, Any]) -> str:
    """One row for each kind that occurred, and one for the event loop."""
    rows = []
    for kind, histogram in [*body["kinds"].items(), ("event loop lag", body["event_loop_lag"])]:
        if count := sum(histogram["counts"]):
            times = (histogram["sum"] / count, *(percentile_s(histogram, share) for share in _SHARES))
            rows.append((kind, number(count), *map(_ms, times)))
    return table(("REQUEST", ">COUNT", ">MEAN ms", *(f">p{100 * share:g}" for share in _SHARES)), rows)


def slowlog_text(rows: list[dict[str, Any]]) -> str:
    """A table of slow requests."""
    return table(
        ("WHEN", "REQUEST", ">ms", ">SIZE", "CLIENT"),
        [
            (
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["unix_s"])),
                row["kind"],
                _ms(row["took_s"]),
                size(row["payload_bytes"]) if row["payload_bytes"] else None,
                f"{name(row['name'])} ({row['client']})" if row["client"] else row["name"],
            )
            for row in rows
        ],
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"


@click.command()
@click.option("--over", "over_s", type=DURATION, metavar="TIME", help="Only requests of the next TIME, such as 10s.")
@as_json
@pass_daemon
def latency(daemon: Daemon, over_s: float | None, as_json: bool) -> None:
    """Percentiles of the time from a request's arrival to its answer, by kind, since the daemon started.

    The last row is how late the event loop ran its timers: every request waits for it. A hit asks nothing of the
    daemon, so no row has its time.
    """
    body = daemon.ask(LatencyQuery)
    if over_s is not None:
        time.sleep(over_s)
        body = since(body, daemon.ask(LatencyQuery))
    show(body, as_json, latency_text)


@click.command()
@click.option("-n", "--count", type=click.IntRange(min=1), default=10, show_default=True, metavar="N", help="Rows.")
@as_json
@pass_daemon
def slowlog(daemon: Daemon, count: int, as_json: bool) -> None:
    """The slowest of the last requests that took longer than log.slow_s.

    The daemon keeps the latest 128 of them. ms: from the request's arrival to its answer, for a put until it is stored,
    the client's own copying included.
    """
    body = daemon.ask(SlowQuery)
    rows = sorted(body["requests"], key=lambda row: -row["took_s"])[:count]
    none = f"no request took longer than {1000 * body['slow_s']:g} ms"
    show(rows, as_json, lambda rows: slowlog_text(rows) if rows else none)
