"""`purge`: frees what a daemon left."""

from __future__ import annotations

import os
from typing import Final

import click

from ...errors import BadConfiguration
from . import leftovers
from .configuration import settings
from .leftovers import Leftover
from .tables import size, table

_VARIABLE: Final = "TENSORD_INSTANCE"


def freed_text(found: Leftover) -> str:
    """What was removed, and what stays in use until its readers end."""
    rows = [(piece.name.lstrip("/"), size(piece.taken_bytes)) for piece in found.pieces]
    lines = [table(("FREED", "SIZE"), rows, right=(1,)), "", f"{size(found.taken_bytes)} of instance {found.instance}"]
    if found.views:
        lines.append(
            f"{found.views} of its lanes are still held: what those processes view is freed when they let go of it"
        )
    return "\n".join(lines)


@click.command()
@click.option("--instance", metavar="NAME", help="Whose memory; without it that of a daemon started here.")
def purge(instance: str | None) -> None:
    """Frees the shared memory that a daemon left when it was stopped or killed, with every entry in it.

    Refused while a daemon serves the instance. A daemon that is only to be started again needs no purge: it takes up
    what is there. Readers that still view something keep it until they let go. `tensorctl doctor` lists what is left.
    """
    named = instance is not None
    instance = usual_instance() if instance is None else instance
    there = leftovers.look(instance)
    if there is not None:
        leftovers.owned_by(os.geteuid(), there)
        click.echo(freed_text(leftovers.remove(instance)))
        left = leftovers.look(instance)
        if left is not None:
            names = ", ".join(piece.name.lstrip("/") for piece in left.pieces)
            click.echo(f"{names}: not removed, of another user")
        return
    others = leftovers.instances()
    told = f"nothing of instance {instance!r} is in /dev/shm"
    told += f"; of others there is: {', '.join(others)}" if others else ", nor of any other"
    if named:
        raise BadConfiguration(told)
    click.echo(told)


def usual_instance() -> str:
    """The instance of a daemon that is started here and now, by its own word.

    Raises:
        BadConfiguration: it would not start; or $TENSORD_INSTANCE is empty. A daemon takes that for not set; here the
            usual instance would be freed where another one was meant.
    """
    if os.environ.get(_VARIABLE) == "":
        raise BadConfiguration(f"{_VARIABLE} is empty: set it to an instance's name, unset it, or use --instance")
    try:
        rows = settings()
    except BadConfiguration as error:
        raise BadConfiguration(f"{error}; or name the instance with --instance") from None
    return str(next(row["value"] for row in rows if row["key"] == "instance"))
