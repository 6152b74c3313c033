"""The interface to the service manager: notifications, socket activation, watchdog.

Owns: the datagrams of sd_notify, the sockets of socket activation, and the watchdog's interval. Does not own the times
at which notifications are sent. Every function does nothing if no service manager is there.

Invariant: child processes inherit nothing of it. The environment variables are removed, and the descriptors are closed
on exec.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import MutableMapping
from typing import Final

from ...errors import BadConfiguration

FIRST_FD: Final = 3
"""The first descriptor of socket activation (SD_LISTEN_FDS_START)."""

METRICS_NAME: Final = "metrics"

READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"
WATCHDOG: Final = "WATCHDOG=1"


def reloading() -> str:
    """The lines that begin a reload. READY ends it. Newer service managers use the time to wait for the reload."""
    return f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}"


def status(text: str) -> str:
    return "STATUS=" + text.replace("\n", " ")


class Notifier:
    """Sends notifications to the service manager named in `environ`. `send` never raises or waits."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Reads and removes NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID in `environ`."""
        given = environ.pop("NOTIFY_SOCKET", "")
        self._address = "\0" + given[1:] if given.startswith("@") else given if given.startswith("/") else ""
        usec, for_pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        is_fed = usec.isdecimal() and int(usec) > 0 and for_pid in ("", str(os.getpid()))
        self.watchdog_s = int(usec) / 2e6 if is_fed else None
        """The interval for sending WATCHDOG, in seconds: half of the watchdog's timeout. None: no watchdog."""
        self._socket: socket.socket | None = None
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def send(self, *lines: str) -> bool:
        """Sends `lines`. Returns False if there is no service manager, or it does not read."""
        if self._socket is None:
            return False
        try:
            self._socket.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            return False
        return True

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def listen_sockets(environ: MutableMapping[str, str], first_fd: int = FIRST_FD) -> dict[str, socket.socket]:
    """The listening sockets of socket activation, by name: non-blocking stream sockets that are closed on exec. Empty
    if there are none, or they are for another process. Their family is AF_UNIX; `metrics` may also be TCP, because a
    service manager can listen by TCP for a daemon that has no right to do so. Raises BadConfiguration if two have the
    same name, or the count or a descriptor is invalid."""
    for_pid = environ.pop("LISTEN_PID", "")
    count = environ.pop("LISTEN_FDS", "")
    names = environ.pop("LISTEN_FDNAMES", "")
    if not count or for_pid != str(os.getpid()):
        return {}
    if not count.isdecimal():
        raise BadConfiguration(f"LISTEN_FDS = {count!r}: must be a number of sockets")
    called = [*(names.split(":") if names else []), *["unknown"] * int(count)][: int(count)]
    for name in called:
        if called.count(name) > 1:
            raise BadConfiguration(f"two activated sockets are named {name!r}: give each its own FileDescriptorName=")
    return {name: _listening(first_fd + at, name) for at, name in enumerate(called)}


def _listening(fd: int, name: str) -> socket.socket:
    try:
        os.set_inheritable(fd, False)
        listener = socket.socket(fileno=fd)
    except OSError as error:
        raise BadConfiguration(f"descriptor {fd} ({name}) is not a socket: {error.strerror}") from error
    listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    tcp = (socket.AF_INET, socket.AF_INET6) if name == METRICS_NAME else ()
    if not listens or listener.type != socket.SOCK_STREAM or listener.family not in (socket.AF_UNIX, *tcp):
        listener.detach()
        raise BadConfiguration(
            f"descriptor {fd} ({name}) is not a listening Unix stream socket: "
            f"its unit needs ListenStream= with a path, and Accept=no"
        )
    listener.setblocking(False)
    return listener
