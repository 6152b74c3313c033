"""Notes with the digests of large files, so that the next start reads a few bytes instead of gigabytes.

Owns: the notes. A note is beside its file or, if that folder is not writable, in $XDG_CACHE_HOME/tensord
(~/.cache/tensord). Does not own: how a digest is computed.

Invariants
- A note is valid only for a file with the same device, inode, size, mtime and ctime. Every write changes one of these,
  but not one through a mapping on tmpfs.
- A note is ignored unless its owner is root, this process's user or the owner of the weights: its author could
  otherwise choose the weights' name.
- A note is written under another name and renamed, so that a reader sees the old note, the new one, or none.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from ...ipc.places import home_folder

REMEMBERED_BYTES_MIN: Final = 16 << 20
"""Smaller files get no note: reading them costs no more than a note."""
SETTLED_S: Final = 2.0
"""A file written within the last SETTLED_S seconds gets no note: another write might leave its times unchanged."""
_NOTE_BYTES_MAX: Final = 4096
_SUFFIX: Final = ".tensord-digest"
Looks = tuple[int, int, int, int, int]
"""(device, inode, size in bytes, mtime, ctime) of a file; times in nanoseconds."""


class _Note(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    looks: Looks
    form: str
    digest: str


def remembered(path: Path, form: str, compute: Callable[[Path], str]) -> str:
    """`compute(path)`, a digest of up to 1 KiB of text; or its result from a valid note. `form` identifies the
    computation: notes of another form are ignored. Raises OSError if the file cannot be read, or was written meanwhile.
    """
    before = path.stat()
    if before.st_size < REMEMBERED_BYTES_MIN:
        return compute(path)
    looks = _looks(before)
    places = list(_places(path, looks))
    for place in places:
        digest = _read(place, looks, form, before.st_uid)
        if digest is not None:
            return digest
    digest = compute(path)
    after = path.stat()
    if _looks(after) != looks:
        raise OSError(f"{path} was written while it was read; start again when it is complete")
    if time.time_ns() - after.st_ctime_ns >= SETTLED_S * 1e9:
        for place in places:
            with suppress(OSError):
                _write(place, looks, form, digest)
                break
    return digest


def _looks(found: os.stat_result) -> Looks:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _places(path: Path, looks: Looks) -> Iterator[Path]:
    yield path.with_name(f".{path.name}{_SUFFIX}")
    with suppress(KeyError):
        folder = Path(os.environ.get("XDG_CACHE_HOME") or home_folder(os.environ) / ".cache")
        yield folder / "tensord" / f"{looks[0]}-{looks[1]}{_SUFFIX}"


def _read(place: Path, looks: Looks, form: str, owner: int) -> str | None:
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_uid not in (0, os.geteuid(), owner):
            return None
        note = msgspec.msgpack.decode(os.read(descriptor, _NOTE_BYTES_MAX), type=_Note)
    except (OSError, ValueError):  # not readable; no note, or a text that is not UTF-8
        return None
    finally:
        os.close(descriptor)
    return note.digest if (note.looks, note.form) == (looks, form) else None


def _write(place: Path, looks: Looks, form: str, digest: str) -> None:
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, made = tempfile.mkstemp(prefix=place.name, dir=place.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.msgpack.encode(_Note(looks, form, digest)))
            os.fchmod(file.fileno(), 0o644)
        os.replace(made, place)
    except BaseException:
        os.unlink(made)
        raise
