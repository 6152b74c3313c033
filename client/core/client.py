"""The synchronous client: the class that an inference process imports.

Owns: how a client is made. Lookups read shared memory through the View; calls that change something send messages over
the Link.
Does not own: the public calls (entries, puts, pressure, base), the connection (link/), puts in flight
(writing/), reads (reading/).
Invariants: while the daemon is away, lookups go on, and puts end as "lost". Only calls that need an answer of the
daemon raise DaemonUnavailable.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from ...errors import UsageError, shown
from ...ipc.messages.schema import NAME_CHARS_MAX
from ...ipc.places import STATUS_NAME, control_socket, status_socket
from ..arguments.checks import check_name, check_socket, check_timeout, printable
from ..link.link import Link
from .entries import EntryCalls
from .pressure import PressureCalls
from .puts import PutCalls

TIMEOUT_S: Final = 5.0


class Client(EntryCalls, PutCalls, PressureCalls):
    """A process's connection to the host's cache. Thread-safe, and usable in a forked child.

    Args:
        socket: path of the daemon's control socket. Default: $TENSORD_SOCKET, else the user's own socket, else the
            system's.
        name: the name that `tensorctl clients` shows, of 1 to 128 characters. Default: the program's name.
        timeout_s: default time limit of each call, in seconds. This and every other `timeout_s` is a number from 0 to
            ten years, or infinity for no limit; other values raise UsageError.
        attach_s: seconds that the constructor waits for the daemon's answer; without a socket it returns at once.
            Default: `timeout_s`; 0.25 s if the daemon at this socket has left this process without an answer before.
            The client attaches later, too.
        required: raise if there is no daemon. Default: every lookup is a miss until there is one, and the first client
            of a process that finds none at this socket logs a warning (logger `tensord`) with the command that starts
            one.

    Raises:
        UsageError: `socket`, `name`, `timeout_s` or `attach_s` is out of its range.
        DaemonUnavailable, SocketForbidden, VersionMismatch: with `required`, the client could not attach.

    Example:
        >>> cache.put(key, {"hidden": np.zeros((576, 64), np.float32)}, tokens=576, wait=True).state
        'stored'
        >>> with cache.get(key) as lease:
        ...     lease.tree["hidden"].shape
        (576, 64)
        >>> cache.get(bytes(32)) is None
        True
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        *,
        name: str | None = None,
        timeout_s: float = TIMEOUT_S,
        attach_s: float | None = None,
        required: bool = False,
    ) -> None:
        path = check_socket(socket) if socket is not None else control_socket(os.environ)
        status_path = path.with_name(STATUS_NAME) if socket is not None else status_socket(os.environ)
        timeout_s = check_timeout(timeout_s, TIMEOUT_S)
        attach_s = None if attach_s is None else check_timeout(attach_s, timeout_s, "attach_s")
        if name is None:
            name = printable(Path(sys.argv[0]).name or "python")[:NAME_CHARS_MAX]
        check_name("name", name, NAME_CHARS_MAX)
        super().__init__(Link(path, name, timeout_s, required=required), status_path, timeout_s)
        self._link.start(attach_s)
        if required and not self._link.connected:
            self.close()
            raise self._link.unavailable()


def check_client(client: object, field: str = "client") -> Client:
    """Returns `client`.

    Raises:
        UsageError: it is no Client.
    """
    if not isinstance(client, Client):
        raise UsageError(f"{field} is {shown(client)}; it must be a tensord.Client (of an AsyncClient, its client)")
    return client
