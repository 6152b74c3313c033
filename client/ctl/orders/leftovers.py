"""The segments in /dev/shm with tensord's names, their owners, and whether a daemon serves them.

Owns: finding them, and removing those that no daemon serves. Does not own: the names (shm/ring/segments.py).

Invariants: an instance's lock is held here during the removal of its segments. A daemon that starts meanwhile is
refused, as if another daemon served the instance.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from ....errors import InstanceBusy, SegmentError
from ....shm.ring import segments

_PREFIX: Final = "tensord."
_SECTOR_BYTES: Final = 512


class LeftoverSegment(NamedTuple):
    """One segment. `taken_bytes`: its memory. `held`: some process has it open or mapped (lanes only)."""

    name: str
    taken_bytes: int
    uid: int
    held: bool = False


class Leftover(NamedTuple):
    """An instance's segments. `served`: whether a daemon holds its lock; None if that cannot be determined."""

    instance: str
    segments: tuple[LeftoverSegment, ...]
    served: bool | None

    @property
    def taken_bytes(self) -> int:
        return sum(segment.taken_bytes for segment in self.segments)

    @property
    def uid(self) -> int:
        """The instance's owner: the owner of its ring, or else of another of its segments."""
        uids = {segment.name: segment.uid for segment in self.segments}
        names = (f"{_PREFIX}{self.instance}.{part}" for part in ("ring", "index", "lock"))
        return next((uids[name] for name in names if name in uids), self.segments[0].uid)

    @property
    def views(self) -> int:
        """Number of lanes that a process holds. Their processes keep their mappings even if the names are removed."""
        return sum(segment.held for segment in self.segments)


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
    found = tuple(_segments_of(instance))
    return Leftover(instance, found, _locked(segments.SHM_FOLDER / f"{_PREFIX}{instance}.lock")) if found else None


def remove(instance: str) -> Leftover:
    """Removes all segments of an instance without a daemon, except files of other users that this user may not remove.

    Memory that a process has mapped is freed when the process unmaps it; its views stay valid.

    Returns:
        The removed segments.

    Raises:
        InstanceBusy: a daemon serves the instance.
        SegmentError: the instance is another user's.
    """
    there = look(instance)
    try:
        fd = segments.claim_instance(instance, uid=None if there is None else there.uid)
    except InstanceBusy:
        raise InstanceBusy(
            f"instance {instance!r} is served by a running tensord: stop it first; with SIGINT it frees its memory"
        ) from None
    try:
        # The lock file is removed last, since it excludes other processes.
        ordered = sorted(_segments_of(instance), key=lambda segment: segment.name.endswith(".lock"))
        removed = tuple(segment for segment in ordered if _remove(segment))
    finally:
        os.close(fd)
    return Leftover(instance, removed, False)


def _remove(segment: LeftoverSegment) -> bool:
    try:
        return segments.remove(f"/{segment.name}")
    except SegmentError:
        return False


def _segments_of(instance: str) -> Iterator[LeftoverSegment]:
    for name in segments.existing(instance):
        path = segments.SHM_FOLDER / name.lstrip("/")
        with suppress(FileNotFoundError):
            status = path.lstat()
            held = ".lane." in name and _locked(path) is True
            yield LeftoverSegment(path.name, status.st_blocks * _SECTOR_BYTES, status.st_uid, held)


def _locked(path: Path) -> bool | None:
    """Whether a process holds the file's lock; None if this user may not open it. Takes the lock for a moment."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        # Lanes are held by shared locks, instances by an exclusive one. An exclusive request conflicts with both.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def owned_by(uid: int, found: Leftover) -> None:
    """Checks that `uid` may remove an instance.

    Raises:
        SegmentError: the instance is another user's, and `uid` is not root.
    """
    if uid not in (0, found.uid):
        raise SegmentError(
            f"instance {found.instance!r} belongs to uid {found.uid}, you are uid {uid}: run it as that user"
        )
