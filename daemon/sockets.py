"""The listening sockets: handed in by a service manager, else made here and removed at the end.

    control, status    Unix sockets, one each
    metrics            a Unix socket, and TCP where the configuration or a service manager gives it

Owns: their files, modes and group. Does not own who is accepted.
"""

from __future__ import annotations

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
# Nobody may connect before the mode is right.
_UMASK: Final = 0o177


class Sockets:
    """`control`, `status` and `metrics`, non-blocking and listening, for as long as the `with` block lasts.

    Raises:
        SocketForbidden, InstanceBusy, BadConfiguration: why one of them cannot be had; none is left behind then.
    """

    def __init__(self, config: Config, handed_in: Mapping[str, socket.socket]) -> None:
        self._made: list[Path] = []
        self._open = list(handed_in.values())
        try:
            self.control = handed_in.get("control") or self._listen(config.socket, config.socket_mode, config)
            self.status = handed_in.get("status") or self._listen(config.status_socket, config.status_mode, config)
            self.metrics = self._metrics(config, handed_in.get("metrics"))
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
        """One that was handed in stands for the one of its kind that the configuration names."""
        listening = [] if given is None else [given]
        if given is None or given.family != socket.AF_UNIX:
            listening.append(self._listen(self._metrics_path(config), config.metrics.mode, config))
        if config.metrics.listen is not None and (given is None or given.family == socket.AF_UNIX):
            listening += self._listen_by_tcp(config.metrics.listen)
        return listening

    def _metrics_path(self, config: Config) -> Path:
        """Beside the control socket, wherever a service manager has that, unless it was named."""
        control = self.control.getsockname()
        if config.sources["metrics.socket"] == "default" and str(control).startswith("/"):
            return Path(control).with_name(METRICS_NAME)
        return config.metrics.socket

    def _listen(self, path: Path, mode: int, config: Config) -> socket.socket:
        make_folder(path.parent)
        _clear(path)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._open.append(listening)
        before = os.umask(_UMASK)
        try:
            listening.bind(str(path))
        except OSError as error:
            raise SocketForbidden(f"cannot listen at {path}: {error.strerror}; set another socket") from error
        finally:
            os.umask(before)
        self._made.append(path)
        if config.socket_group is not None:
            _give_to_group(path, config.socket_group)
        path.chmod(mode)
        listening.listen(BACKLOG)
        listening.setblocking(False)
        return listening

    def _listen_by_tcp(self, listen: str) -> list[socket.socket]:
        """One socket for each address that the name stands for."""
        host, port = host_and_port(listen)
        made: list[socket.socket] = []
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, _, _, _, address in dict.fromkeys(found):
                made.append(socket.create_server(address, family=family, backlog=BACKLOG))
                self._open.append(made[-1])
                made[-1].setblocking(False)
        except OSError as error:
            raise BadConfiguration(
                f"metrics.listen = {listen!r}: {error.strerror or error}; set another address, or none. Under a "
                "service manager that allows no TCP let it listen in the daemon's place: docs/metrics.md"
            ) from error
        return made


def _clear(path: Path) -> None:
    """Removes a socket that a killed daemon left; one that somebody answers at stays."""
    if not path.is_socket():
        if path.exists():
            raise SocketForbidden(f"{path} exists and is no socket; remove it, or set another socket")
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise InstanceBusy(f"somebody serves {path} already; stop them, or set another --socket")


def _give_to_group(path: Path, group: str) -> None:
    try:
        os.chown(path, -1, grp.getgrnam(group).gr_gid)
    except (KeyError, OSError) as error:
        raise BadConfiguration(f"socket_group = {group!r}: {error}; make the group, or set another") from error
