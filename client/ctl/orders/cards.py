"""`room`: room that is made on a card.

Owns: its arguments and output, and which card a number means. Does not own: who gives memory back, and when (the
daemon's governor).
"""

from __future__ import annotations

from typing import Final

import click
import msgspec

from ....ipc.messages import control as messages
from ....ipc.messages.modes import Tier
from ..daemon import Daemon, pass_daemon
from ..output import age, as_json, counted, pairs, show, size
from ..parameters import DURATION, SIZE

_TIME_S_MAX: Final = 86400.0
_SAID: Final = {"nothing": "freed nothing", "failed": "FAILED"}


def _named(card: str | None, daemon: Daemon) -> str:
    """The name of the card that is meant: by name, by its number from 0, or the only one.

    Raises:
        BadParameter: there is no such card, or several; the message names them.
        ClickException: the daemon reads no card.
    """
    names: list[str] = [each["gauge"] for each in daemon.status()["governor"]["gauges"] if each["tier"] == Tier.DEVICE]
    if not names:
        raise click.ClickException("the daemon reads no card; `tensorctl doctor` says why")
    if card is None and len(names) == 1:
        return names[0]
    if card in names:
        return str(card)
    if card is not None and card.isdecimal() and int(card) < len(names):
        return names[int(card)]
    why = "name one" if card is None else f"no card is called {card!r}"
    raise click.BadParameter(f"{why}; the daemon's cards are {', '.join(names)}", param_hint="'--card'")


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
@click.option(
    "--card",
    metavar="CARD",
    help="The card, by its name, or its number from 0 in the order of names; by default the only one.",
)
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
    name = _named(card, daemon)
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
