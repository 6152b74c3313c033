"""The daemon as a service manager starts it: sockets handed in, readiness, watchdog and reload told, a clean stop."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import tensord
from tensord.shm.segments import existing, remove

from ..daemon_process import PATIENCE_S

# What a service manager does between fork and exec: the sockets become 3 and 4, the process id is named.
_AS_MANAGER: Final = """
import fcntl, os, sys
control, status = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 32) for fd in sys.argv[1:3])
os.dup2(control, 3, inheritable=True)
os.dup2(status, 4, inheritable=True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="2", LISTEN_FDNAMES="control:status")
os.execv(sys.executable, [sys.executable, "-m", "tensord.daemon", *sys.argv[3:]])
"""


def listening(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.listen(16)
    return sock


def told(manager: socket.socket, line: bytes) -> bytes:
    """The next datagram that holds `line`; what comes before it is passed over."""
    while line not in (found := manager.recv(4096)):
        pass
    return found


@contextmanager
def managed(folder: Path, instance: str) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """A daemon under a manager that watches it, and the manager's notification socket."""
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(folder / "notify"))
    manager.settimeout(PATIENCE_S)
    with manager, listening(folder / "control.sock") as control, listening(folder / "status.sock") as status:
        environ = {**os.environ, "NOTIFY_SOCKET": str(folder / "notify"), "WATCHDOG_USEC": "2000000"}
        flags = ["--instance", instance, "--ring-bytes", "4MiB", "--log-level", "error"]
        process = subprocess.Popen(
            [sys.executable, "-c", _AS_MANAGER, str(control.fileno()), str(status.fileno()), *flags],
            env=environ,
            pass_fds=(control.fileno(), status.fileno()),
        )
        try:
            yield process, manager
        finally:
            process.kill()
            process.wait()
            for name in existing(instance):
                remove(name)


def test_activated_sockets_are_served_and_the_service_manager_is_notified() -> None:
    with (
        TemporaryDirectory(prefix="tensord-") as name,
        managed(Path(name), f"managed-{os.getpid()}") as (process, manager),
    ):
        assert b"STATUS=serving" in told(manager, b"READY=1")
        with tensord.Client(Path(name) / "control.sock") as client:
            assert client.put(bytes(range(32)), [1, 2], wait=True).state == "stored"
            assert client.status()["pid"] == process.pid
        assert told(manager, b"WATCHDOG=1")
        process.send_signal(signal.SIGHUP)
        assert b"MONOTONIC_USEC=" in told(manager, b"RELOADING=1")
        assert told(manager, b"READY=1")
        process.send_signal(signal.SIGTERM)
        assert told(manager, b"STOPPING=1")
        assert process.wait(PATIENCE_S) == 0
        # The manager's sockets stay: a client that connects now waits for the next daemon.
        assert (Path(name) / "control.sock").is_socket()
