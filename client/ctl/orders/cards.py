"""`baseline` and `room`: how much of a card is held by plan, and room that is made on a card.

Owns: their arguments and output, and which card a number means. Does not own: what follows from a baseline, who gives
memory back, and when (the daemon's governor).
"""

from __future__ import annotations

from typing import Any, Final

import click
import msgspec

from ....ipc.messages import control as messages
from ....ipc.messages.modes import Tier
from ..daemon import Daemon, pass_daemon
from ..output import age, as_json, counted, pairs, show, size, words
from ..parameters import DURATION, SIZE

_TIME_S_MAX: Final = 86400.0
_SAID: Final = {"nothing": "freed nothing", "failed": "FAILED"}

card_option = click.option(
    "--card",
    metavar="CARD",
    help="The card, by its name, or its number from 0 in the order of names; by default the only one.",
)


def _cards(daemon: Daemon) -> dict[str, dict[str, Any]]:
    """The cards' gauges by name."""
    return {each["gauge"]: each for each in daemon.status()["governor"]["gauges"] if each["tier"] == Tier.DEVICE}


def _named(card: str | None, cards: dict[str, dict[str, Any]]) -> str:
    """The name of the card that is meant: by name, by its number from 0, or the only one.

    Raises:
        BadParameter: there is no such card, or several; the message names them.
        ClickException: the daemon reads no card.
    """
    names = list(cards)
    if not names:
        raise click.ClickException("the daemon reads no card; `tensorctl doctor` says why")
    if card is None and len(names) == 1:
        return names[0]
    if card in cards:
        return str(card)
    if card is not None and card.isdecimal() and int(card) < len(names):
        return names[int(card)]
    why = "name one" if card is None else f"no card is called {card!r}"
    raise click.BadParameter(f"{why}; the daemon's cards are {', '.join(names)}", param_hint="'--card'")


def _shown(gauge: dict[str, Any]) -> str:
    """The baseline that is in force on a card."""
    said = "{gauge}: {baseline_bytes} of {total_bytes}, {baseline}; {share} of the rest is used"
    return words(gauge, said if gauge["baseline_bytes"] else "{gauge}: no baseline")


@click.command()
@click.argument("size_bytes", metavar="[SIZE]", type=SIZE, required=False)
@card_option
@pass_daemon
def baseline(daemon: Daemon, size_bytes: int | None, card: str | None) -> None:
    """Shows, or sets to SIZE, how much of a card is held by plan, as by an inference engine.

    Says what is in force then: at most 95 % of the card, or what clients declare, if that is more. The modes of the
    card are about the rest. SIZE is written as 72GiB; 0 ends the declaration. It holds until the daemon ends. Set
    `device.baseline` in the configuration to keep it.
    """
    cards = _cards(daemon)
    shown = list(cards) if card is None and size_bytes is None else [_named(card, cards)]
    if size_bytes is not None:
        (name,) = shown
        daemon.order(lambda number: messages.DeclareBaseline(number, name, size_bytes, stays=True), messages.Done)
        cards = _cards(daemon)
    click.echo("\n".join(_shown(cards[each]) for each in shown if each in cards) or "no card")


def room_text(device: str, size_bytes: int, made: messages.RoomMade) -> str:
    """The answer to a request for room: whether there is room, and what each holder of memory has done."""
    said = f"no room: {size(made.missing_bytes)} of {size(size_bytes)} are missing"
    if made.made:
        said = f"{size(size_bytes)} are free, and held for {age(made.lasts_s)}"
    rows = [(device, said)]
    for step in made.steps:
        done = _SAID.get(step.outcome, step.outcome)
        if step.outcome == "freed":
            rows.append((step.who, f"{done} {size(step.freed_bytes)}" + (f"; {step.why}" if step.why else "")))
        else:
            freed = f"; {size(step.freed_bytes)} came free" if step.freed_bytes else ""
            rows.append((step.who, f"{done}: {step.why}{freed}"))
    return pairs(rows)


@click.command()
@click.argument("size_bytes", metavar="SIZE", type=SIZE)
@card_option
@click.option(
    "--for", "for_s", type=DURATION, default="10m", show_default=True, metavar="TIME", help="How long it is held."
)
@click.option(
    "--wait", "wait_s", type=DURATION, default="1m", show_default=True, metavar="TIME", help="How long it may take."
)
@as_json
@pass_daemon
@click.pass_context
def room(
    ctx: click.Context, daemon: Daemon, size_bytes: int, card: str | None, for_s: float, wait_s: float, as_json: bool
) -> None:
    """Makes SIZE of a card free, and holds it.

    First cached tensors leave that are not in use. Then the servers of `neighbours.servers` are asked to give memory
    back, in that order and one at a time, if they are idle. What each has freed is the fall of the card's gauge.

    The room is held after the command has ended, until --for is over, or `tensorctl room 0` ends it: no client reserves
    that memory meanwhile. Start what needs the memory, then end the room.

    \b
    Exit code 0: the memory is free and held.
    Exit code 1: it is not; the output says who freed what, and why not more.
    """
    for option, given_s in (("--for", for_s), ("--wait", wait_s)):
        if not 0 < given_s <= _TIME_S_MAX:
            raise click.UsageError(f"{option} {given_s:g} s: must be above 0 and at most {_TIME_S_MAX:g} s")
    name = _named(card, _cards(daemon))
    if size_bytes == 0:
        count = daemon.order(lambda number: messages.EndRoom(number, name), messages.Counted).count
        click.echo(f"{name}: {counted(count, 'room', 'rooms')} ended")
        return
    made = daemon.order(
        lambda number: messages.MakeRoom(number, name, size_bytes, for_s, wait_s),
        messages.RoomMade,
        wait_s + daemon.timeout_s,
    )
    show(msgspec.to_builtins(made), as_json, lambda _: room_text(name, size_bytes, made))
    if not made.made:
        click.echo(f"tensorctl: {made.why}", err=True)
        ctx.exit(1)
