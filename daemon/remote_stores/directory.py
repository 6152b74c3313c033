"""A directory as a remote store: on a local disk, or on a file system that several hosts mount.

    ROOT/tensord-1/6c/6c41….            one file for each object, in 256 folders by byte 8 of the key
    ROOT/tensord-1/tmp/HOST-PID-N       an object that is being written
    ROOT/tensord-1/gen/TAG/N            an empty file for the generation N of a namespace; the highest counts

ROOT must exist, so that an object never goes to the disk below a mount that is missing. Once tensord-1 was there, a
ROOT without it is a mount that is gone, and not an empty store. An object is written to a file in tmp/ and renamed into
its place when it is whole. A writer that is killed leaves a file in tmp/, which counts as an object does until any
process that writes removes it, an hour later. A machine that loses power may leave wrong files, which are misses by
their checksums. Files have the mode 0660, folders 0770, less the umask: users that share a directory need a group.

Owns: the files, and the bound on their bytes. Several processes and hosts write into one directory, and none of them
keeps a table of it. Each estimates the bytes: the total of its last scan, and its own puts since. A put scans first if
the process has put a sixteenth of the limit since the last scan, or if the estimate leaves no room. A scan evicts the
objects that were used longest ago, by the times of the files, until LOW of the limit is used. So between two scans, the
directory may exceed its limit by a sixteenth for each other process that writes.

A file system that hangs blocks the call for as long: mount NFS with `soft` and a `timeo` of a few seconds. A store that
was closed ends the calls under way after a piece of 4 MiB.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import numpy as np

from ...errors import BadConfiguration, TensordError, TierFull, TierReadOnly, TierRefused, TierTooLarge, TierUnavailable
from ...ipc.quantities import SIZE_WANTS, read_size, show_size
from ...shm.index.keys import GENERATION_MAX
from ...shm.ring.layout import NAMESPACE_TAG_BYTES
from ..forms.events import RemoteEntry
from .form import OBJECT_HEADER_BYTES, Buffer, object_header
from .store import NAME, RemoteStore, options, shown, split

PIECE_BYTES: Final = 4 << 20
LEFTOVER_S: Final = 3600.0
"""The age of a file in tmp/ from which on its writer is taken for dead. Clocks of hosts differ by less."""
LOW: Final = 0.9
"""The share of the limit to which a scan evicts."""
BYTES_LEAST: Final = 1 << 20
BYTES_DEFAULT: Final = 100 << 30
TOUCH_EVERY_S: Final = 60.0
"""How much older than a read the time of a file may be. Eviction goes by it, and each change costs a write."""
_HIGH: Final = 0.95
_SCAN_SHARE: Final = 16
_FOLDER_BYTE: Final = 8  # the digest begins here: before it is the tag of the namespace, alike in many keys
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_NO_OBJECT: Final = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ESTALE)
"""At an object's path is nothing, a file in place of the folder, a folder, a symbolic link, a socket, or a file of NFS
that another host has removed."""


class DirectoryStore(RemoteStore):
    """A directory, with at most `limit_bytes` of objects."""

    def __init__(self, root: Path, limit_bytes: int = BYTES_DEFAULT, timeout_s: float = 5.0) -> None:
        super().__init__(f"dir://{root}", timeout_s)
        self._root = root
        self._base = root / NAME
        self._numbers = count(1)
        self._writer = f"{socket.gethostname()}-{os.getpid()}-{id(self):x}-"
        self._room = DirectoryRoom(self._base, limit_bytes)
        self._seen = False
        """Whether the base folder was there."""
        self._closed = False

    @classmethod
    def of_url(cls, url: str, timeout_s: float) -> DirectoryStore:
        """The store of a URL such as dir:///mnt/tensord?bytes=100GiB."""
        parts = split(url)
        if parts.netloc or not parts.path.startswith("/"):
            raise BadConfiguration(f"{shown(url)} names no absolute path: write dir:///PATH, with three slashes")
        limit_bytes = options(url, {"bytes": (read_size, SIZE_WANTS)}).get("bytes", BYTES_DEFAULT)
        if limit_bytes < BYTES_LEAST:
            raise BadConfiguration(f"{shown(url)}: bytes = {limit_bytes} must be at least {show_size(BYTES_LEAST)}")
        return cls(Path(unquote(parts.path)), limit_bytes, timeout_s)

    def look(self, keys: Sequence[bytes]) -> tuple[int, list[RemoteEntry | None]]:
        [generation] = self.generations([keys[0][:NAMESPACE_TAG_BYTES]])
        header = memoryview(bytearray(OBJECT_HEADER_BYTES))
        found = ((key, self._found(key, header)) for key in keys)
        return generation, [stored and self._checked(key, stored[0], header=True) for key, stored in found]

    def get_into(self, key: bytes, buffer: memoryview) -> RemoteEntry | None:
        stored = self._found(key, buffer)
        if stored is None or stored[1] > len(stored[0]):
            return None
        return self._checked(key, stored[0])

    def put_from(self, key: bytes, payload: Buffer, entry: RemoteEntry) -> None:
        pieces = [memoryview(object_header(key, entry, time.time())), memoryview(payload)]
        with self._told(writes=True):
            self._room.make(OBJECT_HEADER_BYTES + len(payload))
            self._write(self._path(key), pieces)

    def remove(self, keys: Sequence[bytes]) -> None:
        refused: OSError | None = None
        with self._told(writes=True):
            for key in keys:
                try:
                    os.unlink(self._path(key))
                except OSError as error:
                    if error.errno not in _NO_OBJECT:
                        refused = refused or error
            self._look()
            if refused is not None:
                raise refused

    def generations(self, tags: Sequence[bytes]) -> list[int]:
        with self._told():
            found = [self._last_generation(tag) for tag in tags]
            if not all(found):
                self._look()
            return found

    def raise_generation(self, tag: bytes, least: int) -> int:
        while True:
            [known] = self.generations([tag])
            number = max(known + 1, least)
            with self._told(writes=True):
                folder = self._generation(tag)
                self._look(makes=True)
                for made in (folder.parent, folder):
                    made.mkdir(0o770, exist_ok=True)
                try:
                    os.close(os.open(folder / str(number), _WRITE, 0o660))
                except FileExistsError:
                    continue
                _sync_folder(folder)
                listed = sorted(_numbers(folder))
                for lower in listed[:-1]:
                    with suppress(FileNotFoundError):
                        os.unlink(folder / str(lower))
                # Another host may have given out this number, and a higher one, and removed this one since.
                if listed[-1:] == [number]:
                    return number

    def close(self) -> None:
        self._closed = True

    def _generation(self, tag: bytes) -> Path:
        return self._base / "gen" / tag.hex()

    def _last_generation(self, tag: bytes) -> int:
        folder = self._generation(tag)
        last = max(_numbers(folder), default=0)
        if last >= GENERATION_MAX:
            raise TierRefused(f"{folder / str(last)} is beyond the last generation, {GENERATION_MAX - 1}: remove it")
        return last

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._base / name[2 * _FOLDER_BYTE : 2 * _FOLDER_BYTE + 2] / name

    def _found(self, key: bytes, into: memoryview) -> tuple[memoryview, int] | None:
        """The first bytes of an object, as many as `into` has, and the object's length. None if there is no object."""
        with self._told():
            try:
                with os.fdopen(os.open(self._path(key), _READ), "rb", buffering=0) as file:
                    about = os.fstat(file.fileno())
                    if not stat.S_ISREG(about.st_mode):
                        return None
                    at, wanted = 0, min(about.st_size, len(into))
                    # A file that is cut meanwhile has a wrong length.
                    while at < wanted and (read := file.readinto(into[at : min(at + PIECE_BYTES, wanted)])):
                        at += read
                        self._check_open()
                    if abs(time.time() - about.st_mtime) > TOUCH_EVERY_S:
                        with suppress(OSError):  # a read-only mount, or another user's file
                            os.utime(file.fileno())
                    return into[:at], about.st_size
            except PermissionError as error:
                os.stat(f"{self._base}/.")
                self._count_corrupt(f"the object of {key.hex()} cannot be read: {error}")
            except OSError as error:
                if error.errno not in _NO_OBJECT:
                    raise
                self._look()
            return None

    def _look(self, *, makes: bool = False) -> None:
        """Raises OSError if the root is not there, and TierUnavailable if it is the empty folder below a mount that is
        gone. `makes`: makes the base folder, unless it is gone."""
        seen = self._seen  # another thread may make the folder next
        if self._base.is_dir():
            self._seen = True
            return
        os.stat(f"{self._root}/")  # with a slash at the end, a root that is no folder is an error too
        if seen:
            raise TierUnavailable(
                f"{self.address}: {self._root} has no folder {NAME} any more: mount it again, or, if it is to be used "
                f"as it is, make {self._base}"
            )
        if makes:
            self._base.mkdir(0o770, exist_ok=True)
            self._seen = True

    def _write(self, path: Path, pieces: list[memoryview]) -> None:
        self._look(makes=True)
        temporary = self._base / "tmp" / f"{self._writer}{next(self._numbers)}"
        for folder in (temporary.parent, path.parent):
            folder.mkdir(0o770, exist_ok=True)
        try:
            with os.fdopen(os.open(temporary, _WRITE, 0o660), "wb", buffering=0) as file:
                for piece in pieces:
                    while piece:
                        self._check_open()
                        piece = piece[file.write(piece[:PIECE_BYTES]) :]
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise self._was_closed()

    @contextmanager
    def _told(self, *, writes: bool = False) -> Iterator[None]:
        """Turns errors of the system into errors of tensord. `writes`: whether they say nothing of reads."""
        self._check_open()
        try:
            yield
        except OSError as error:
            if isinstance(error, TensordError):
                raise
            raise self._error(error, writes=writes) from None

    def _error(self, error: OSError, *, writes: bool) -> TensordError:
        said = f"{self.address}: {error.strerror}"
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT:
                return TierFull(
                    f"{said}: the file system or a quota is full before the store's own limit of "
                    f"{self._room.limit_bytes} bytes; free space, or lower `bytes` in the URL"
                )
            case errno.EACCES | errno.EPERM | errno.EROFS:
                kind = TierReadOnly if writes else TierRefused
                return kind(
                    f"{said} ({error.filename or self._base}): give uid {os.geteuid()} access, or choose another folder"
                )
            case errno.ENOENT | errno.ENOTDIR if not self._root.is_dir():
                return TierUnavailable(f"{said}: {self._root} is not a folder; mount it, or make it")
        return TierUnavailable(f"{said} ({error.filename or self._base}): look at the file system and its server")


@dataclass(eq=False, repr=False)
class DirectoryRoom:
    """At most `limit_bytes` of objects in the folders of a base, files in tmp/ included. `_scan_after_bytes`: so much
    may be put before the next scan."""

    _base: Path
    limit_bytes: int
    _scanning: threading.Lock = field(default_factory=threading.Lock)
    _used_bytes: int = 0
    _scan_after_bytes: int = 0

    def make(self, size_bytes: int) -> None:
        """Counts an object that is about to be written. Evicts others before, if the limit would be exceeded. Raises
        TierTooLarge, or TierFull if eviction has made no room."""
        if size_bytes > self.limit_bytes:
            raise TierTooLarge(
                f"dir://{self._base.parent}: an object of {size_bytes} bytes is larger than the limit of "
                f"{self.limit_bytes} bytes; raise `bytes` in the URL"
            )
        with self._scanning:
            self._scan_after_bytes -= size_bytes
            if self._scan_after_bytes < 0 or self._used_bytes + size_bytes > self.limit_bytes:
                with suppress(OSError):  # the put meets the same fault, and reports it
                    self._scan(self.limit_bytes - size_bytes)
            if self._used_bytes + size_bytes > self.limit_bytes:
                raise TierFull(
                    f"dir://{self._base.parent}: {self._used_bytes} of {self.limit_bytes} bytes are used, and eviction "
                    f"has made no room for {size_bytes} more; raise `bytes` in the URL"
                )
            self._used_bytes += size_bytes

    def _scan(self, most_bytes: int) -> None:
        """Counts the bytes anew, and removes old objects if there are more than `most_bytes`."""
        self._used_bytes, dead_s = 0, time.time() - LEFTOVER_S
        for entry, about in self._files("tmp"):
            if about.st_mtime < dead_s:
                with suppress(FileNotFoundError):
                    os.unlink(entry.path)
            else:
                self._used_bytes += about.st_size
        times, sizes = array("q"), array("q")
        for _, about in self._objects():
            times.append(about.st_mtime_ns)
            sizes.append(about.st_size)
        self._used_bytes += sum(sizes)
        self._scan_after_bytes = self.limit_bytes // _SCAN_SHARE
        if not sizes or self._used_bytes <= min(int(self.limit_bytes * _HIGH), most_bytes):
            return
        least_bytes = min(int(self.limit_bytes * LOW), most_bytes)
        order = np.argsort(np.frombuffer(times, np.int64), kind="stable")
        freed = np.cumsum(np.frombuffer(sizes, np.int64)[order])
        last = int(np.searchsorted(freed, self._used_bytes - least_bytes))
        last_ns = times[order[min(last, len(order) - 1)]]
        for entry, about in self._objects():
            if self._used_bytes <= least_bytes:
                break
            if about.st_mtime_ns <= last_ns:
                with suppress(FileNotFoundError):
                    os.unlink(entry.path)
                    self._used_bytes -= about.st_size

    def _objects(self) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        """In a random order of folders, so that processes which evict at once begin at different ones."""
        names: list[str] = []
        with suppress(FileNotFoundError):
            names = [name for name in os.listdir(self._base) if len(name) == 2]
        for number in np.random.default_rng().permutation(len(names)):
            yield from self._files(names[number])

    def _files(self, folder: str) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        with suppress(FileNotFoundError), os.scandir(self._base / folder) as found:
            for entry in found:
                with suppress(FileNotFoundError):  # another process has evicted it
                    about = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(about.st_mode):
                        yield entry, about


def _numbers(folder: Path) -> list[int]:
    """The names of a folder that are numbers; none of a folder that is missing."""
    try:
        return [int(name) for name in os.listdir(folder) if name.isdecimal()]
    except FileNotFoundError:
        return []


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
