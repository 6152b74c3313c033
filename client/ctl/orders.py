"""`limit`, `evict` and `clear`: what changes a running daemon, over the control socket."""

from __future__ import annotations

from functools import partial
from typing import Final

import click

from ...ipc import messages
from ...ipc.quantities import show_size
from .daemon import Daemon, pass_daemon
from .parameters import KEY, SIZE, TAG, keys_meant
from .tables import number, size

LIMIT_BYTES_MIN: Final = 1 << 20
# A store of a million entries is emptied in slices, between which everybody else is served.
_CLEAR_S: Final = 120.0


@click.command()
@click.argument("limit_bytes", metavar="SIZE", type=SIZE)
@pass_daemon
def limit(daemon: Daemon, limit_bytes: int) -> None:
    """Lets the store have SIZE bytes from now on: fewer or more, up to the ring.

    SIZE is written as 4GiB, 512MiB or 1048576. Above it, entries go at once, by the daemon's policy; those that are
    pinned follow when they are let go. Lasts until the daemon ends or a reload brings another `max_bytes`, which says
    it for good.
    """
    if limit_bytes < LIMIT_BYTES_MIN:
        raise click.BadParameter(
            f"{show_size(limit_bytes)} is under {show_size(LIMIT_BYTES_MIN)}, the least; "
            "`tensorctl clear` empties the store",
            param_hint="'SIZE'",
        )
    done = daemon.order(lambda number: messages.Limit(number, limit_bytes), messages.Limited)
    click.echo(f"limit {size(done.before_bytes)} -> {size(done.after_bytes)}")
    if done.after_bytes < limit_bytes:
        click.echo(f"{size(limit_bytes)} is more than the ring has: set ring_bytes and restart the daemon for more")


@click.command()
@click.argument("keys", metavar="KEY...", type=KEY, nargs=-1, required=True)
@pass_daemon
def evict(daemon: Daemon, keys: tuple[str, ...]) -> None:
    """Evicts entries. What somebody still views stays readable for them, and is not found any more.

    KEY is hexadecimal; as many of its first digits as no other stored key begins with will do. Unless every KEY means
    one entry nothing is evicted; a whole key that is not stored is no error.
    """
    meant = list(dict.fromkeys(keys_meant(daemon, keys)))
    step = daemon.keys_per_request_max
    evicted = 0
    for start in range(0, len(meant), step):
        make = partial(messages.Evict, keys=meant[start : start + step])
        evicted += daemon.order(make, messages.Counted).count
    missing = len(meant) - evicted
    click.echo(f"evicted {number(evicted)}" + (f", {number(missing)} not stored" if missing else ""))


@click.command()
@click.option("--namespace-tag", type=TAG, metavar="HEX", help="Only this namespace: the first 16 digits of its keys.")
@click.option("--yes", is_flag=True, help="Really.")
@pass_daemon
def clear(daemon: Daemon, namespace_tag: str | None, yes: bool) -> None:
    """Evicts every entry, or every entry of a namespace. Needs --yes."""
    which = f"every entry of namespace {namespace_tag}" if namespace_tag else "every entry"
    if not yes:
        raise click.UsageError(f"this would evict {which}: add --yes if it shall")
    tag = bytes.fromhex(namespace_tag) if namespace_tag else None
    done = daemon.order(lambda number: messages.Clear(number, tag), messages.Counted, max(_CLEAR_S, daemon.timeout_s))
    click.echo(f"evicted {number(done.count)}")
