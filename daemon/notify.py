"""What the daemon says to its service manager, and what it is handed by it.

Owns: sd_notify's datagrams, the sockets of socket activation, the watchdog's interval. Does not
own: when any of it is said. Everything is a no-op where no service manager asked for it.

Invariant: what was handed to this process is not handed on: the variables are removed, and the
descriptors are closed on exec.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import MutableMapping
from typing import Final

from ..errors import BadConfiguration

FIRST_FD: Final = 3
"""SD_LISTEN_FDS_START."""

METRICS_NAME: Final = "metrics"
_ANY_FAMILY: Final = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)

READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"
WATCHDOG: Final = "WATCHDOG=1"


def reloading() -> str:
    """The line that opens a reload; READY closes it. The time lets a newer manager wait for it."""
    return f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}"


def status(text: str) -> str:
    """The line that `systemctl status` shows."""
    return "STATUS=" + text.replace("\n", " ")


class Notifier:
    """A way to the service manager, found in `environ` once. `send` never raises or waits."""

    def __init__(self, environ: MutableMapping[str, str], pid: int | None = None) -> None:
        """Takes NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID out of `environ`."""
        self._address = _address(environ.pop("NOTIFY_SOCKET", ""))
        self.watchdog_s = _watchdog_s(
            environ.pop("WATCHDOG_USEC", ""),
            environ.pop("WATCHDOG_PID", ""),
            os.getpid() if pid is None else pid,
        )
        """Send WATCHDOG so often, seconds: half of what kills. None: nobody watches."""
        self._socket: socket.socket | None = None
        if self._address is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def send(self, *lines: str) -> bool:
        """Whether the manager was told `lines`; False when there is none, or it does not read."""
        if self._socket is None or self._address is None:
            return False
        try:
            self._socket.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            return False
        return True

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def listen_sockets(
    environ: MutableMapping[str, str], pid: int | None = None, first_fd: int = FIRST_FD
) -> dict[str, socket.socket]:
    """The listening sockets handed in, by name; none where they are another process's or nobody's.

    Each is a non-blocking stream socket that listens, and closes on exec; AF_UNIX, but for `metrics`, where a manager
    may listen by TCP for a daemon that may not.
    Raises BadConfiguration: two of one name, a count or descriptor that is none. The descriptors
    then stay open: the daemon is about to end.
    """
    for_pid = environ.pop("LISTEN_PID", "")
    count = environ.pop("LISTEN_FDS", "")
    names = environ.pop("LISTEN_FDNAMES", "")
    if not count or for_pid != str(os.getpid() if pid is None else pid):
        return {}
    if not count.isdecimal():
        raise BadConfiguration(f"LISTEN_FDS = {count!r}: must be a number of sockets")
    called = (names.split(":") if names else []) + ["unknown"] * int(count)
    called = called[: int(count)]
    for name in called:
        if called.count(name) > 1:
            raise BadConfiguration(f"two sockets named {name!r} were handed in: give each its FileDescriptorName=")
    return {name: _listening(first_fd + at, name) for at, name in enumerate(called)}


def _listening(fd: int, name: str) -> socket.socket:
    try:
        os.set_inheritable(fd, False)
        listener = socket.socket(fileno=fd)
    except OSError as error:
        raise BadConfiguration(f"descriptor {fd} ({name}) was to be a socket: {error.strerror}") from error
    listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    families = _ANY_FAMILY if name == METRICS_NAME else (socket.AF_UNIX,)
    if not listens or listener.type != socket.SOCK_STREAM or listener.family not in families:
        listener.detach()
        raise BadConfiguration(
            f"descriptor {fd} ({name}) is no listening Unix stream socket: "
            f"its unit needs ListenStream= with a path, and Accept=no"
        )
    listener.setblocking(False)
    return listener


def _address(given: str) -> str | None:
    if given.startswith("@"):
        return "\0" + given[1:]
    return given if given.startswith("/") else None


def _watchdog_s(usec: str, for_pid: str, pid: int) -> float | None:
    if not usec.isdecimal() or int(usec) == 0 or (for_pid and for_pid != str(pid)):
        return None
    return int(usec) / 2e6
