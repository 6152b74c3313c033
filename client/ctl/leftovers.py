"""What stands in /dev/shm under tensord's names, whose it is, and whether a daemon serves it.

Owns: finding it, and removing what nobody serves. Does not own the names (shm/segments.py).

Invariant: nothing of an instance is removed unless its lock is held here for as long as it takes: a daemon that starts
meanwhile is refused, as by any other daemon.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...errors import InstanceBusy, SegmentError
from ...shm import segments

_PREFIX: Final = "tensord."
_SECTOR_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class LeftoverSegment:
    """One segment. `taken_bytes` of memory; `held`: some process still has it open or mapped (lanes only)."""

    name: str
    taken_bytes: int
    uid: int
    held: bool = False


@dataclass(frozen=True, slots=True)
class Leftover:
    """An instance's segments. `served`: a daemon holds the lock; None where that cannot be told."""

    instance: str
    pieces: tuple[LeftoverSegment, ...]
    served: bool | None

    @property
    def taken_bytes(self) -> int:
        return sum(piece.taken_bytes for piece in self.pieces)

    @property
    def uid(self) -> int:
        """Whose instance it is: the owner of its ring, or of whatever else is there."""
        uids = {piece.name: piece.uid for piece in self.pieces}
        names = (segments.segment_name(self.instance, part) for part in ("ring", "index", "lock"))
        return next((uids[name] for name in names if name in uids), self.pieces[0].uid)

    @property
    def foreign(self) -> list[LeftoverSegment]:
        """Files under its names that are another user's: no daemon uses them."""
        return [piece for piece in self.pieces if piece.uid != self.uid]

    @property
    def views(self) -> int:
        """Lanes that some process still holds: it keeps mapped what it views, whatever is removed."""
        return sum(piece.held for piece in self.pieces)


def instances(folder: Path = segments.SHM_FOLDER) -> list[str]:
    """Every instance of which anything stands there, whoever's it is."""
    found = set()
    for path in folder.glob(f"{_PREFIX}*.*"):
        instance, _, part = path.name.removeprefix(_PREFIX).partition(".")
        if part in ("ring", "index", "lock") or part.startswith("lane."):
            found.add(instance)
    return sorted(found)


def look(instance: str) -> Leftover | None:
    """What stands for an instance; None if nothing does. Holds no lock afterwards."""
    pieces = tuple(_pieces(instance))
    return Leftover(instance, pieces, _served(instance)) if pieces else None


def remove(instance: str) -> Leftover:
    """Takes away all names of an instance that no daemon serves, but for files of other users that we may not remove.

    The memory of what a process still has mapped goes with that process: its views stay whole.

    Returns:
        What was removed.

    Raises:
        InstanceBusy: a daemon serves it.
        SegmentError: it is another user's.
    """
    lock = segments.segment_name(instance, "lock")
    there = look(instance)
    try:
        fd = segments.claim_instance(instance, uid=None if there is None else there.uid)
    except InstanceBusy:
        raise InstanceBusy(
            f"instance {instance!r} is served by a running tensord: stop it first; SIGINT makes it free its memory"
        ) from None
    try:
        # The lock last: it keeps others out.
        pieces = sorted(_pieces(instance), key=lambda piece: piece.name == lock)
        pieces = [piece for piece in pieces if _removed(piece)]
    finally:
        os.close(fd)
    return Leftover(instance, tuple(pieces), False)


def _removed(piece: LeftoverSegment) -> bool:
    try:
        return segments.remove(piece.name)
    except SegmentError:
        return False


def _pieces(instance: str) -> Iterator[LeftoverSegment]:
    for name in segments.existing(instance):
        path = segments.SHM_FOLDER / name.lstrip("/")
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        try:
            held = ".lane." in name and _locked(path) is True
        except FileNotFoundError:
            continue
        yield LeftoverSegment(name, status.st_blocks * _SECTOR_BYTES, status.st_uid, held)


def _served(instance: str) -> bool | None:
    path = segments.SHM_FOLDER / segments.segment_name(instance, "lock").lstrip("/")
    try:
        return _locked(path)
    except FileNotFoundError:
        return False


def _locked(path: Path) -> bool | None:
    """Whether somebody holds the file's lock; None if we may not look. Asks for the lock, and lets go of it at once."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError:
        return None
    try:
        # A lane is held by shared locks, an instance by an exclusive one: only an exclusive request meets both.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def owned_by(uid: int, found: Leftover) -> None:
    """Raises SegmentError unless `uid` may remove what was found."""
    if uid not in (0, found.uid):
        raise SegmentError(
            f"instance {found.instance!r} belongs to uid {found.uid}, and this is uid {uid}: run it as that user"
        )
