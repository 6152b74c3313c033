"""Shared memory that others could have made, wrote into, or have locked: what a daemon does when it finds such."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tensord.errors import NoFence
from tensord.ipc.messages import control as messages
from tensord.shm.ring import segments

from ..daemon_process import MIB, Daemon, until
from ..faults.payloads import is_payload, key, lap, payload
from ..faults.raw import RawClient

RING_BYTES = 2 * MIB
UNPINNED = 2
STRANGER = 65534
LANE_ID_AT = 16
# A program that runs its arguments where membarrier(2) is refused: {} stands for what of it.
SANDBOX = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
filters = [(0x20, 0, 0, 0), (0x15, 0, {jump}, 324), {filter} (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
code = b"".join(struct.pack("HBBI", *each) for each in filters)
buffer = ctypes.create_string_buffer(code)
program = struct.pack("HxxxxxxP", len(filters), ctypes.addressof(buffer))
assert not libc.prctl(38, 1, 0, 0, 0)
assert not libc.prctl(22, 2, program, 0, 0), ctypes.get_errno()
os.execv(sys.argv[1], sys.argv[1:])
"""
WITHOUT_MEMBARRIER = SANDBOX.format(jump=1, filter="")
WITHOUT_SLOW_FENCE = SANDBOX.format(jump=3, filter="(0x20, 0, 0, 16), (0x15, 0, 1, 1),")


@pytest.fixture
def planted() -> Iterator[list[Path]]:
    """Files to remove at the end, that no daemon may remove."""
    paths: list[Path] = []
    yield paths
    for path in paths:
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def stranger(path: Path, mode: int = 0o666) -> Path:
    """Has a file, made if need be, belong to another user."""
    path.touch()
    os.chown(path, STRANGER, -1)
    path.chmod(mode)
    return path


def overwrite(daemon: Daemon) -> None:
    """Ten laps, of which one that shows they would have met any entry that nobody pins."""
    writer = daemon.client()
    writer.put(key(UNPINNED), payload(UNPINNED), wait=True)
    lap(writer, RING_BYTES, 10)
    assert not writer.contains(key(UNPINNED)), "the ring was not overwritten"


@pytest.fixture
def small() -> Iterator[Daemon]:
    with Daemon(ring_bytes=RING_BYTES, policy="lru") as running:
        yield running.start()


@pytest.fixture
def as_root() -> None:
    if os.geteuid():
        pytest.skip("needs root, to give files to another user")


def outlives(daemon: Daemon, damage: Callable[[int], object]) -> None:
    """A view outlives the daemon, and its successor finds the pin, whatever `damage` does, which gets its lane's id."""
    reader = daemon.client()
    reader.put(key(1), payload(1), wait=True)
    lease = reader.get(key(1))
    assert lease is not None
    (row,) = (row for row in daemon.client_rows() if row["pins"])
    daemon.kill()
    reader.close()  # it is not there to attach again
    damage(row["lane"])
    daemon.start()
    overwrite(daemon)
    assert is_payload(lease.tree, 1)


def test_each_lane_is_scanned_whatever_its_client_wrote_into_its_header(small: Daemon) -> None:
    with RawClient(small.socket) as hostile:
        outlives(small, lambda lane: os.pwrite(hostile.fds[2], struct.pack("Q", lane), LANE_ID_AT))


def test_pins_in_a_lane_with_a_foreign_header_count(small: Daemon) -> None:
    def damage(lane: int) -> None:
        (path,) = small.lanes()
        with path.open("r+b") as memory:
            memory.write(b"\xff" * 4096)

    outlives(small, damage)


def test_which_fence_reaches_a_lane_is_never_read_from_the_lanes_memory(daemon: Daemon) -> None:
    with RawClient(daemon.socket, fenced=False) as unfenced:
        assert daemon.status()["fence"] == "global"
        os.pwrite(unfenced.fds[2], b"\xff" * 8, LANE_ID_AT + 8)
        daemon.kill()
        assert daemon.start().status()["fence"] == "global"
    daemon.until(lambda status: status["fence"] == "expedited", "the lane to be forgotten")
    daemon.client()
    daemon.kill()
    assert daemon.start().status()["fence"] == "expedited", "a lane's name says that its process registered"


def test_a_lane_that_is_kept_counts_against_its_uid_after_a_restart_too(daemon: Daemon) -> None:
    with RawClient(daemon.socket):
        daemon.kill()
        (row,) = daemon.start().status()["quotas"]["uids"]
        assert (row["uid"], row["lanes"], row["clients"]) == (os.geteuid(), 1, 0)
        assert [row["uid"] for row in daemon.client_rows()] == [os.geteuid()]


@pytest.mark.root
@pytest.mark.usefixtures("as_root")
@pytest.mark.parametrize("part", ["ring", "index", "lock"])
def test_memory_of_another_user_is_refused_and_its_owner_named(daemon: Daemon, part: str) -> None:
    daemon.terminate()
    path = stranger(daemon.segment(part))
    before = path.stat()
    told = daemon.refused()
    assert f"{path} is a file of uid {STRANGER} with mode 0666" in told
    assert "remove the file, or set another --instance" in told
    assert (path.stat().st_ino, path.stat().st_size) == (before.st_ino, before.st_size), "it was not ours to change"


def test_memory_that_others_may_write_is_refused(daemon: Daemon) -> None:
    daemon.terminate()
    daemon.segment("ring").chmod(0o660)
    assert "with mode 0660" in daemon.refused()


def test_files_that_are_no_lanes_are_passed_over_and_named(daemon: Daemon, planted: list[Path]) -> None:
    daemon.client().put(key(1), payload(1, 1000), wait=True)
    daemon.terminate()
    planted += [daemon.segment(f"lane.{part}") for part in ("a1", "a2", "a3", "a4", "x")]
    folder, link, pipe, open_to_all, unnamed = planted
    folder.mkdir()
    link.symlink_to(daemon.segment("ring"))
    os.mkfifo(pipe, 0o600)
    open_to_all.touch(0o666)
    open_to_all.chmod(0o666)
    unnamed.touch(0o600)
    daemon.start()
    told = daemon.ask(messages.HealthQuery)
    assert told["healthy"], "whoever may write to /dev/shm could keep a daemon out of service"
    for path in planted:
        assert any(path.name in notice for notice in told["notices"]), path
        assert path.name in daemon.log
        assert os.path.lexists(path)
    assert daemon.client().contains(key(1))


@pytest.mark.root
@pytest.mark.usefixtures("as_root")
def test_names_that_another_user_took_keep_no_client_out(daemon: Daemon) -> None:
    daemon.terminate()
    for number in range(1, 40):
        for suffix in (".u0", ".u0.fenced"):
            stranger(daemon.segment(f"lane.{2 << 32 | number:x}{suffix}"))
    daemon.start()
    assert len(daemon.ask(messages.HealthQuery)["notices"]) == 17
    daemon.client().put(key(1), payload(1, 1000), wait=True)
    assert daemon.client().get(key(1)) is not None
    assert daemon.interrupt() == 0
    assert len(daemon.segments()) == 78, "what is not the daemon's stays"


def test_a_lock_of_a_client_on_what_it_was_handed_keeps_no_daemon_out(daemon: Daemon) -> None:
    with RawClient(daemon.socket) as client:
        ring_fd, index_fd, _ = client.fds
        daemon.kill()
        for fd in (ring_fd, index_fd):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        daemon.start()
        assert daemon.status()["recovered"]


def test_a_lock_of_a_client_on_its_lane_does_not_hold_the_daemon_up(daemon: Daemon) -> None:
    with RawClient(daemon.socket) as client:
        lane = client.fds[2]
        fcntl.flock(lane, fcntl.LOCK_EX | fcntl.LOCK_NB)
        client.channel.close()
        until(lambda: all(row["orphaned"] for row in daemon.client_rows()), "the connection's end")
        with RawClient(daemon.socket, attach=False) as again:
            again.ask(lambda n: messages.Attach(n, 1), (lane,))
            assert os.fstat(again.fds[2]).st_ino != os.fstat(lane).st_ino, "a lane that is locked against its owner"
        assert daemon.status()["lanes"] >= 1


def test_lanes_of_a_ring_that_is_gone_are_not_taken_for_those_of_a_new_one(daemon: Daemon) -> None:
    daemon.client()
    assert daemon.lanes()
    ring = segments.segment_name(daemon.instance, "ring")
    daemon.kill()
    segments.remove(ring)
    stale = {path.stat().st_ino for path in daemon.lanes()}
    assert stale
    daemon.start()
    assert not stale & {path.stat().st_ino for path in daemon.lanes()}


def test_a_daemon_that_could_not_start_leaves_nothing() -> None:
    with Daemon(ring_bytes="15TiB") as daemon:
        assert "NotEnoughMemory" in daemon.refused()
        assert daemon.segments() == []


def test_without_membarrier_a_daemon_says_what_is_missing_and_does_not_serve() -> None:
    with Daemon() as daemon:
        daemon.prefix = [sys.executable, "-c", WITHOUT_MEMBARRIER]
        told = daemon.refused()
        assert "NoFence" in told
        assert "membarrier(2)" in told and "seccomp" in told
        assert daemon.segments() == []


def test_a_client_that_no_fence_reaches_is_refused_and_the_others_are_served() -> None:
    with Daemon(ring_bytes=RING_BYTES, policy="lru") as daemon:
        daemon.prefix = [sys.executable, "-c", WITHOUT_SLOW_FENCE]
        daemon.start()
        with pytest.raises(NoFence, match=r"membarrier\(2\) with GLOBAL is refused"):
            RawClient(daemon.socket, fenced=False)
        overwrite(daemon)
        assert daemon.status()["fence"] == "expedited"
