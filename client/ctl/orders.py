"""The commands that change a running daemon: `limit`, `evict`, `clear`, `room` and `reload`.

Owns: their arguments and output, which card a number means, and the signal of a reload.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Final

import click
import msgspec
from click.exceptions import Exit

from ...errors import SocketForbidden, TimedOut
from ...ipc.messages import control as messages
from ...ipc.messages.modes import Tier
from ...ipc.messages.schema import SIZE_BYTES_MAX
from ...ipc.quantities import show_size
from .daemon import Daemon, pass_daemon
from .output import age, as_json, counted, number, pairs, show, size
from .parameters import KEY, SIZE, keys_meant, namespace_tag, time_option

LIMIT_BYTES_MIN: Final = 1 << 20
# The daemon empties a store of a million entries in slices, and serves other clients in between.
_CLEAR_S: Final = 120.0
_OUTCOMES: Final = {"nothing": "freed nothing", "failed": "FAILED"}


@click.command()
@click.argument("limit_bytes", metavar="SIZE", type=SIZE)
@pass_daemon
def limit(daemon: Daemon, limit_bytes: int) -> None:
    """Sets the size of the store.

    SIZE is written as 4GiB, 512MiB or 1048576, up to the ring's size. If the store is larger, entries are evicted at
    once by the daemon's policy; pinned entries follow when they are released. The limit holds until the daemon ends, or
    until a reload sets another `max_bytes`. Set `max_bytes` in the configuration to keep it.
    """
    if limit_bytes > SIZE_BYTES_MAX:
        raise click.BadParameter(f"{show_size(limit_bytes)} is more than any ring has", param_hint="'SIZE'")
    if limit_bytes < LIMIT_BYTES_MIN:
        why = f"{show_size(limit_bytes)} is under {show_size(LIMIT_BYTES_MIN)}, the least"
        raise click.BadParameter(f"{why}; `tensorctl clear` empties the store", param_hint="'SIZE'")
    done = daemon.order(messages.Limit, limit_bytes)
    click.echo(f"limit {size(done.before_bytes)} -> {size(done.after_bytes)}")
    if done.after_bytes < limit_bytes:
        more = "is more than the size of the ring: for more, set ring_bytes and restart the daemon"
        click.echo(f"{size(limit_bytes)} {more}")


@click.command()
@click.argument("keys", metavar="KEY...", type=KEY, nargs=-1, required=True)
@pass_daemon
def evict(daemon: Daemon, keys: tuple[str, ...]) -> None:
    """Evicts entries. An entry in use stays readable for its readers, and is not found any more.

    KEY is hexadecimal. A prefix is enough if no other stored key begins with it. If a KEY does not identify one entry,
    nothing is evicted. A whole key that is not stored is not an error.
    """
    meant = list(dict.fromkeys(keys_meant(daemon, keys)))
    daemon.greeted()
    step = daemon.limits.keys_per_request_max
    some = (meant[start : start + step] for start in range(0, len(meant), step))
    evicted = sum(daemon.order(messages.Evict, keys).count for keys in some)
    missing = len(meant) - evicted
    click.echo(f"evicted {number(evicted)}" + (f", {number(missing)} not stored" if missing else ""))


@click.command()
@namespace_tag
@click.option("--yes", is_flag=True, help="Confirm the eviction.")
@pass_daemon
def clear(daemon: Daemon, namespace_tag: str | None, yes: bool) -> None:
    """Evicts every entry, or every entry of a namespace. Needs --yes."""
    which = f"every entry of namespace {namespace_tag}" if namespace_tag else "every entry"
    if not yes:
        raise click.UsageError(f"this would evict {which}: add --yes to confirm")
    tag = bytes.fromhex(namespace_tag) if namespace_tag else None
    click.echo(f"evicted {number(daemon.order(messages.Clear, tag, timeout_s=max(_CLEAR_S, daemon.timeout_s)).count)}")


def _named(card: str | None, daemon: Daemon) -> str:
    """The name of the card that is meant: by name, by its number from 0, or the only one."""
    names: list[str] = [each["gauge"] for each in daemon.status()["governor"]["gauges"] if each["tier"] == Tier.DEVICE]
    if not names:
        raise click.ClickException('the daemon reads no card; its log says why ("gauge source absent")')
    if card is None and len(names) == 1:
        return names[0]
    if card is not None and card in names:
        return card
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
        freed = size(step.freed_bytes)
        if step.outcome == "freed":
            done = f"freed {freed}"
        else:
            done = f"{_OUTCOMES.get(step.outcome, step.outcome)}: {step.why}"
            done += f"; {freed} came free" if step.freed_bytes else ""
        rows.append((step.who, done))
    return pairs(rows)


@click.command()
@click.argument("size_bytes", metavar="SIZE", type=SIZE)
@click.option(
    "--card",
    metavar="CARD",
    help="The card, by its name, or its number from 0 in the order of names; by default the only one.",
)
@time_option("--for", "for_s", 3600.0, "10m", "How long it is held.")
@time_option("--wait", "wait_s", 86400.0, "1m", "How long it may take.")
@as_json
@pass_daemon
def room(daemon: Daemon, size_bytes: int, card: str | None, for_s: float, wait_s: float, as_json: bool) -> None:
    """Makes SIZE of a card free, and holds it.

    First cached tensors leave that are not in use. Then the servers of `neighbours.servers` are asked to give memory
    back, in that order and one at a time, if they are idle. What each has freed is the fall of the card's gauge.

    The room is held after the command has ended, until --for is over, or `tensorctl room 0` ends it: no client reserves
    that memory meanwhile. Start what needs the memory, then end the room.

    \b
    Exit code 0: the memory is free and held.
    Exit code 1: it is not; the output says who freed what, and why not more.
    """
    name = _named(card, daemon)
    if size_bytes == 0:
        count = daemon.order(messages.EndRoom, name).count
        click.echo(f"{name}: {counted(count, 'room', 'rooms')} ended")
        return
    made = daemon.order(messages.MakeRoom, name, size_bytes, for_s, wait_s, timeout_s=wait_s + daemon.timeout_s)
    show(msgspec.to_builtins(made), as_json, lambda _: room_text(name, size_bytes, made))
    if not made.made:
        click.echo(f"tensorctl: {made.why}", err=True)
        raise Exit(1)


@click.command()
@pass_daemon
def reload(daemon: Daemon) -> None:
    """Has the daemon read its configuration again.

    Sends SIGHUP, and waits for the verdict.

    Exit code 0: all changed settings that need no restart are in force. Exit code 1: the daemon refused the
    configuration and changed nothing. Only the daemon's own user and root may send the signal.
    """
    before = daemon.ask(messages.ConfigQuery)["reload"]["number"]
    status = daemon.status()
    try:
        os.kill(status["pid"], signal.SIGHUP)
    except (PermissionError, ProcessLookupError) as error:
        raise SocketForbidden(
            f"cannot send SIGHUP to pid {status['pid']} of uid {status['uid']} ({error.strerror}): run it as that user "
            "or root, on the daemon's host and not in another container"
        ) from None
    deadline = time.monotonic() + daemon.timeout_s
    while (verdict := daemon.ask(messages.ConfigQuery)["reload"])["number"] == before:
        if time.monotonic() > deadline:
            raise TimedOut(f"the daemon gave no verdict within {daemon.timeout_s:g} s: see its log")
        time.sleep(0.02)
    if verdict["refused"]:
        click.echo(f"tensorctl: refused, the configuration is unchanged: {verdict['refused']}", err=True)
        raise Exit(1)
    for kind, how in (("applied", ""), ("waiting", ": needs a restart")):
        for row in verdict[kind]:
            click.echo(f"{row['key']} {row['before']} -> {row['after']}{how}")
    click.echo(f"reloaded: {counted(len(verdict['applied']), 'setting', 'settings')} changed")
