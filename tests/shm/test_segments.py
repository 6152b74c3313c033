"""Segments: names, memory that is really there; and an inbox's file, which nobody can resize."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from mmap import mmap
from pathlib import Path

import pytest

from tensord.errors import BadConfiguration, NameTaken, NotEnoughMemory, SegmentError
from tensord.shm.ring import segments
from tensord.shm.ring.segments import INBOX_SEALS, check_inbox, create_inbox

PAGE = 4096


@pytest.fixture
def instance() -> Iterator[str]:
    name = f"test-segments-{os.getpid()}"
    yield name
    for left in segments.existing(name):
        segments.remove(left)


@pytest.mark.parametrize("name", ["", "-x", "UPPER", "a/b", "a.b", "..", "x" * 33, "a b", "ä", "a\n"])
def test_an_instance_that_could_leave_its_folder_is_refused(name: str) -> None:
    with pytest.raises(BadConfiguration, match="a name is 1 to 32"):
        segments.segment_name(name, "ring")


def test_a_segment_is_the_users_alone_and_found_by_its_instance_only(instance: str) -> None:
    names = [segments.segment_name(instance, part) for part in ("index", "lane.1", "ring")]
    other = segments.segment_name(f"{instance[:-1]}x"[:32], "ring")
    fds = [segments.create(name, 4096) for name in [*names, other]]
    assert segments.existing(instance) == names
    assert {os.fstat(fd).st_mode & 0o777 for fd in fds} == {0o600}
    assert {os.fstat(fd).st_size for fd in fds} == {4096}
    with pytest.raises(SegmentError, match="cannot create"):
        segments.create(names[0], 4096)
    for fd in fds:
        os.close(fd)
    assert segments.remove(other)
    assert not segments.remove(other)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (Path.mkdir, "a folder"),
        (lambda path: path.symlink_to("/dev/null"), "a symbolic link"),
        (os.mkfifo, "no regular file"),
    ],
)
def test_a_path_that_is_not_a_file_is_neither_opened_nor_waited_for(
    instance: str, make: Callable[[Path], object], kind: str
) -> None:
    name = segments.segment_name(instance, "ring")
    path = segments.SHM_FOLDER / name.lstrip("/")
    make(path)
    try:
        with pytest.raises(SegmentError, match=kind):
            segments.attach(name, read_only=True)
        with pytest.raises(NameTaken, match=kind):
            segments.create(name, 4096)
        assert segments.own(instance) == []
    finally:
        path.rmdir() if path.is_dir() else path.unlink()


def test_allocated_pages_are_there_and_punched_ones_are_given_back(instance: str) -> None:
    fd = segments.create(segments.segment_name(instance, "ring"), 1 << 20)
    assert os.fstat(fd).st_blocks == 0
    segments.allocate(fd, 0, 1 << 20)
    assert os.fstat(fd).st_blocks * 512 == 1 << 20
    memory = mmap(fd, 1 << 20)
    memory[:8] = b"whatever"
    segments.prefault(segments.address_of(memory), 1 << 20, write=True)
    assert memory[:8] == b"whatever"
    segments.punch(fd, 0, 1 << 19)
    assert os.fstat(fd).st_blocks * 512 == 1 << 19
    assert memory[:8] == bytes(8)
    assert os.fstat(fd).st_size == 1 << 20
    memory.close()
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        segments.punch(fd, 0, 0)
    os.close(fd)


def test_pages_that_were_given_back_are_found_again_by_whoever_comes_next(instance: str) -> None:
    fd = segments.create(segments.segment_name(instance, "ring"), 16 * PAGE + 128)
    segments.allocate(fd, 0, 16 * PAGE + 128)
    assert segments.missing(fd) == []
    os.pwrite(fd, bytes([7]) * (16 * PAGE + 128), 0)
    segments.punch(fd, 0, 2 * PAGE)
    segments.punch(fd, 5 * PAGE, PAGE)
    segments.punch(fd, 14 * PAGE, 2 * PAGE)
    assert segments.missing(fd) == [(0, 2 * PAGE), (5 * PAGE, PAGE), (14 * PAGE, 2 * PAGE)]
    os.pread(fd, PAGE, 5 * PAGE)
    assert os.fstat(fd).st_blocks * 512 == 12 * PAGE, "looking through the descriptor makes no page"
    segments.punch(fd, 0, 17 * PAGE)
    assert segments.missing(fd) == [(0, 16 * PAGE)]
    assert os.fstat(fd).st_blocks * 512 == PAGE, "the part of a page at the end is allocated"
    os.close(fd)


def test_more_than_the_machine_has_is_refused_before_it_is_tried() -> None:
    segments.check_memory(1, "next to nothing")
    with pytest.raises(NotEnoughMemory, match=r"the moon needs \d+ bytes, and \d+ are (free|available).*ring_bytes"):
        segments.check_memory(1 << 60, "the moon")


# ---- inboxes


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
