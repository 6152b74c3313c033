"""The listening sockets. A service manager passes them in; the others are created here and removed at the end.

    control, status    one Unix socket each
    metrics            a Unix socket, and also TCP if the configuration or a service manager says so
    page               none, a Unix socket, or TCP on the loopback interface, as the configuration says

Owns: the sockets' files, modes and group. Does not own the acceptance of connections (`actors.listener`).

Invariant: no process can connect to a socket before its mode is set. A socket on which a process listens is never
removed.
"""

from __future__ import annotations

import errno
import grp
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from ..errors import BadConfiguration, InstanceBusy, SocketForbidden
from ..ipc.places import METRICS_NAME, make_folder
from .config.config import Config
from .config.settings import host_and_port

BACKLOG: Final = 512
# The umask for new sockets: no other user may connect before the mode is set.
_UMASK: Final = 0o177
_WITHOUT_TCP: Final = {
    "metrics.listen": "let it listen for the daemon: docs/metrics.md",
    "http": "set the path of a Unix socket: docs/page.md",
}


class Sockets:
    """`control`, `status`, `metrics` and `page`, non-blocking and listening, for as long as the `with` block lasts.

    Raises:
        SocketForbidden, InstanceBusy, BadConfiguration: one of the sockets cannot be created. None is left behind then.
    """

    def __init__(self, config: Config, activated: Mapping[str, socket.socket]) -> None:
        self._made: list[Path] = []
        self._open = list(activated.values())
        try:
            self.control = activated.get("control") or self._listen(config.socket, config.socket_mode, config)
            self.status = activated.get("status") or self._listen(config.status_socket, config.status_mode, config)
            self.metrics = self._metrics(config, activated.get("metrics"))
            self.page = self._page(config)
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        for listening in self._open:
            listening.close()
        for path in self._made:
            path.unlink(missing_ok=True)

    def _metrics(self, config: Config, given: socket.socket | None) -> list[socket.socket]:
        """The sockets for metrics. A socket from the service manager replaces the configured one of the same kind."""
        listening = [] if given is None else [given]
        if given is None or given.family != socket.AF_UNIX:
            listening.append(self._listen(self._metrics_path(config), config.metrics.mode, config))
        if config.metrics.listen is not None and (given is None or given.family == socket.AF_UNIX):
            listening += self._listen_by_tcp("metrics.listen", config.metrics.listen)
        return listening

    def _page(self, config: Config) -> list[socket.socket]:
        if config.http is None:
            return []
        path = config.page_socket
        return (
            self._listen_by_tcp("http", config.http)
            if path is None
            else [self._listen(path, config.status_mode, config)]
        )

    def _metrics_path(self, config: Config) -> Path:
        """The configured path. By default, the socket is in the folder of the control socket, also if a service manager
        has created that."""
        control = self.control.getsockname()
        if config.sources["metrics.socket"] == "default" and str(control).startswith("/"):
            return Path(control).with_name(METRICS_NAME)
        return config.metrics.socket

    def _listen(self, path: Path, mode: int, config: Config) -> socket.socket:
        try:
            make_folder(path.parent)
            _clear(path)
        except OSError as error:
            raise _cannot_listen(path, error) from error
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._open.append(listening)
        before = os.umask(_UMASK)
        try:
            listening.bind(str(path))
        except OSError as error:
            raise _cannot_listen(path, error) from error
        finally:
            os.umask(before)
        self._made.append(path)
        if config.socket_group is not None:
            _give_to_group(path, config.socket_group)
        path.chmod(mode)
        listening.listen(BACKLOG)
        listening.setblocking(False)
        return listening

    def _listen_by_tcp(self, key: str, listen: str) -> list[socket.socket]:
        """One socket for each address of the host name. `key`: the setting that `listen` is the value of."""
        host, port = host_and_port(listen)
        made: list[socket.socket] = []
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, _, _, _, address in dict.fromkeys(found):
                made.append(socket.create_server(address, family=family, backlog=BACKLOG))
                self._open.append(made[-1])
                made[-1].setblocking(False)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                # As with a Unix socket: the configuration is right, and a service manager may try again.
                raise InstanceBusy(
                    f"{key} = {listen!r}: another process listens there; stop it, or set another address, or none"
                ) from error
            raise BadConfiguration(
                f"{key} = {listen!r}: {error.strerror or error}; set another address, or none. If the service "
                f"manager forbids TCP, {_WITHOUT_TCP[key]}"
            ) from error
        return made


def _cannot_listen(path: Path, error: OSError) -> SocketForbidden:
    return SocketForbidden(f"cannot listen at {path}: {error.strerror}; set another socket")


def _clear(path: Path) -> None:
    """Removes the socket of a killed daemon. Raises InstanceBusy if a process listens on it."""
    if not path.is_socket():
        if path.exists():
            raise SocketForbidden(f"{path} exists and is not a socket; remove it, or set another socket")
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise InstanceBusy(f"another process listens at {path}; stop it, or set another path for this socket")


def _give_to_group(path: Path, group: str) -> None:
    try:
        os.chown(path, -1, grp.getgrnam(group).gr_gid)
    except (KeyError, OSError) as error:
        raise BadConfiguration(f"socket_group = {group!r}: {error}; create the group, or set another one") from error
