"""The segments in /dev/shm with tensord's names, their owners, and whether a daemon serves them.

Owns: finding them, and removing those that no daemon serves. Does not own: the names (shm/ring/segments.py).

Invariants: an instance's lock is held here during the removal of its segments. A daemon that starts meanwhile is
refused, as if another daemon served the instance.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from ....errors import InstanceBusy, SegmentError
from ....shm.ring import segments

_PREFIX: Final = "tensord."
_SECTOR_BYTES: Final = 512


class Leftover(NamedTuple):
    """An instance's segments: the bytes of memory of each, by name. `uid`: the owner of the ring, or else of another.
    `served`: whether a daemon holds the instance's lock; None if that cannot be determined."""

    instance: str
    segments: dict[str, int]
    uid: int
    served: bool | None

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
    taken = {name: status.st_blocks * _SECTOR_BYTES for name, status in found.items()}
    names = (f"{_PREFIX}{instance}.{part}" for part in ("ring", "index", "lock"))
    owner = next((found[name] for name in names if name in found), next(iter(found.values())))
    return Leftover(instance, taken, owner.st_uid, _locked(segments.SHM_FOLDER / f"{_PREFIX}{instance}.lock"))


def remove(there: Leftover) -> Leftover:
    """Removes all segments of an instance without a daemon.

    Memory that a process has mapped is freed when the process unmaps it; its views stay valid.

    Returns:
        The removed segments.

    Raises:
        InstanceBusy: a daemon serves the instance.
        SegmentError: the instance, or one of its segments, is another user's.
    """
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


def _locked(path: Path) -> bool | None:
    """Whether a daemon holds the lock; None if this user may not open it. Takes the lock for a moment."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
