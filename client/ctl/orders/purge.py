"""`purge`: frees the shared memory of a daemon that has ended.

Owns: the choice of the instance, the output. Does not own: the removal (leftovers.py).
"""

from __future__ import annotations

import os
from typing import Final

import click

from ....errors import BadConfiguration
from ..output import size, table
from ..show.configuration import checked
from . import leftovers

_VARIABLE: Final = "TENSORD_INSTANCE"


@click.command()
@click.option("--instance", metavar="NAME", help="The instance; by default that of a daemon started here.")
@click.option("--yes", is_flag=True, help="Confirm that every entry in it is dropped.")
def purge(instance: str | None, yes: bool) -> None:
    """Frees the shared memory of a daemon that was stopped or killed, with every entry in it. Needs --yes.

    Refused while a daemon serves the instance. A daemon that will be started again needs no purge: it continues with
    the memory it finds. Memory that readers view is freed when they release it. `tensorctl doctor` lists such memory.
    """
    named = _usual_instance() if instance is None else instance
    there = leftovers.look(named)
    if there is None:
        others = ", ".join(leftovers.instances())
        none = f"instance {named!r} has no segment in /dev/shm"
        none += f"; these instances have segments: {others}" if others else ", nor has any other instance"
        if instance is not None:
            raise BadConfiguration(none)
        click.echo(none)
        return
    if not yes and not there.served:
        held = f"{size(there.taken_bytes)} of instance {named}"
        raise click.UsageError(f"this would free {held}, with every entry in it: add --yes to confirm")
    freed = leftovers.remove(there)
    click.echo(table(("FREED", ">SIZE"), [(name, size(taken_bytes)) for name, taken_bytes in freed.segments.items()]))
    click.echo(f"\n{size(freed.taken_bytes)} of instance {named}")


def _usual_instance() -> str:
    """The instance of a daemon started here and now, according to that daemon.

    Raises:
        BadConfiguration: the daemon would not start, or $TENSORD_INSTANCE is empty. A daemon treats an empty variable
            as not set; here the default instance would be freed although another one was meant.
    """
    if os.environ.get(_VARIABLE) == "":
        raise BadConfiguration(f"{_VARIABLE} is empty: set it to an instance's name, unset it, or use --instance")
    try:
        rows = checked().rows
    except BadConfiguration as error:
        raise BadConfiguration(f"{error}; or name the instance with --instance") from None
    return str(next(row["value"] for row in rows if row["key"] == "instance"))
