"""`latency`: how long the daemon took for requests, and which ones took long.

Owns: the percentiles and the rows. Does not own: the histograms and the list (the daemon's).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import click

from ....ipc.messages.control import LatencyQuery
from ..daemon import Daemon, pass_daemon
from ..output import as_json, name, number, show, size, table

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
    return f"{kinds}\n\n" + table(
        ("WHEN", "REQUEST", ">ms", ">SIZE", "CLIENT"),
        [
            (
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["unix_s"])),
                row["kind"],
                _ms(row["took_s"]),
                size(row["payload_bytes"]) if row["payload_bytes"] else None,
                f"{name(row['name'])} ({row['client']})" if row["client"] else row["name"],
            )
            for row in slow
        ],
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"


@click.command()
@click.option("-n", "--count", type=click.IntRange(min=0), default=10, show_default=True, help="Slow requests shown.")
@as_json
@pass_daemon
def latency(daemon: Daemon, count: int, as_json: bool) -> None:
    """Percentiles of the time from a request's arrival to its answer, by kind, and the slowest of the slow ones.

    The percentiles are since the daemon started. The row "event loop lag" is how late the loop ran its timers: every
    request waits for it. A hit asks nothing of the daemon, so no row has its time.

    Slow is what took longer than log.slow_s; the daemon keeps the latest 128. For a put the time is that until it is
    stored, the client's own copying included.
    """
    show(daemon.ask(LatencyQuery), as_json, lambda body: latency_text(body, count))
