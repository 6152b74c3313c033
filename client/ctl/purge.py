"""`purge`: frees the shared memory of a daemon that has ended.

Owns: the choice of the instance, the output. Does not own: the removal (leftovers.py).
"""

from __future__ import annotations

import os
from typing import Final

import click

from ...errors import BadConfiguration
from . import leftovers
from .configuration import checked
from .leftovers import Leftover
from .tables import counted, size, table

_VARIABLE: Final = "TENSORD_INSTANCE"


def freed_text(found: Leftover) -> str:
    """The removed segments, and the memory that stays in use until its readers end."""
    rows = [(segment.name.lstrip("/"), size(segment.taken_bytes)) for segment in found.segments]
    lines = [table(("FREED", "SIZE"), rows, right=(1,)), "", f"{size(found.taken_bytes)} of instance {found.instance}"]
    if found.views:
        lines.append(
            f"processes still hold {counted(found.views, 'lane', 'lanes')} of it: "
            "the memory that they use is freed when they release it"
        )
    return "\n".join(lines)


@click.command()
@click.option("--instance", metavar="NAME", help="The instance; by default that of a daemon started here.")
@click.option("--yes", is_flag=True, help="Confirm that every entry in it is dropped.")
def purge(instance: str | None, yes: bool) -> None:
    """Frees the shared memory of a daemon that was stopped or killed, with every entry in it. Needs --yes.

    Refused while a daemon serves the instance. A daemon that will be started again needs no purge: it continues with
    the memory it finds. Memory that readers view is freed when they release it. `tensorctl doctor` lists such memory.
    """
    named = instance is not None
    instance = usual_instance() if instance is None else instance
    there = leftovers.look(instance)
    if there is not None:
        leftovers.owned_by(os.geteuid(), there)
        if not yes and not there.served:
            held = f"{size(there.taken_bytes)} of instance {instance}"
            raise click.UsageError(f"this would free {held}, with every entry in it: add --yes to confirm")
        click.echo(freed_text(leftovers.remove(instance)))
        left = leftovers.look(instance)
        if left is not None:
            names = ", ".join(segment.name.lstrip("/") for segment in left.segments)
            click.echo(f"{names}: not removed, since it belongs to another user")
        return
    others = leftovers.instances()
    message = f"instance {instance!r} has no segment in /dev/shm"
    message += f"; these instances have segments: {', '.join(others)}" if others else ", nor has any other instance"
    if named:
        raise BadConfiguration(message)
    click.echo(message)


def usual_instance() -> str:
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
