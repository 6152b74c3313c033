"""`purge`: frees what a daemon left."""

from __future__ import annotations

import os

import click

from ...errors import BadConfiguration
from . import leftovers
from .leftovers import Leftover
from .tables import size, table


def freed_text(found: Leftover) -> str:
    """What was removed, and what stays in use until its readers end."""
    rows = [(piece.name.lstrip("/"), size(piece.taken_bytes)) for piece in found.pieces]
    lines = [table(("FREED", "SIZE"), rows, right=(1,)), "", f"{size(found.taken_bytes)} of instance {found.instance}"]
    if found.views:
        lines.append(
            f"{found.views} of its lanes are still held: what those processes view is freed when they let go of it"
        )
    return "\n".join(lines)


def one_of(left: list[Leftover]) -> Leftover | None:
    """The instance meant by a purge that names none: the only one there is.

    Raises:
        BadConfiguration: there are several.
    """
    if len(left) > 1:
        names = ", ".join(found.instance for found in left)
        raise BadConfiguration(f"{len(left)} instances are left ({names}): say which with --instance")
    return left[0] if left else None


@click.command()
@click.option("--instance", metavar="NAME", help="Whose memory; without it the only one that this user has left.")
def purge(instance: str | None) -> None:
    """Frees the shared memory that a daemon left when it was stopped or killed, with every entry in it.

    Refused while a daemon serves the instance. A daemon that is only to be started again needs no purge: it takes up
    what is there. Readers that still view something keep it until they let go.
    """
    if instance is None:
        mine = [found for name in leftovers.instances() if (found := leftovers.look(name)) and _purgeable(found)]
        found = one_of(mine)
        if found is None:
            click.echo("nothing is left to free")
            return
        instance = found.instance
    there = leftovers.look(instance)
    if there is None:
        raise BadConfiguration(f"nothing of instance {instance!r} is in /dev/shm; {_known()}")
    leftovers.owned_by(os.geteuid(), there)
    click.echo(freed_text(leftovers.remove(instance)))


def _purgeable(found: Leftover) -> bool:
    return found.served is False and os.geteuid() in (0, found.uid)


def _known() -> str:
    names = leftovers.instances()
    return f"there are {', '.join(names)}" if names else "nor of any other"
