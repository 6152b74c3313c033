"""The two listening sockets: handed in by a service manager, else made here and removed at the end.

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
from ..ipc.places import make_folder
from .config import Config

BACKLOG: Final = 512
# Nobody may connect before the mode is right.
_UMASK: Final = 0o177


class Sockets:
    """`control` and `status`, non-blocking and listening, for as long as the `with` block lasts."""

    def __init__(self, config: Config, handed_in: Mapping[str, socket.socket]) -> None:
        self._made: list[Path] = []
        self.control = handed_in.get("control") or self._listen(config.socket, config.socket_mode, config)
        self.status = handed_in.get("status") or self._listen(config.status_socket, config.status_mode, config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for listening in (self.control, self.status):
            listening.close()
        for path in self._made:
            path.unlink(missing_ok=True)

    def _listen(self, path: Path, mode: int, config: Config) -> socket.socket:
        make_folder(path.parent)
        _clear(path)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        before = os.umask(_UMASK)
        try:
            listening.bind(str(path))
        except OSError as error:
            listening.close()
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
