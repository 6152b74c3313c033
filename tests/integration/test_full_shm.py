"""Memory that others have filled: /dev/shm, where some are refused and told; the page cache, which is no pressure."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensord.errors import NotEnoughMemory
from tensord.ipc.messages import control as messages

from ..daemon_process import MIB, Daemon, until
from ..faults.payloads import has, key, payload
from ..faults.raw import RawClient
from ..memory_cgroup import memory_cgroup, within

PAGE_BYTES = 4096


def with_shm(options: str) -> list[str]:
    """What a program is run under, so that its /dev/shm is its own. Skips the test where that cannot be."""
    prefix = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces for this user here")
    return prefix


@pytest.fixture
def confined() -> Iterator[Daemon]:
    """A daemon whose /dev/shm has 8 MiB and 32 files."""
    with Daemon(ring_bytes=2 * MIB, max_entries=256) as daemon:
        daemon.prefix = with_shm("size=8m,nr_inodes=32")
        yield daemon.start()


def shm(daemon: Daemon) -> Path:
    return Path(f"/proc/{daemon.pid}/root/dev/shm")


def fill_bytes(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        for _ in range(10_000):
            filler.write(bytes(PAGE_BYTES))
    assert not os.statvfs(folder).f_bavail


def fill_files(folder: Path) -> None:
    (folder / "filler").mkdir()
    with suppress(OSError):
        for number in range(1000):
            (folder / "filler" / str(number)).touch()
    assert not os.statvfs(folder).f_favail


def empty(folder: Path) -> None:
    filler = folder / "filler"
    if filler.is_dir():
        for path in filler.iterdir():
            path.unlink()
        filler.rmdir()
    else:
        filler.unlink()


def problems(daemon: Daemon) -> list[str]:
    told = daemon.ask(messages.HealthQuery)
    assert told["healthy"] == (not told["problems"])
    found: list[str] = told["problems"]
    return found


@pytest.mark.root
@pytest.mark.parametrize("fill", [fill_bytes, fill_files])
def test_a_full_shm_is_reported_while_it_lasts_and_disturbs_no_attached_client(
    confined: Daemon, fill: Callable[[Path], None]
) -> None:
    attached = confined.client()
    confined.until(lambda s: s["ring_ready_bytes"] == s["ring_bytes"], "the whole ring")
    assert attached.put(key(1), payload(1), wait=True).state == "stored"
    assert problems(confined) == []
    for episode in (1, 2):
        fill(shm(confined))
        (problem,) = problems(confined)
        assert "/dev/shm" in problem and "new clients are refused" in problem and "remount" in problem
        for _ in range(3):
            with pytest.raises(NotEnoughMemory, match="/dev/shm"):
                RawClient(confined.socket)
        assert confined.log.count("new clients are refused: no memory for a lane") == episode
        assert attached.put(key(10 + episode), payload(10 + episode), wait=True).state == "stored"
        assert has(attached, 1)
        assert confined.status()["clients"] >= 1
        empty(shm(confined))
        assert problems(confined) == []
        with RawClient(confined.socket):
            pass
        confined.until(lambda s: s["lanes"] == 1, "its lane to be removed")


@pytest.mark.root
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("size=8m", ("a ring of 16777216 bytes with its index needs ", "free in /dev/shm", "ring_bytes")),
        ("ro", ("Read-only file system", "mount -o remount,rw /dev/shm")),
    ],
)
def test_a_daemon_without_room_in_shm_says_so_and_what_to_do(options: str, says: tuple[str, ...]) -> None:
    with Daemon(ring_bytes=16 * MIB) as daemon:
        daemon.prefix = with_shm(options)
        told = daemon.refused()
        assert all(each in told for each in says) and "Traceback" not in told, told


# ---- files that are read beside a daemon, within its memory limit

LIMIT_BYTES = 256 * MIB


def weights(path: Path, size_bytes: int) -> Path:
    """A file of which nothing is in memory."""
    with path.open("wb") as file:
        for _ in range(size_bytes // MIB):
            file.write(os.urandom(MIB))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    kind = subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=True).stdout.strip()
    if kind == "tmpfs":
        pytest.skip(f"{path} is on a tmpfs, whose files cannot leave memory")
    return path


@pytest.mark.parametrize("version", [1, 2])
def test_files_that_are_read_again_and_again_are_no_pressure_on_the_ring(version: int, tmp_path: Path) -> None:
    with (
        memory_cgroup(version, LIMIT_BYTES) as folder,
        Daemon(ring_bytes=32 * MIB, memory_prefault=True, gauges_device="none", gauges_sample_s=0.25) as daemon,
    ):
        daemon.prefix = within(folder)
        daemon.start()
        daemon.until(lambda status: status["ring_ready_bytes"] == status["ring_bytes"], "the whole ring")
        client = daemon.client()
        charged = folder / ("memory.usage_in_bytes" if version == 1 else "memory.current")
        # All of it fits, so that the second read finds it in memory: from then on it is active page cache.
        file = weights(tmp_path / "weights", int(0.94 * LIMIT_BYTES) - int(charged.read_text()))
        for _ in range(2):
            subprocess.run(within(folder, ["cat", str(file)]), stdout=subprocess.DEVNULL, check=True)

        seen: list[dict[str, Any]] = []

        def sampled() -> bool:
            """Whether two samples have come: the second one began after the files were read."""
            (gauge,) = daemon.status()["governor"]["gauges"]
            if gauge not in seen:
                seen.append(gauge)
            return len(seen) > 2

        until(sampled, "two samples of the host's gauge")
        gauge = seen[-1]
        assert gauge["total_bytes"] == LIMIT_BYTES
        assert gauge["used_bytes"] < 0.7 * LIMIT_BYTES
        assert gauge["mode"] == "relaxed"
        assert daemon.store("withdrawn_bytes") == 0
        assert int(charged.read_text()) > 0.75 * LIMIT_BYTES, "the page cache was to fill the cgroup"
        assert client.put(b"k" * 32, np.zeros(MIB, np.uint8), wait=True).state == "stored"
