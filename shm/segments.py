"""Named and anonymous shared memory: made, sized, locked, prefaulted, removed.

Owns: names under /dev/shm, the check that memory is really there before it is promised, whose a segment has to be, the
lock that makes a daemon the only one of its instance, a memfd's seals. Does not own what stands in the memory.

Names: `/tensord.<instance>.lock`, `.ring`, `.index`, `.learned`, `.lane.<id>[.u<uid>][.fenced]`; all 0600, so that
only the daemon's own user can map one for writing, whatever descriptor somebody was handed.

Invariant: /dev/shm is writable for every user, so a segment that is found is opened only if it is a regular file of
this user with mode 0600. What the daemon has to believe about a lane stands in the lane's name and not in its memory,
which its client writes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import stat
import time
from pathlib import Path
from typing import Final

import posix_ipc

from ..errors import BadConfiguration, InstanceBusy, NameTaken, NotEnoughMemory, SegmentError
from .layout import PAGE_BYTES

SHM_FOLDER: Final = Path("/dev/shm")
PREFAULT_PIECE_BYTES: Final = 64 << 20
SEGMENT_MODE: Final = 0o600
_INSTANCE: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_LANE: Final = re.compile(r"lane\.([0-9a-f]{1,16})(?:\.u([0-9]{1,10}))?(\.fenced)?")
_CLAIM_TRIES: Final = 10
_CLAIM_EVERY_S: Final = 0.01
_TMPFS_MAGIC: Final = 0x01021994
_MADV_HUGEPAGE, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 14, 22, 23
_BLOCK_BYTES: Final = 512
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
INBOX_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]


def segment_name(instance: str, part: str) -> str:
    """`/tensord.<instance>.<part>`.

    Raises:
        BadConfiguration: an instance name that could not be a file's.
    """
    if not _INSTANCE.fullmatch(instance):
        raise BadConfiguration(
            f"instance {instance!r}: a name is 1 to 32 of a-z, 0-9, _ and -, beginning with a letter or digit"
        )
    return f"/tensord.{instance}.{part}"


def lane_name(instance: str, lane_id: int, *, uid: int | None, fenced: bool) -> str:
    """The name of a lane. `uid`: whose quota the lane counts against. `fenced`: the process that writes the lane
    registered for the expedited fence."""
    whose = "" if uid is None else f".u{uid}"
    return segment_name(instance, f"lane.{lane_id:x}{whose}{'.fenced' if fenced else ''}")


def read_lane_name(instance: str, name: str) -> tuple[int, int | None, bool] | None:
    """(lane id, uid, fenced) of a lane's name; None if the name is no lane's."""
    found = _LANE.fullmatch(name.removeprefix(segment_name(instance, "")))
    return (int(found[1], 16), int(found[2]) if found[2] else None, found[3] is not None) if found else None


def existing(instance: str) -> list[str]:
    """The names of all segments that stand for `instance` now, other users' included."""
    prefix = segment_name(instance, "").removeprefix("/")
    return sorted(f"/{path.name}" for path in SHM_FOLDER.glob(f"{prefix}*"))


def own(instance: str) -> list[str]:
    """The names among `existing` that are this user's regular files."""
    found = []
    for name in existing(instance):
        try:
            status = _path(name).lstat()
        except FileNotFoundError:
            continue
        if status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode):
            found.append(name)
    return found


def instances() -> list[str]:
    """Every instance that has a ring in /dev/shm, whoever's it is."""
    rings = (path.name for path in SHM_FOLDER.glob("tensord.*.ring"))
    return sorted(name.removeprefix("tensord.").removesuffix(".ring") for name in rings)


def create(name: str, size_bytes: int) -> int:
    """A new segment of `size_bytes`, with no page of it allocated yet.

    Returns:
        A read-write descriptor, the caller's to close.

    Raises:
        NameTaken: a file of that name stands there; the message says whose.
        NotEnoughMemory: /dev/shm has no room for another file.
        SegmentError: /dev/shm does not let us.
    """
    try:
        segment = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=SEGMENT_MODE, size=size_bytes)
    except posix_ipc.ExistentialError:
        raise NameTaken(f"cannot create {SHM_FOLDER}{name}: {_whose(name)} stands there already") from None
    except (posix_ipc.Error, OSError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM)
        kind = NotEnoughMemory if full else SegmentError
        raise kind(f"cannot create {name} of {size_bytes} bytes in {SHM_FOLDER}: {error}") from error
    # Whatever the umask left of it.
    os.fchmod(segment.fd, SEGMENT_MODE)
    return int(segment.fd)


def attach(name: str, *, read_only: bool = False, uid: int | None = None) -> int:
    """A descriptor of its own (its locks too) on an existing segment of `uid`, this user's unless given.

    Raises:
        SegmentError: there is none, or it is not a regular file of that user with mode 0600; the message says whose
            file it is, and what to do.
    """
    mode = os.O_RDONLY if read_only else os.O_RDWR
    try:
        # Not by shm_open(3), which waits where somebody has made a pipe.
        fd = os.open(_path(name), mode | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise SegmentError(f"cannot open {name} in {SHM_FOLDER}: {error.strerror}; there is {_whose(name)}") from error
    uid = os.geteuid() if uid is None else uid
    status = os.fstat(fd)
    if (status.st_uid, stat.S_IMODE(status.st_mode)) == (uid, SEGMENT_MODE) and stat.S_ISREG(status.st_mode):
        return fd
    os.close(fd)
    raise SegmentError(
        f"{SHM_FOLDER}{name} is {_described(status)}; a daemon of uid {uid} takes only regular files of uid {uid} with "
        f"mode {SEGMENT_MODE:04o}, since any user may make files in {SHM_FOLDER}: remove the file, or set another "
        "--instance"
    )


def remove(name: str) -> bool:
    """Takes the name away; the memory goes with its last mapping. False where there was none.

    Raises:
        SegmentError: it is another user's, or a folder.
    """
    try:
        _path(name).unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise SegmentError(f"cannot remove {SHM_FOLDER}{name}, {_whose(name)}: {error.strerror}") from error
    return True


def rename(name: str, to: str) -> None:
    """Gives a segment another name; a segment that has that name loses it.

    Raises:
        SegmentError: /dev/shm does not let us.
    """
    try:
        _path(name).rename(_path(to))
    except OSError as error:
        raise SegmentError(
            f"cannot rename {SHM_FOLDER}{name} to {to}: {error.strerror}; there is {_whose(to)}"
        ) from error


def claim_instance(instance: str, *, uid: int | None = None) -> int:
    """Makes this process the only one that serves or purges the instance, until it closes the descriptor.

    The lock is one on a file of its own, which no client is ever handed: whoever shares a descriptor shares its lock.

    Args:
        uid: whose file it has to be, if not this user's.

    Returns:
        A descriptor that holds the lock.

    Raises:
        InstanceBusy: another daemon, or a purge, has it.
        SegmentError: the file is another user's.
    """
    name = segment_name(instance, "lock")
    for _ in range(_CLAIM_TRIES):
        try:
            fd = create(name, 0)
        except NameTaken:
            try:
                fd = attach(name, uid=uid)
            except SegmentError:
                if not os.path.lexists(_path(name)):
                    continue
                raise
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            # `tensorctl doctor` takes it for a moment, to see whether it is held.
            time.sleep(_CLAIM_EVERY_S)
            continue
        if _leads_to(name, fd):
            return fd
        # A purge removed the file between our opening and our locking it.
        os.close(fd)
    raise InstanceBusy(f"instance {instance!r} is served by another tensord; stop that one, or set another --instance")


def _path(name: str) -> Path:
    return SHM_FOLDER / name.removeprefix("/")


def _leads_to(name: str, fd: int) -> bool:
    try:
        return os.path.samestat(_path(name).lstat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _whose(name: str) -> str:
    """What stands under a name, for people."""
    try:
        return _described(_path(name).lstat())
    except OSError:
        return "nothing now"


def _described(status: os.stat_result) -> str:
    kinds = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link"}
    kind = kinds.get(stat.S_IFMT(status.st_mode), "no regular file, and")
    return f"{kind} of uid {status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}"


def allocate(fd: int, start: int, size_bytes: int) -> None:
    """Has the kernel set the range's pages aside now, so that a full /dev/shm is an error here and no SIGBUS later.

    Raises:
        NotEnoughMemory: they are not to be had.
    """
    try:
        os.posix_fallocate(fd, start, size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        raise NotEnoughMemory(
            f"{SHM_FOLDER} has no room for {size_bytes} bytes at {start} ({error.strerror}); "
            f"{shm_free_bytes()} bytes are free there: take a smaller ring, or remount it with a larger size="
        ) from error


def missing(fd: int) -> list[tuple[int, int]]:
    """Which pages of a segment hold nothing: its maker gave them back, or was killed before it had them all.

    Pages that were allocated and never written are told as missing too, unless all are there. A part of a page at the
    end is allocated instead.

    Returns:
        (offset, bytes) of each stretch of whole pages, in order.

    Raises:
        NotEnoughMemory: that part is not to be had.
    """
    status = os.fstat(fd)
    if status.st_blocks * _BLOCK_BYTES >= status.st_size:
        return []
    whole = status.st_size // PAGE_BYTES * PAGE_BYTES
    if whole < status.st_size:
        allocate(fd, whole, status.st_size - whole)
    found, at = [], 0
    while at < whole:
        try:
            data = min(os.lseek(fd, at, os.SEEK_DATA), whole)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            data = whole
        if data > at:
            found.append((at, data - at))
        at = os.lseek(fd, data, os.SEEK_HOLE) if data < whole else whole
    return found


def punch(fd: int, start: int, size_bytes: int) -> None:
    """Gives the range's pages back to the system; it reads as zeros and must be `allocate`d before it is written."""
    if _libc.fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, start, size_bytes):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def prefault(address: int, size_bytes: int, *, write: bool) -> None:
    """Maps the pages in, without the GIL (`mmap.madvise` would hold it); a kernel before 5.14 leaves them to be
    touched one by one."""
    _libc.madvise(address, size_bytes, _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ)


def advise_huge(address: int, size_bytes: int) -> None:
    """Asks for huge pages; a /dev/shm that is not mounted `huge=advise` gives none."""
    _libc.madvise(address, size_bytes, _MADV_HUGEPAGE)


def address_of(memory: mmap.mmap) -> int:
    """Where a writable mapping begins, for `prefault`."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def shm_free_bytes() -> int:
    """What /dev/shm can still hold; 0 where it can hold no more files."""
    stat = os.statvfs(SHM_FOLDER)
    if stat.f_files and not stat.f_favail:
        return 0
    return stat.f_bavail * stat.f_frsize


def available_bytes() -> int:
    """Memory that can be taken without swapping: MemAvailable, or what the cgroup leaves if that is less."""
    meminfo = Path("/proc/meminfo").read_text()
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    available = int(found[1]) * 1024 if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([available, *_cgroup_room()])


def _cgroup_room() -> list[int]:
    rooms: list[int] = []
    try:
        own = re.search(r"^0::(/.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    except OSError:
        return rooms
    folder = Path("/sys/fs/cgroup") / (own[1].lstrip("/") if own else "")
    for place in (folder, *folder.parents):
        try:
            limit, used = (place / "memory.max").read_text(), (place / "memory.current").read_text()
        except OSError:
            continue
        if limit.strip() != "max":
            rooms.append(max(0, int(limit) - int(used)))
        if place == Path("/sys/fs/cgroup"):
            break
    return rooms


def check_memory(size_bytes: int, what: str, remedy: str = ": set a smaller ring_bytes, or free memory") -> None:
    """Refuses what the machine could not hold.

    Raises:
        NotEnoughMemory: naming what is wanted, what is there, and where.
    """
    for there, where in ((shm_free_bytes(), f"free in {SHM_FOLDER}"), (available_bytes(), "available to this process")):
        if size_bytes > there:
            raise NotEnoughMemory(f"{what} needs {size_bytes} bytes, and {there} are {where}{remedy}")


def create_inbox(size_bytes: int) -> int:
    """A client's staging memory: a memfd that nobody, its maker included, can resize any more."""
    fd = os.memfd_create("tensord-inbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, INBOX_SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def check_inbox(fd: int, size_bytes: int) -> None:
    """Makes sure that a descriptor somebody sent can be mapped without ever giving SIGBUS.

    Raises:
        SegmentError: not a memfd with the three seals, of ordinary pages, and of the size announced.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise SegmentError("an inbox must be a memfd; this descriptor is something else") from None
    if seals & INBOX_SEALS != INBOX_SEALS:
        raise SegmentError(f"an inbox must be sealed against SHRINK, GROW and SEAL; its seals are {seals:#x}")
    there = os.fstat(fd).st_size
    if there != size_bytes:
        raise SegmentError(f"an inbox announced with {size_bytes} bytes has {there}")
    filesystem = _filesystem(fd)
    if filesystem != _TMPFS_MAGIC:
        # A hole in huge pages is a SIGBUS where none are free; in ordinary ones it reads as zeros.
        raise SegmentError(
            f"an inbox must be a memfd of ordinary pages, this one's file system is {filesystem:#x}: "
            "make it without MFD_HUGETLB"
        )


def _filesystem(fd: int) -> int:
    """The magic number of the file system that a descriptor's file is on."""
    statfs = ctypes.create_string_buffer(256)
    if _libc.fstatfs(fd, statfs):
        number = ctypes.get_errno()
        raise SegmentError(f"an inbox's file system cannot be told: {os.strerror(number)}")
    return int.from_bytes(statfs.raw[:8], "little")
