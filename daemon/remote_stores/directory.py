"""A directory as a remote store: on a local disk, or on a file system that several hosts mount.

    ROOT/tensord-1/6c/6c41….            one file for each object, in 256 folders by byte 8 of the key
    ROOT/tensord-1/tmp/HOST-PID-N       an object that is being written
    ROOT/tensord-1/gen/TAG/N            an empty file for the generation N of a namespace; the highest counts

ROOT must exist, so that an object never goes to the disk below a mount that is missing. Once tensord-1 was there,
another ROOT without it is a mount that is gone, and not an empty store; if it is missing in the same ROOT, it was
removed. An object is written to a file in tmp/ and renamed into its place when it is whole. A writer that is killed
leaves a file in tmp/, which counts as an object does until any process that writes removes it, an hour later. A machine
that loses power may leave files of wrong length or content under the name of an object. Their checksum is wrong, so
they are misses. Files have the mode 0660 and folders 0770, less the umask: users that share a
directory need a group in common.

Owns: the files. Does not own: the bound on their size, and removal of old ones (`directory_room`).

Deadlines are looked at between pieces of 4 MiB. A file system that hangs blocks the call for as long: mount NFS with
`soft` and a `timeo` of a few seconds.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from ...errors import (
    BadConfiguration,
    TensordError,
    TierFull,
    TierReadOnly,
    TierRefused,
    TierUnavailable,
)
from ...ipc.quantities import SIZE_WANTS, read_size, show_size
from ...shm.index.keys import GENERATION_MAX
from .directory_room import TMP, DirectoryRoom
from .form import OBJECT_HEADER_BYTES, Buffer, Meta, RemoteEntry, object_header
from .store import NAME, RemoteStore
from .urls import options, shown, split

PIECE_BYTES: Final = 4 << 20
GENERATIONS: Final = "gen"
BYTES_LEAST: Final = 1 << 20
BYTES_DEFAULT: Final = 100 << 30
TOUCH_EVERY_S: Final = 60.0
"""How much older than a read the time of a file may be. Eviction goes by it, and each change costs a write."""
_FOLDER_BYTE: Final = 8  # the digest begins here: before it is the tag of the namespace, alike in many keys
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_OPTIONS: Final = {
    "bytes": (read_size, SIZE_WANTS),
}


class DirectoryStore(RemoteStore):
    """A directory, with at most `limit_bytes` of objects."""

    def __init__(self, root: Path, limit_bytes: int = BYTES_DEFAULT) -> None:
        super().__init__(f"dir://{root}")
        self._root = root
        self._base = root / NAME
        self._numbers = count(1)
        self._writer = f"{socket.gethostname()}-{os.getpid()}-{id(self):x}-"
        self._room = DirectoryRoom(self._base, limit_bytes, self._writer)
        self._seen: tuple[int, int] | None = None  # the root in which the base folder was seen last
        self._closed = False

    @classmethod
    def of_url(cls, url: str) -> DirectoryStore:
        """The store of a URL such as dir:///mnt/tensord?bytes=100GiB.

        Raises:
            BadConfiguration: the URL has no absolute path, or a wrong option.
        """
        parts = split(url)
        if parts.netloc or not parts.path.startswith("/"):
            raise BadConfiguration(f"{shown(url)} names no absolute path: write dir:///PATH, with three slashes")
        given = options(url, _OPTIONS)
        limit_bytes = given.get("bytes", BYTES_DEFAULT)
        if limit_bytes < BYTES_LEAST:
            raise BadConfiguration(f"{shown(url)}: bytes = {limit_bytes} must be at least {show_size(BYTES_LEAST)}")
        path = unquote(parts.path)
        if "\0" in path:
            raise BadConfiguration(f"{shown(url)}: no path has a zero byte; leave the %00 out")
        return cls(Path(path), limit_bytes)

    def heads(self, keys: Sequence[bytes], deadline: float) -> list[RemoteEntry | None]:
        found: list[RemoteEntry | None] = []
        header = memoryview(bytearray(OBJECT_HEADER_BYTES))
        for key in keys:
            stored = self._found(key, header, deadline)
            found.append(None if stored is None else self._head(key, stored[0]))
        return found

    def get_into(self, key: bytes, buffer: memoryview, deadline: float) -> RemoteEntry | None:
        stored = self._found(key, buffer, deadline)
        if stored is None or stored[1] > len(stored[0]):
            return None
        return self._checked(key, stored[0])

    def put_from(self, key: bytes, payload: Buffer, meta: Meta, deadline: float) -> None:
        payload_bytes = len(payload)
        pieces = [memoryview(object_header(key, payload_bytes, meta)), memoryview(payload)]
        self._left_s(deadline)
        path = self._path(key)
        with self._told(writes=True), self._room.writing(OBJECT_HEADER_BYTES + payload_bytes, deadline):
            self._write(path, pieces, deadline)

    def remove(self, keys: Sequence[bytes], deadline: float) -> None:
        refused: OSError | None = None
        with self._told(writes=True):
            for key in keys:
                self._left_s(deadline)
                try:
                    os.unlink(self._path(key))
                except OSError as error:
                    if not self._is_no_object(error):
                        refused = refused or error
            if refused is not None:
                raise refused

    def generations(self, tags: Sequence[bytes], deadline: float) -> list[int]:
        self._left_s(deadline)
        with self._told():
            found = [self._last_generation(tag) for tag in tags]
            if not all(found):
                self._look()
            return found

    def raise_generation(self, tag: bytes, least: int, deadline: float) -> int:
        while True:
            [known] = self.generations([tag], deadline)
            number = max(known + 1, least)
            with self._told(writes=True):
                folder = self._generation(tag)
                self._look()
                for made in (self._base, folder.parent, folder):
                    made.mkdir(0o770, exist_ok=True)
                try:
                    os.close(os.open(folder / str(number), _WRITE, 0o660))
                except FileExistsError:
                    continue
                _sync_folder(folder)
                listed = sorted(map(int, _listed(folder)))
                for lower in listed[:-1]:
                    with suppress(FileNotFoundError):
                        os.unlink(folder / str(lower))
                # Another host may have given out this number, and a higher one, and removed this one since.
                if listed[-1:] == [number]:
                    return number

    def close(self) -> None:
        self._closed = True
        self._room.close()

    def _generation(self, tag: bytes) -> Path:
        return self._base / GENERATIONS / tag.hex()

    def _last_generation(self, tag: bytes) -> int:
        folder = self._generation(tag)
        last = max(map(int, _listed(folder)), default=0)
        if last >= GENERATION_MAX:
            raise TierRefused(f"{folder / str(last)} is beyond the last generation, {GENERATION_MAX - 1}: remove it")
        return last

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._base / name[2 * _FOLDER_BYTE : 2 * _FOLDER_BYTE + 2] / name

    def _found(self, key: bytes, into: memoryview, deadline: float) -> tuple[memoryview, int] | None:
        """The first bytes of an object, as many as `into` has, and the object's length. None if there is no object."""
        self._left_s(deadline)
        with self._told():
            try:
                return self._read(self._path(key), into, deadline)
            except PermissionError as error:
                os.stat(f"{self._base}/.")
                self._count_corrupt(f"the object of {key.hex()} cannot be read: {error}")
                return None
            except OSError as error:
                if self._is_no_object(error):
                    return None
                raise

    def _look(self) -> None:
        """Makes sure that the root is there, and is not the empty folder below a mount that is gone.

        Raises:
            OSError: the root is not there.
            TierUnavailable: the base folder was there, and this is another root, without one.
        """
        # With a slash at the end, a root that is no folder is an error too.
        about = os.stat(f"{self._root}/")
        # Read once: another thread may make the base folder meanwhile.
        root, seen = (about.st_dev, about.st_ino), self._seen
        if root == seen:
            return
        if os.path.isdir(self._base):
            self._seen = root
        elif seen is not None:
            raise TierUnavailable(
                f"{self.address}: {self._root} has no folder {NAME} any more: mount it again, or, if it is to be used "
                f"as it is, make {self._base}"
            )

    def _is_no_object(self, error: OSError) -> bool:
        """Whether an error at an object's path means that no object is there: nothing, a folder, a symbolic link, a
        socket, a file in place of the folder, or a file of NFS that another host has removed.

        Raises:
            OSError, TierUnavailable: the root is not there, as `_look` says.
        """
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            self._look()
        return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ESTALE)

    def _read(self, path: Path, into: memoryview, deadline: float) -> tuple[memoryview, int] | None:
        fd = os.open(path, _READ)
        try:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode):
                return None
            at, wanted = 0, min(about.st_size, len(into))
            while at < wanted:
                self._left_s(deadline)
                read = os.preadv(fd, [into[at : min(at + PIECE_BYTES, wanted)]], at)
                if not read:
                    break  # the file was cut meanwhile: its length is wrong
                at += read
            if abs(time.time() - about.st_mtime) > TOUCH_EVERY_S:
                with suppress(OSError):  # a read-only mount, or another user's file
                    os.utime(fd)
            return into[:at], about.st_size
        finally:
            os.close(fd)

    def _write(self, path: Path, pieces: list[memoryview], deadline: float) -> None:
        temporary = self._base / TMP / f"{self._writer}{next(self._numbers)}"
        fd = self._made(temporary)
        try:
            try:
                for piece in _pieces(pieces):
                    self._left_s(deadline)
                    while piece:
                        piece = piece[os.write(fd, piece) :]
            finally:
                os.close(fd)
            self._left_s(deadline)
            try:
                os.replace(temporary, path)
            except OSError as error:
                if error.errno == errno.EISDIR:
                    path.rmdir()
                elif error.errno in (errno.ENOENT, errno.ENOTDIR):
                    path.parent.mkdir(0o770, exist_ok=True)
                else:
                    raise
                os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise

    def _made(self, temporary: Path) -> int:
        """A new file, and the folders above it except for the root."""
        try:
            return os.open(temporary, _WRITE, 0o660)
        except (FileNotFoundError, NotADirectoryError):
            self._look()
            self._base.mkdir(0o770, exist_ok=True)
            temporary.parent.mkdir(0o770, exist_ok=True)
            self._look()
            return os.open(temporary, _WRITE, 0o660)

    @contextmanager
    def _told(self, *, writes: bool = False) -> Iterator[None]:
        """Turns errors of the system into errors of tensord. `writes`: whether they say nothing of reads."""
        if self._closed:
            raise TierUnavailable(f"{self.address} was closed by this process: open a new store")
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


def _pieces(parts: list[memoryview]) -> Iterator[memoryview]:
    for part in parts:
        for start in range(0, len(part), PIECE_BYTES):
            yield part[start : start + PIECE_BYTES]


def _listed(folder: Path) -> list[str]:
    """The names of a folder that are numbers; none of a folder that is missing."""
    try:
        return [name for name in os.listdir(folder) if name.isdecimal()]
    except FileNotFoundError:
        return []


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
