"""The daemon as a service manager starts it: sockets handed in, readiness, watchdog and reload told, a clean stop."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

import tensord
from tensord.shm.ring.segments import existing, remove

from ..daemon_process import PATIENCE_S, until

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


class Manager:
    """A service manager with a control and a status socket, which it passes to each daemon that it starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.instance = f"managed-{os.getpid()}"
        self.control, self.status = (listening(folder / name) for name in ("control.sock", "status.sock"))
        self.told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.told.bind(str(folder / "notify"))
        self.told.settimeout(PATIENCE_S)

    @contextmanager
    def daemon(self) -> Iterator[subprocess.Popen[bytes]]:
        """A daemon that it watches. It is killed at the end, unless it has ended."""
        fds = self.control.fileno(), self.status.fileno()
        flags = ["--instance", self.instance, "--ring-bytes", "4MiB", "--log-level", "error", "--socket-mode", "0600"]
        process = subprocess.Popen(
            [sys.executable, "-c", _AS_MANAGER, *map(str, fds), *flags],
            env={**os.environ, "NOTIFY_SOCKET": str(self.folder / "notify"), "WATCHDOG_USEC": "2000000"},
            pass_fds=fds,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def manager() -> Iterator[Manager]:
    with TemporaryDirectory(prefix="tensord-") as name:
        made = Manager(Path(name))
        with made.control, made.status, made.told:
            yield made
    for segment in existing(made.instance):
        remove(segment)


def test_activated_sockets_are_served_and_the_service_manager_is_notified(manager: Manager) -> None:
    with manager.daemon() as process:
        assert b"STATUS=serving" in told(manager.told, b"READY=1")
        with tensord.Client(manager.folder / "control.sock") as client:
            assert client.put(bytes(range(32)), [1, 2], wait=True).state == "stored"
            assert client.status()["pid"] == process.pid
        assert told(manager.told, b"WATCHDOG=1")
        process.send_signal(signal.SIGHUP)
        assert b"MONOTONIC_USEC=" in told(manager.told, b"RELOADING=1")
        assert told(manager.told, b"READY=1")
        process.send_signal(signal.SIGTERM)
        assert told(manager.told, b"STOPPING=1")
        assert process.wait(PATIENCE_S) == 0
        # The manager's sockets stay: a client that connects now waits for the next daemon.
        assert (manager.folder / "control.sock").is_socket()


def test_an_activated_socket_whose_file_was_removed_is_made_anew_by_each_daemon(manager: Manager) -> None:
    """The manager's own socket stays without a file: it never looks, and the next daemon gets the same one."""
    path = manager.folder / "control.sock"
    path.chmod(0o666)
    ends: list[int] = []
    for signal_number in (signal.SIGKILL, signal.SIGTERM, signal.SIGTERM):
        with manager.daemon() as process:
            told(manager.told, b"READY=1")
            if not ends:
                with tensord.Client(path) as attached:
                    assert attached.wait_connected(PATIENCE_S)
                    path.unlink()
                    until(path.is_socket, "the socket to be made anew")
                    assert attached.put(bytes(range(32)), [1, 2], wait=True).state == "stored"
            # Before, the killed daemon has left its file, and the stopped one none.
            with tensord.Client(path) as client:
                assert client.wait_connected(PATIENCE_S)
                assert client.status()["pid"] == process.pid
                # Where no file tells the mode, it is the configured one.
                assert stat.S_IMODE(path.stat().st_mode) == (0o666 if len(ends) < 2 else 0o600)
            process.send_signal(signal_number)
            ends.append(process.wait(PATIENCE_S))
    assert ends == [-signal.SIGKILL, 0, 0]
    assert not path.exists(), "what a daemon has made, it removes"
    assert (manager.folder / "status.sock").is_socket(), "the manager's own stays"
