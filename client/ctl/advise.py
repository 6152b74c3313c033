"""`advise`: the hit ratios that a ring of another size would give.

Owns: the conversion of the daemon's estimates to text. Does not own: the estimates. Pure, except for the command.
"""

from __future__ import annotations

import json
from typing import Any, Final

import click

from ...ipc.messages import AdviseQuery
from .daemon import Daemon, pass_daemon, understood
from .tables import number, pairs, share, size, table

SHOWN: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
"""The multiples of the present size that the rows of namespaces have."""
WORTH_IT: Final = 0.01
"""A gain in hit ratio below this, or below its error, is called small."""


def advice_text(answer: dict[str, Any]) -> str:
    """The daemon's estimates as text, within 100 columns."""
    with understood("advice"):
        every, *namespaces = answer["curves"]
        if not every["requests"]:
            return "nothing is known yet: no entry was put or used since the daemon started"
        now_bytes = answer["capacity_bytes"]
        ratios = {round(at / now_bytes, 2): (ratio, error) for at, ratio, error in every["points"]}
        rows = [
            ("requests", f"{number(round(every['requests']))} uses of entries and puts of new ones"),
            ("found here", f"{share(answer['here'], 1)}, under policy {answer['policy']}, since the daemon started"),
        ]
        if any(ratio for _, ratio, _ in every["points"]):
            rows.append(("twice", _compared("twice the ring", 2 * now_bytes, ratios[1.0], ratios[2.0])))
            rows.append(("half", _compared("half the ring", now_bytes // 2, ratios[1.0], ratios[0.5])))
        else:
            largest_bytes = every["points"][-1][0]
            larger = f"{largest_bytes / now_bytes:g} times the size, {size(largest_bytes)}"
            rows.append(("reuse", f"none seen: a ring of up to {larger}, would find nothing either"))
        sizes = table(
            ("RING", "SIZE", "HIT RATIO", "ERROR", ""),
            [
                (f"{at / now_bytes:.2f}", size(at), share(ratio, 1), _error(error), "now" if at == now_bytes else "")
                for at, ratio, error in every["points"]
            ],
            right=(0, 1, 2, 3),
        )
        text = f"{pairs(rows)}\n\nestimated under least recently used:\n\n{sizes}"
        if len(namespaces) > 1:
            text += "\n\nby namespace:\n\n" + table(
                ("NAMESPACE", "REQUESTS", *(f"{multiple:g} RING" for multiple in SHOWN)),
                [_row_of(each, now_bytes) for each in namespaces],
                right=tuple(range(1, len(SHOWN) + 2)),
            )
        return text


def _compared(words: str, other_bytes: int, now: tuple[float, float], other: tuple[float, float]) -> str:
    change, error = other[0] - now[0], max(now[1], other[1])
    told = f"{words}, {size(other_bytes)}, would find {share(other[0], 1)} instead of {share(now[0], 1)}"
    if abs(change) < max(WORTH_IT, error):
        return f"{told}: no difference that the estimate can tell" if change else told
    return told


def _error(error: float) -> str:
    return f"± {100 * error:.1f}"


def _row_of(curve: dict[str, Any], now_bytes: int) -> tuple[str, ...]:
    ratios = {round(at / now_bytes, 2): ratio for at, ratio, _ in curve["points"]}
    return (curve["namespace"], number(round(curve["requests"])), *(share(ratios[multiple], 1) for multiple in SHOWN))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the daemon's JSON.")
@pass_daemon
def advise(daemon: Daemon, as_json: bool) -> None:
    """The hit ratios that a ring of another size would give.

    The daemon estimates them from a sample of the keys, for least recently used. "found here" is what its own policy
    found of the same requests. ERROR: in points, of the sampling and of the histogram's resolution. Namespaces are
    shown by their tags, the busiest first.
    """
    answer = daemon.ask(AdviseQuery)
    click.echo(json.dumps(answer, indent=2) if as_json else advice_text(answer))
