"""An inbox's file: nobody can resize it, and one that could give a SIGBUS is refused."""

from __future__ import annotations

import fcntl
import os
import socket
from mmap import mmap
from pathlib import Path

import pytest

from tensord.errors import SegmentError
from tensord.shm.ring.inbox import INBOX_SEALS, check_inbox, create_inbox


def test_an_inbox_can_be_resized_by_nobody() -> None:
    fd = create_inbox(8192)
    check_inbox(fd, 8192)
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    for size in (4096, 16_384):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    memory = mmap(fd, 8192)
    memory[:3] = b"put"
    memory.close()
    os.close(fd)


def test_an_inbox_that_could_give_sigbus_is_refused(tmp_path: Path) -> None:
    whole = create_inbox(8192)
    with pytest.raises(SegmentError, match="announced with 4096 bytes has 8192"):
        check_inbox(whole, 4096)
    os.close(whole)
    for seals in (0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW):
        fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 8192)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        with pytest.raises(SegmentError, match=f"its seals are {seals:#x}"):
            check_inbox(fd, 8192)
        os.close(fd)
    huge = os.memfd_create("x", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    os.ftruncate(huge, 2 << 20)
    fcntl.fcntl(huge, fcntl.F_ADD_SEALS, INBOX_SEALS)
    with pytest.raises(SegmentError, match="without MFD_HUGETLB"):
        check_inbox(huge, 2 << 20)
    os.close(huge)
    (tmp_path / "file").write_bytes(bytes(8192))
    fd = os.open(tmp_path / "file", os.O_RDWR)
    ours, theirs = socket.socketpair()
    for number in (fd, ours.fileno()):
        with pytest.raises(SegmentError, match=r"must be a memfd|its seals are"):
            check_inbox(number, 8192)
    os.close(fd)
    ours.close()
    theirs.close()
