"""`room`: makes room on a card, by cached tensors and by neighbours that are no clients.

Owns: its arguments and output. Does not own: who gives memory back, and when (the daemon's governor).
"""

from __future__ import annotations

import json
from typing import Final

import click
import msgspec

from ...ipc import messages
from ...ipc.modes import Tier
from .baseline import named
from .daemon import Daemon, pass_daemon, understood
from .parameters import DURATION, SIZE
from .tables import age, counted, pairs, size

_TIME_S_MAX: Final = 86400.0
_SAID: Final = {
    "freed": "freed",
    "nothing": "freed nothing",
    "left alone": "left alone",
    "asked": "asked",
    "failed": "FAILED",
}


def step_text(step: messages.RoomStep) -> str:
    """What one holder of memory has done."""
    said = _SAID[step.outcome]
    if step.outcome == "freed":
        return f"freed {size(step.freed_bytes)}" + (f"; {step.why}" if step.why else "")
    freed = f"; {size(step.freed_bytes)} came free" if step.freed_bytes else ""
    return f"{said}: {step.why}{freed}"


def room_text(device: str, size_bytes: int, made: messages.RoomMade) -> str:
    """The answer to a request for room, in lines."""
    if made.made:
        said = f"{size(size_bytes)} are free, and held for {age(made.lasts_s)}"
    else:
        said = f"no room: {size(made.missing_bytes)} of {size(size_bytes)} are missing"
    return pairs([(device, said), *((step.who, step_text(step)) for step in made.steps)])


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
@click.option("--json", "as_json", is_flag=True, help="Print the daemon's answer as JSON.")
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
    with understood("status"):
        cards = [each["gauge"] for each in daemon.status()["governor"]["gauges"] if each["tier"] == Tier.DEVICE]
    name = named(card, cards)
    if size_bytes == 0:
        count = daemon.order(lambda number: messages.EndRoom(number, name), messages.Counted).count
        click.echo(f"{name}: {counted(count, 'room', 'rooms')} ended")
        return
    made = daemon.order(
        lambda number: messages.MakeRoom(number, name, size_bytes, for_s, wait_s),
        messages.RoomMade,
        wait_s + daemon.timeout_s,
    )
    click.echo(json.dumps(msgspec.to_builtins(made), indent=2) if as_json else room_text(name, size_bytes, made))
    if not made.made:
        click.echo(f"tensorctl: {made.why}", err=True)
        ctx.exit(1)
