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
    """
    if not cards:
        raise click.BadParameter("the daemon reads no card; `tensorctl doctor` says why", param_hint="'--card'")
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
@click.option("--card", metavar="CARD", help="The card, by its name or its number from 0; by default the only one.")
@pass_daemon
def baseline(daemon: Daemon, size_bytes: int | None, card: str | None) -> None:
    """Shows, or sets to SIZE, how much of a card is held by plan, as by an inference engine.

    The modes of the card are about the rest. SIZE is written as 72GiB; 0 ends the declaration. It holds until the
    daemon ends. Set `device.baseline` in the configuration to keep it.
    """
    with understood("status"):
        gauges = [each for each in daemon.status()["governor"]["gauges"] if each["tier"] == Tier.DEVICE]
        cards = [each["gauge"] for each in gauges]
        lines = [line(each) for each in gauges]
    if size_bytes is None:
        chosen = lines if card is None else [lines[cards.index(named(card, cards))]]
        click.echo("\n".join(chosen) or "no card")
        return
    name = named(card, cards)
    daemon.order(lambda number: messages.DeclareBaseline(number, name, size_bytes, stays=True), messages.Done)
    click.echo(f"{name}: baseline {size(size_bytes)}" if size_bytes else f"{name}: no baseline is declared")
