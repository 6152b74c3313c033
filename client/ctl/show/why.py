"""`why`: what an entry is, and why it is kept, or why it was removed.

Owns: which key is asked for. Does not own: the answer (the daemon), nor its form (output.py).
"""

from __future__ import annotations

import click

from ..daemon import Daemon, pass_daemon
from ..output import as_json, document, show
from ..parameters import KEY, keys_meant


@click.command()
@click.argument("key", type=KEY)
@as_json
@pass_daemon
@click.pass_context
def why(ctx: click.Context, daemon: Daemon, key: str, as_json: bool) -> None:
    """What an entry is, and why it is kept, or why it was removed.

    For a stored entry: its size, its worth to the policy, its class, and the number of colder entries. For a removed
    entry: when and why it was removed, and its state then. KEY is hexadecimal. A prefix of a
    stored key is enough if no other stored key begins with it.

    Exit code 1 if the key is unknown: neither stored nor remembered.
    """
    (meant,) = keys_meant(daemon, [key])
    answer = daemon.why(meant)
    show(answer, as_json, document)
    ctx.exit(1 if answer["state"] == "unknown" else 0)
