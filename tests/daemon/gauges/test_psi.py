from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tensord.daemon.gauges.psi import StallTrigger
from tensord.daemon.process.logs import logger

PATIENCE_S = 30.0
MACHINE = Path("/proc/pressure/memory")


class Stalls:
    """Stands for the kernel's side: urgent data on a socket polls as an event of a trigger does."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.armed: list[tuple[Path, int]] = []

    def arm(self, file: Path, stall_us: int) -> int:
        self.armed.append((file, stall_us))
        return os.dup(self.theirs.fileno())

    def stall(self) -> None:
        self.ours.send(b"!", socket.MSG_OOB)

    def seen(self) -> None:
        """The kernel hands an event out once."""
        self.theirs.recv(1, socket.MSG_OOB)


@pytest.fixture
def stalls() -> Iterator[Stalls]:
    stalls = Stalls()
    with stalls.ours, stalls.theirs:
        try:
            stalls.stall()
            stalls.seen()
        except OSError:
            pytest.skip("this kernel has no urgent data on Unix sockets")
        yield stalls


def test_every_stall_calls_back_until_it_is_stopped(stalls: Stalls) -> None:
    called = threading.Semaphore(0)

    def callback() -> None:
        stalls.seen()
        called.release()

    trigger = StallTrigger(callback, logger("test"), [Path("a"), Path("b")], stalls.arm)
    trigger.start()
    for _ in range(3):
        stalls.stall()
        assert called.acquire(timeout=PATIENCE_S)
    assert stalls.armed == [(Path("a"), 150_000)]
    trigger.stop()
    stalls.stall()
    assert not [thread for thread in threading.enumerate() if thread.name == "tensord-stalls"]
    assert not called.acquire(blocking=False)
    trigger.stop()


def test_the_next_file_is_taken_where_one_refuses(stalls: Stalls) -> None:
    def arm(file: Path, stall_us: int) -> int:
        if file.name == "cgroup":
            raise PermissionError(13, "Permission denied", str(file))
        return stalls.arm(file, stall_us)

    trigger = StallTrigger(lambda: None, logger("test"), [Path("cgroup"), Path("machine")], arm)
    trigger.start()
    trigger.stop()
    assert stalls.armed == [(Path("machine"), 150_000)]


def test_where_none_can_be_had_the_log_says_why_and_the_daemon_goes_on(tmp_path: Path) -> None:
    with capture_logs() as lines:
        trigger = StallTrigger(lambda: None, logger("test"), [tmp_path / "absent"])
        trigger.start()
        trigger.stop()
    none = "no stall trigger; samples at intervals only"
    assert [(line["event"], line["log_level"]) for line in lines] == [(none, "info")]
    assert "absent" in lines[0]["why"]


def test_a_trigger_that_ends_by_itself_is_logged(stalls: Stalls) -> None:
    failed = threading.Event()

    def callback() -> None:
        failed.set()
        raise RuntimeError("the loop is closed")

    with capture_logs() as lines:
        trigger = StallTrigger(callback, logger("test"), [Path("a")], stalls.arm)
        trigger.start()
        stalls.stall()
        assert failed.wait(PATIENCE_S)
        trigger.stop()
    assert [(line["event"], line["why"]) for line in lines if line["log_level"] == "warning"] == [
        ("stall trigger ended; samples at intervals only", "RuntimeError: the loop is closed")
    ]


def test_this_kernel_takes_the_trigger() -> None:
    try:
        os.close(os.open(MACHINE, os.O_RDWR))
    except OSError as error:
        pytest.skip(str(error))
    with capture_logs() as lines:
        trigger = StallTrigger(lambda: None, logger("test"), [MACHINE])
        trigger.start()
        trigger.stop()
    assert [line["event"] for line in lines] == ["stall trigger set"], lines
