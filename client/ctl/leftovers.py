"""`purge`: the segments in /dev/shm with tensord's names, their owners, and the removal of those that no daemon serves.

Invariants: an instance's lock is held here during the removal of its segments. A daemon that starts meanwhile is
refused, as if another daemon served the instance.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import click

from ...errors import BadConfiguration, InstanceBusy, SegmentError
from ...shm.ring import segments
from .daemon import checked
from .output import size, table

_PREFIX: Final = "tensord."


class Leftover(NamedTuple):
    """An instance's segments: the bytes of memory of each, by name. `uid`: the owner of the ring, or else of another.
    `served`: whether a daemon holds the instance's lock; another user's is taken for served."""

    instance: str
    segments: dict[str, int]
    uid: int
    served: bool

    @property
    def taken_bytes(self) -> int:
        return sum(self.segments.values())


def instances(folder: Path = segments.SHM_FOLDER) -> list[str]:
    """The names of all instances with a segment, of any user."""
    found = set()
    for path in folder.glob(f"{_PREFIX}*.*"):
        instance, _, part = path.name.removeprefix(_PREFIX).partition(".")
        if part in ("ring", "index", "lock") or part.startswith("lane."):
            found.add(instance)
    return sorted(found)


def look(instance: str) -> Leftover | None:
    """The segments of an instance; None if there are none. Holds no lock on return."""
    found = {}
    for name in segments.existing(instance):
        with suppress(FileNotFoundError):
            found[name.lstrip("/")] = (segments.SHM_FOLDER / name.lstrip("/")).lstat()
    if not found:
        return None
    taken = {name: status.st_blocks * 512 for name, status in found.items()}
    names = (f"{_PREFIX}{instance}.{part}" for part in ("ring", "index", "lock"))
    owner = next((found[name] for name in names if name in found), next(iter(found.values())))
    return Leftover(instance, taken, owner.st_uid, _locked(segments.SHM_FOLDER / f"{_PREFIX}{instance}.lock"))


def remove(there: Leftover) -> Leftover:
    """Removes all segments of an instance, and returns them. Views of them stay valid. Raises InstanceBusy if a daemon
    serves it, and SegmentError if anything of it is another user's."""
    instance, uid = there.instance, os.geteuid()
    if uid not in (0, there.uid):
        raise SegmentError(f"instance {instance!r} belongs to uid {there.uid}, you are uid {uid}: run it as that user")
    try:
        fd = segments.claim_instance(instance, uid=there.uid)
    except InstanceBusy:
        raise InstanceBusy(
            f"instance {instance!r} is served by a running tensord: stop it first; with SIGINT it frees its memory"
        ) from None
    try:
        now = look(instance) or there
        # The lock file is removed last, since it excludes other processes.
        for name in sorted(now.segments, key=lambda name: name.endswith(".lock")):
            segments.remove(f"/{name}")
    finally:
        os.close(fd)
    return now


def _locked(path: Path) -> bool:
    """As `Leftover.served`. Takes the lock for a moment."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@click.command()
@click.option("--instance", metavar="NAME", help="The instance; by default that of a daemon started here.")
@click.option("--yes", is_flag=True, help="Confirm that every entry in it is dropped.")
def purge(instance: str | None, yes: bool) -> None:
    """Frees the shared memory of a daemon that has ended.

    Every entry in it is dropped: it needs --yes.

    Refused while a daemon serves the instance. A daemon that will be started again needs no purge: it continues with
    the memory it finds. Memory that readers view is freed when they release it. `tensorctl doctor` lists such memory.
    """
    named = _usual_instance() if instance is None else instance
    there = look(named)
    if there is None:
        others = ", ".join(instances())
        none = f"instance {named!r} has no segment in /dev/shm"
        none += f"; these instances have segments: {others}" if others else ", nor has any other instance"
        if instance is not None:
            raise BadConfiguration(none)
        click.echo(none)
        return
    if not yes and not there.served:
        held = f"{size(there.taken_bytes)} of instance {named}"
        raise click.UsageError(f"this would free {held}, with every entry in it: add --yes to confirm")
    freed = remove(there)
    click.echo(table(("FREED", ">SIZE"), [(name, size(taken_bytes)) for name, taken_bytes in freed.segments.items()]))
    click.echo(f"\n{size(freed.taken_bytes)} of instance {named}")


def _usual_instance() -> str:
    """The instance of a daemon started here and now, according to that daemon."""
    try:
        rows, _ = checked()
    except BadConfiguration as error:
        raise BadConfiguration(f"{error}; or name the instance with --instance") from None
    return str(next(row["value"] for row in rows if row["key"] == "instance"))
