"""`limit`, `evict` and `clear`: changes of a running daemon, over the control socket.

Owns: their arguments and output. Does not own: their execution.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import click

from ....ipc.messages import control as messages
from ....ipc.quantities import show_size
from ..daemon import Daemon, pass_daemon
from ..output import number, size
from ..parameters import KEY, SIZE, keys_meant, namespace_tag

LIMIT_BYTES_MIN: Final = 1 << 20
# The daemon empties a store of a million entries in slices, and serves other clients in between.
_CLEAR_S: Final = 120.0


@click.command()
@click.argument("limit_bytes", metavar="SIZE", type=SIZE)
@pass_daemon
def limit(daemon: Daemon, limit_bytes: int) -> None:
    """Sets the size of the store to SIZE bytes: smaller or larger, up to the ring's size.

    SIZE is written as 4GiB, 512MiB or 1048576. If the store is larger, entries are evicted at once by the daemon's
    policy; pinned entries follow when they are released. The limit holds until the daemon ends, or until a reload sets
    another `max_bytes`. Set `max_bytes` in the configuration to keep it.
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
        click.echo(
            f"{size(limit_bytes)} is more than the size of the ring: for more, set ring_bytes and restart the daemon"
        )


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
    step = daemon.keys_per_request_max
    evicted = 0
    for start in range(0, len(meant), step):
        make = partial(messages.Evict, keys=meant[start : start + step])
        evicted += daemon.order(make, messages.Counted).count
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
    done = daemon.order(lambda number: messages.Clear(number, tag), messages.Counted, max(_CLEAR_S, daemon.timeout_s))
    click.echo(f"evicted {number(done.count)}")
