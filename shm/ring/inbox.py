"""An inbox as a file: a memfd, which the client creates and the daemon checks before it maps it.

Invariant: a file that passes `check_inbox` keeps its size, and every page of it can be read without a SIGBUS, whatever
the client does.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from typing import Final

from ...errors import SegmentError

INBOX_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_TMPFS_MAGIC: Final = 0x01021994

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]


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
