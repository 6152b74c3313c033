"""What stops the daemon as a program at its start, with which exit status, and what it only warns of."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tensord.shm.ring.segments import existing

from ..daemon_process import PATIENCE_S, Daemon


def test_a_daemon_serves_in_spite_of_variables_that_it_does_not_know_and_logs_them() -> None:
    injected = {"TENSORD_PORT": "tcp://10.0.0.1:9477", "TENSORD_VLLM_PROCESSOR_CACHE": "1"}
    with Daemon() as daemon:
        daemon.prefix = ["env", *(f"{name}={value}" for name, value in injected.items())]
        daemon.start()
        for name in injected:
            (line,) = (line for line in daemon.log.splitlines() if name in line)
            assert "level=warning" in line and "environment variable ignored" in line, line


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        (("--ring-bytes", "plenty"), 2),
        (("--socket-group", "no-such-group"), 2),
        (("--socket", "/proc/nowhere/control.sock"), 1),
    ],
    ids=["a value", "found out while it starts", "no fault of the configuration"],
)
def test_every_wrong_configuration_ends_with_status_2_and_leaves_no_memory(
    tmp_path: Path, flags: tuple[str, ...], status: int
) -> None:
    instance = f"start-{os.getpid()}"
    given = ["--instance", instance, "--ring-bytes", "4MiB", "--socket", str(tmp_path / "control.sock"), *flags]
    done = subprocess.run(
        [sys.executable, "-m", "tensord.daemon", *given], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == status, done.stderr
    assert existing(instance) == []


@pytest.mark.parametrize("flag", ["--http", "--metrics-listen"])
def test_a_busy_tcp_port_is_no_fault_of_the_configuration(tmp_path: Path, flag: str) -> None:
    """A service manager starts the daemon again, as it does with a busy Unix socket."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        test_every_wrong_configuration_ends_with_status_2_and_leaves_no_memory(tmp_path, (flag, address), 1)
