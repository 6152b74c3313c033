"""`baseline`: shows and sets how much of a card is held by plan.

Owns: its arguments and output, and which card a number means. Does not own: what follows from a baseline (the daemon's
governor).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from ...ipc import messages
from ...ipc.modes import Tier
from .daemon import Daemon, pass_daemon, understood
from .parameters import SIZE
from .tables import share, size


def named(card: str | None, cards: Sequence[str]) -> str:
    """The name of the card that is meant: by name, by its number from 0, or the only one.

    Raises:
        BadParameter: there is no such card, or several; the message names them.
        ClickException: the daemon reads no card.
    """
    if not cards:
        raise click.ClickException("the daemon reads no card; `tensorctl doctor` says why")
    known = ", ".join(cards)
    if card is None:
        if len(cards) == 1:
            return cards[0]
        raise click.BadParameter(f"the daemon's cards are {known}: name one", param_hint="'--card'")
    if card in cards:
        return card
    if card.isdecimal() and int(card) < len(cards):
        return cards[int(card)]
    raise click.BadParameter(f"no card is called {card!r}; the daemon's cards are {known}", param_hint="'--card'")


def line(gauge: dict[str, Any]) -> str:
    """One card's baseline."""
    if not gauge["baseline_bytes"]:
        return f"{gauge['gauge']}: no baseline"
    return (
        f"{gauge['gauge']}: {size(gauge['baseline_bytes'])} of {size(gauge['total_bytes'])}, {gauge['baseline']}; "
        f"{share(gauge['share'], 1)} of the rest is used"
    )


@click.command()
@click.argument("size_bytes", metavar="[SIZE]", type=SIZE, required=False)
@click.option(
    "--card",
    metavar="CARD",
    help="The card, by its name, or its number from 0 in the order of names; by default the only one.",
)
@pass_daemon
def baseline(daemon: Daemon, size_bytes: int | None, card: str | None) -> None:
    """Shows, or sets to SIZE, how much of a card is held by plan, as by an inference engine.

    The modes of the card are about the rest. SIZE is written as 72GiB; 0 ends the declaration. It holds until the
    daemon ends. Set `device.baseline` in the configuration to keep it.
    """
    gauges = _gauges(daemon)
    cards = list(gauges)
    if size_bytes is None:
        chosen = cards if card is None else [named(card, cards)]
        with understood("status"):
            click.echo("\n".join(line(gauges[each]) for each in chosen) or "no card")
        return
    name = named(card, cards)
    daemon.order(lambda number: messages.DeclareBaseline(number, name, size_bytes, stays=True), messages.Done)
    click.echo(_set_text(size_bytes, _gauges(daemon).get(name, gauges[name])))


def _gauges(daemon: Daemon) -> dict[str, dict[str, Any]]:
    """The cards' gauges by name."""
    with understood("status"):
        return {each["gauge"]: each for each in daemon.status()["governor"]["gauges"] if each["tier"] == Tier.DEVICE}


def _set_text(size_bytes: int, gauge: dict[str, Any]) -> str:
    """What was set, and what is in force if that is something else: more is held by clients, or the card is smaller."""
    with understood("status"):
        in_force_bytes = gauge["baseline_bytes"]
        said = f"baseline {size(size_bytes)}"
        if not size_bytes:
            said = "the operator's baseline is ended" if in_force_bytes else "no baseline is declared"
        if in_force_bytes < size_bytes:
            said += f", and {size(in_force_bytes)} are in force: at most 95 % of the {size(gauge['total_bytes'])}"
        elif in_force_bytes > size_bytes:
            by = "learned" if gauge["baseline"] == "learned" else "by clients or the configuration"
            said += f", and {size(in_force_bytes)} are in force, {by}"
        return f"{gauge['gauge']}: {said}"
