"""Files that are read beside a daemon, within its memory limit: their page cache is no pressure."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ..daemon_process import MIB, Daemon, until
from ..memory_cgroup import memory_cgroup, within

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
