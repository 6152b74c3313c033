"""`advise`: the hit ratios that a ring of another size would give.

Owns: the rows in which the daemon's estimates are shown. Does not own: the estimates.
"""

from __future__ import annotations

from typing import Any

import click

from ....ipc.messages.control import AdviseQuery
from ..daemon import Daemon, pass_daemon
from ..output import as_json, number, pairs, share, show, size, table


def advice_text(answer: dict[str, Any]) -> str:
    """The daemon's estimates."""
    if not answer["requests"]:
        return "nothing is known yet: no entry was put or used since the daemon started"
    now_bytes = answer["capacity_bytes"]
    rows = [
        ("requests", f"{number(round(answer['requests']))} uses of entries and puts of new ones"),
        ("found here", f"{share(answer['here'], 1)}, under policy {answer['policy']}, since the daemon started"),
    ]
    if not any(ratio for _, ratio, _ in answer["points"]):
        rows.append(("reuse", "none seen: a larger ring would find nothing either"))
    return f"{pairs(rows)}\n\nestimated under least recently used:\n\n" + table(
        (">RING", ">SIZE", ">HIT RATIO", ">ERROR", ""),
        [
            (
                f"{at / now_bytes:.2f}",
                size(at),
                share(ratio, 1),
                f"± {100 * error:.1f}",
                "now" if at == now_bytes else "",
            )
            for at, ratio, error in answer["points"]
        ],
    )


@click.command()
@as_json
@pass_daemon
def advise(daemon: Daemon, as_json: bool) -> None:
    """The hit ratios that a ring of another size would give.

    The daemon estimates them from a sample of the keys, for least recently used. "found here" is what its own policy
    found of the same requests. ERROR: in points, of the sampling and of the histogram's resolution.
    """
    show(daemon.ask(AdviseQuery), as_json, advice_text)
