"""`advise`: the hit ratios that a ring of another size would give.

Owns: the rows in which the daemon's estimates are shown. Does not own: the estimates.
"""

from __future__ import annotations

from typing import Any, Final

import click

from ....ipc.messages import AdviseQuery
from ..daemon import Daemon, pass_daemon
from ..output import as_json, number, pairs, share, show, size, table

_SHOWN: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
"""The multiples of the present size that the rows of namespaces have."""


def advice_text(answer: dict[str, Any]) -> str:
    """The daemon's estimates."""
    every, *namespaces = answer["curves"]
    if not every["requests"]:
        return "nothing is known yet: no entry was put or used since the daemon started"
    now_bytes = answer["capacity_bytes"]
    rows = [
        ("requests", f"{number(round(every['requests']))} uses of entries and puts of new ones"),
        ("found here", f"{share(answer['here'], 1)}, under policy {answer['policy']}, since the daemon started"),
    ]
    if not any(ratio for _, ratio, _ in every["points"]):
        rows.append(("reuse", "none seen: a larger ring would find nothing either"))
    text = f"{pairs(rows)}\n\nestimated under least recently used:\n\n" + table(
        (">RING", ">SIZE", ">HIT RATIO", ">ERROR", ""),
        [
            (
                f"{at / now_bytes:.2f}",
                size(at),
                share(ratio, 1),
                f"± {100 * error:.1f}",
                "now" if at == now_bytes else "",
            )
            for at, ratio, error in every["points"]
        ],
    )
    if len(namespaces) > 1:
        text += "\n\nby namespace:\n\n" + table(
            ("NAMESPACE", ">REQUESTS", *(f">{multiple:g} RING" for multiple in _SHOWN)),
            [
                (
                    each["namespace"],
                    number(round(each["requests"])),
                    *(share(ratio, 1) for at, ratio, _ in each["points"] if round(at / now_bytes, 2) in _SHOWN),
                )
                for each in namespaces
            ],
        )
    return text


@click.command()
@as_json
@pass_daemon
def advise(daemon: Daemon, as_json: bool) -> None:
    """The hit ratios that a ring of another size would give.

    The daemon estimates them from a sample of the keys, for least recently used. "found here" is what its own policy
    found of the same requests. ERROR: in points, of the sampling and of the histogram's resolution. Namespaces are
    shown by their tags, the busiest first.
    """
    show(daemon.ask(AdviseQuery), as_json, advice_text)
