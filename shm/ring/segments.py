"""Named shared memory: creation, sizes, owners, locks, prefaulting, removal; and inboxes, memfds without a name.

Names: `/tensord.<instance>.lock`, `.ring`, `.index`, `.learned`, `.lane.<id>[.u<uid>][.fenced]` (lanes/reader.py). All
have mode 0600, so that only the daemon's user can map one for writing, whatever descriptors other users were passed.

Invariants: every user can write to /dev/shm, so an existing segment is opened only if it is a regular file of this user
with mode 0600. The daemon trusts only a lane's name, not its memory, which the lane's client writes. A file that
passes `check_inbox` keeps its size, and every page of it can be read without a SIGBUS, whatever the client does.
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
from contextlib import suppress
from pathlib import Path
from typing import Final

import posix_ipc

from ...errors import BadConfiguration, InstanceBusy, NameTaken, NotEnoughMemory, ProcessLimit, SegmentError
from .layout import PAGE_BYTES

SHM_FOLDER: Final = Path("/dev/shm")
MAKE_WRITABLE: Final = (
    "mount -o remount,rw /dev/shm (in a container: a writable tmpfs at /dev/shm, such as --tmpfs /dev/shm)"
)
"""What a user does about a read-only SHM_FOLDER."""
FILE_LIMIT: Final = (
    "RLIMIT_FSIZE (`ulimit -f unlimited`, LimitFSIZE=infinity of a service) or the file system takes no file that large"
)
"""What an EFBIG means."""
ADDRESS_LIMIT: Final = (
    "RLIMIT_AS is too small (`ulimit -v unlimited`, LimitAS=infinity of a service), the process has too many mappings "
    "(vm.max_map_count), or the kernel too little memory"
)
"""What an ENOMEM of a mapping means."""
PREFAULT_PIECE_BYTES: Final = 64 << 20
SEGMENT_MODE: Final = 0o600
_MADV_HUGEPAGE, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 14, 22, 23
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
INBOX_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_TMPFS_MAGIC: Final = 0x01021994

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def segment_name(instance: str, part: str) -> str:
    """`/tensord.<instance>.<part>`. Raises BadConfiguration for an instance that is no name."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,31}", instance):
        raise BadConfiguration(
            f"instance {instance!r}: a name is 1 to 32 of a-z, 0-9, _ and -, beginning with a letter or digit"
        )
    return f"/tensord.{instance}.{part}"


def existing(instance: str) -> list[str]:
    """The names of all present segments of `instance`, other users' included."""
    prefix = segment_name(instance, "").removeprefix("/")
    return sorted(f"/{path.name}" for path in SHM_FOLDER.glob(f"{prefix}*"))


def own(instance: str) -> list[str]:
    """The names from `existing` that are regular files of this user."""
    found = []
    for name in existing(instance):
        with suppress(FileNotFoundError):
            status = _path(name).lstat()
            if status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode):
                found.append(name)
    return found


def create(name: str, size_bytes: int) -> int:
    """Creates a segment of `size_bytes`, without allocating any page. Returns a read-write descriptor. Raises NameTaken
    if a file of that name exists, NotEnoughMemory if /dev/shm or RLIMIT_FSIZE has no room, or else SegmentError."""
    try:
        # posix_ipc hides the number of the error that the process can open no more files.
        os.close(os.open(SHM_FOLDER, os.O_PATH | os.O_DIRECTORY))
        fd = int(posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=SEGMENT_MODE).fd)
    except posix_ipc.ExistentialError:
        raise NameTaken(f"cannot create {SHM_FOLDER}{name}: there is {_whose(name)} already") from None
    except (posix_ipc.Error, OSError) as error:
        raise _not_created(name, size_bytes, error) from error
    try:
        # fchmod, since the umask may have removed bits of the mode.
        os.fchmod(fd, SEGMENT_MODE)
        os.ftruncate(fd, size_bytes)
    except OSError as error:
        _path(name).unlink(missing_ok=True)
        os.close(fd)
        raise _not_created(name, size_bytes, error) from error
    return fd


def _not_created(name: str, size_bytes: int, error: Exception) -> SegmentError:
    number = error.errno if isinstance(error, OSError) else None
    kind = NotEnoughMemory if number in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG) else SegmentError
    why = {errno.EROFS: f"{error}; {MAKE_WRITABLE}", errno.EFBIG: FILE_LIMIT}.get(number or 0, error)
    return kind(f"cannot create {name} of {size_bytes} bytes in {SHM_FOLDER}: {why}")


def attach(name: str, *, read_only: bool = False, uid: int | None = None) -> int:
    """Opens an existing segment of `uid`, by default of this user, with a file description (and locks) of its own.
    Raises SegmentError: the segment does not exist, or is not a regular file of that user with mode 0600; the message
    describes the file, its owner, and what to do."""
    mode = os.O_RDONLY if read_only else os.O_RDWR
    try:
        # Without O_NONBLOCK it would block if a user has placed a FIFO there.
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
    """Unlinks the segment. Its memory is freed with its last mapping. Returns False if there was none. Raises
    SegmentError if the file is another user's, or a folder."""
    try:
        _path(name).unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise SegmentError(f"cannot remove {SHM_FOLDER}{name}, {_whose(name)}: {error.strerror}") from error
    return True


def rename(name: str, to: str) -> None:
    """Renames a segment. An existing segment named `to` is replaced. Raises SegmentError if the system refuses."""
    try:
        _path(name).rename(_path(to))
    except OSError as error:
        why = f"{error.strerror}; there is {_whose(to)}"
        raise SegmentError(f"cannot rename {SHM_FOLDER}{name} to {to}: {why}") from error


def claim_instance(instance: str, *, uid: int | None = None) -> int:
    """Locks the instance, so that only this process serves or purges it, until the returned descriptor is closed. The
    lock is on a separate file that no client is ever passed, since processes that share a descriptor share its lock.
    `uid`: the required owner of the file; by default this user. Raises InstanceBusy if another daemon, or a purge,
    holds the lock, and SegmentError if the file is another user's."""
    name = segment_name(instance, "lock")
    for _ in range(10):
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
            # `tensorctl doctor` takes the lock for a moment to see whether a daemon holds it.
            time.sleep(0.01)
            continue
        with suppress(FileNotFoundError):
            if os.path.samestat(_path(name).lstat(), os.fstat(fd)):
                return fd
        # A purge removed the file between the open and the lock.
        os.close(fd)
    pid = serving_pid(instance)
    by = "another tensord" if pid is None else f"another tensord (pid {pid})"
    raise InstanceBusy(f"instance {instance!r} is served by {by}; stop it, or set another --instance")


def serving_pid(instance: str, proc: Path = Path("/proc")) -> int | None:
    """The process that holds the instance's lock. None if there is none, or it is in another pid namespace."""
    try:
        lock = _path(segment_name(instance, "lock")).lstat()
        locks = (proc / "locks").read_text()
    except OSError:
        return None
    where = f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino}"
    found = re.search(rf"FLOCK +ADVISORY +WRITE +(\d+) {where} ", locks)
    return int(found[1]) if found and int(found[1]) else None


def _path(name: str) -> Path:
    return SHM_FOLDER / name.removeprefix("/")


def _whose(name: str) -> str:
    """Describes the file under a name, for messages."""
    try:
        return _described(_path(name).lstat())
    except OSError:
        return "nothing now"


def _described(status: os.stat_result) -> str:
    kinds = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link"}
    kind = kinds.get(stat.S_IFMT(status.st_mode), "no regular file, and")
    return f"{kind} of uid {status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}"


def allocate(fd: int, start: int, size_bytes: int) -> None:
    """Allocates the range's pages, so that a full /dev/shm raises NotEnoughMemory here, and no SIGBUS later."""
    try:
        os.posix_fallocate(fd, start, size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        if error.errno == errno.EFBIG:
            raise NotEnoughMemory(f"{start + size_bytes} bytes of a file in {SHM_FOLDER}: {FILE_LIMIT}") from error
        raise NotEnoughMemory(
            f"{SHM_FOLDER} has no room for {size_bytes} bytes at {start} ({error.strerror}); "
            f"{shm_free_bytes()} bytes are free there: take a smaller ring, or remount it with a larger size="
        ) from error


def ring_not_mapped(ring_bytes: int) -> ProcessLimit:
    """The error of a process that cannot map the ring, after an ENOMEM."""
    return ProcessLimit(
        f"the ring of {ring_bytes} bytes cannot be mapped: {ADDRESS_LIMIT}, or give the daemon a smaller ring_bytes"
    )


def missing(fd: int) -> list[tuple[int, int]]:
    """The ranges of a segment without pages: the daemon punched them out, or was killed before it had allocated them.
    (offset, bytes) of each range of whole pages, in ascending order. Pages that were allocated but never written are
    reported as missing too, unless all pages are allocated. A partial page at the end is allocated here instead of
    reported, which may raise NotEnoughMemory."""
    status = os.fstat(fd)
    if status.st_blocks * 512 >= status.st_size:
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
    """Frees the range's pages. It then reads as zeros, and must be allocated (`allocate`) before it is written."""
    if _libc.fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, start, size_bytes):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def prefault(address: int, size_bytes: int, *, write: bool) -> None:
    """Maps the pages without the GIL, which `mmap.madvise` would hold. A kernel before 5.14 does nothing."""
    _libc.madvise(address, size_bytes, _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ)


def advise_huge(address: int, size_bytes: int) -> None:
    """Asks for huge pages. A /dev/shm that is not mounted with `huge=advise` gives none."""
    _libc.madvise(address, size_bytes, _MADV_HUGEPAGE)


def address_of(memory: mmap.mmap) -> int:
    """The address of a writable mapping, for `prefault`."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def shm_free_bytes() -> int:
    """Free bytes in /dev/shm; 0 if it can hold no more files."""
    found = os.statvfs(SHM_FOLDER)
    return 0 if found.f_files and not found.f_favail else found.f_bavail * found.f_frsize


def check_memory(size_bytes: int, what: str, remedy: str = ": set a smaller ring_bytes, or free memory") -> None:
    """Raises NotEnoughMemory unless /dev/shm and this process can hold `size_bytes` more. The message names the need
    (`what`), the free bytes, where, and the remedy."""
    from .cgroups import available_bytes  # a client hardly ever asks

    for there, where in ((shm_free_bytes(), f"free in {SHM_FOLDER}"), (available_bytes(), "available to this process")):
        if size_bytes > there:
            raise NotEnoughMemory(f"{what} needs {size_bytes} bytes, and {there} are {where}{remedy}")


def create_inbox(size_bytes: int) -> int:
    """Creates an inbox, a client's staging memory: a memfd that no process can resize any more."""
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
    """Checks that mapping a received descriptor can never cause a SIGBUS. Raises SegmentError unless the file is a
    memfd with the three seals, of ordinary pages, and of the announced size."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise SegmentError("an inbox must be a memfd; this descriptor is of another file") from None
    if seals & INBOX_SEALS != INBOX_SEALS:
        raise SegmentError(f"an inbox must be sealed against SHRINK, GROW and SEAL; its seals are {seals:#x}")
    there = os.fstat(fd).st_size
    if there != size_bytes:
        raise SegmentError(f"an inbox announced with {size_bytes} bytes has {there}")
    statfs = ctypes.create_string_buffer(256)
    if _libc.fstatfs(fd, statfs):
        raise SegmentError(f"an inbox's file system is unknown: {os.strerror(ctypes.get_errno())}")
    filesystem = int.from_bytes(statfs.raw[:8], "little")
    if filesystem != _TMPFS_MAGIC:
        # A hole in huge pages causes a SIGBUS if no huge page is free. A hole in ordinary pages reads as zeros.
        wanted = f"a memfd of ordinary pages, this one's file system is {filesystem:#x}"
        raise SegmentError(f"an inbox must be {wanted}: make it without MFD_HUGETLB")
