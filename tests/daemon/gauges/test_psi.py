from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from structlog.testing import capture_logs

from tensord.daemon.gauges import psi
from tensord.daemon.gauges.psi import watch_stalls
from tensord.daemon.gauges.sources.host import HostSource
from tensord.daemon.process.logs import logger

PATIENCE_S = 30.0
MACHINE = Path("/proc/pressure/memory")
LOG = logger("test")
NONE = "no stall trigger; samples at intervals only"


class Stalls:
    """Stands for the kernel's side: urgent data on a socket polls as an event of a trigger does."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.armed: list[Path] = []
        self.seen = asyncio.Event()
        self.count = 0

    def arm(self, file: Path) -> int:
        if file.name == "refused":
            raise PermissionError(13, "Permission denied", str(file))
        self.armed.append(file)
        return os.dup(self.theirs.fileno())

    def stall(self) -> None:
        self.ours.send(b"!", socket.MSG_OOB)

    def take(self) -> None:
        """The kernel hands an event out once."""
        self.theirs.recv(1, socket.MSG_OOB)
        self.count += 1
        self.seen.set()

    async def next(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.seen.wait()
        self.seen.clear()


@pytest.fixture
def stalls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stalls]:
    stalls = Stalls()
    with stalls.ours, stalls.theirs:
        try:
            stalls.stall()
            stalls.theirs.recv(1, socket.MSG_OOB)
        except OSError:
            pytest.skip("this kernel has no urgent data on Unix sockets")
        monkeypatch.setattr(psi, "_armed", stalls.arm)
        yield stalls


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The pressure files that the host is said to have."""
    found: list[Path] = []
    monkeypatch.setattr(HostSource, "pressure_files", lambda _: found)
    return found


def watched(stalls: Stalls, test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs `test` while the stalls are watched, in the daemon's kind of loop."""

    async def go() -> None:
        before = os.listdir("/proc/self/fd")
        watching = asyncio.create_task(watch_stalls(stalls.take, LOG))
        await test()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert os.listdir("/proc/self/fd") == before
        stalls.stall()
        await asyncio.sleep(0.01)

    uvloop.run(go())


def test_every_stall_calls_back_once_with_the_first_file_that_does_not_refuse(
    stalls: Stalls, files: list[Path]
) -> None:
    files += [Path("refused"), Path("machine"), Path("other")]

    async def three() -> None:
        for _ in range(3):
            stalls.stall()
            await stalls.next()

    watched(stalls, three)
    assert stalls.armed == [Path("machine")]
    assert stalls.count == 3


def test_where_none_can_be_had_the_log_says_why_and_the_daemon_goes_on(files: list[Path], tmp_path: Path) -> None:
    files.append(tmp_path / "absent")
    with capture_logs() as lines:
        asyncio.run(watch_stalls(lambda: None, LOG))
    assert [(line["event"], line["log_level"], "absent" in line["why"]) for line in lines] == [(NONE, "info", True)]


def test_this_kernel_takes_the_trigger(files: list[Path]) -> None:
    files.append(MACHINE)
    try:
        os.close(os.open(MACHINE, os.O_RDWR))
    except OSError as error:
        pytest.skip(str(error))

    async def go() -> None:
        watching = asyncio.create_task(watch_stalls(lambda: None, LOG))
        await asyncio.sleep(0)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    with capture_logs() as lines:
        uvloop.run(go())
    assert [line["event"] for line in lines] == ["stall trigger set"], lines
