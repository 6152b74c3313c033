"""The listening sockets. A service manager passes them in; the others are created here and removed at the end.

    control, status    one Unix socket each
    metrics            a Unix socket, and also TCP if the configuration or a service manager says so
    page               none, a Unix socket, or TCP on the loopback interface, as the configuration says

Owns: which sockets there are, and the files of Unix sockets, with their modes, groups and folders, which are looked at
while the daemon serves. Does not own the acceptance of connections (`listener`). A bound socket keeps its inode, so
device and inode tell whether a file is this socket's.

Invariants: no process can connect to a socket before its mode is set. A file that is not this socket's is never removed
while the daemon serves. At a start the socket of a killed daemon is removed, and one on which a process listens is not.
"""

from __future__ import annotations

import asyncio
import errno
import grp
import os
import socket
import stat
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, Self

from ...errors import BadConfiguration, InstanceBusy, SocketForbidden, TensordError
from ...ipc.places import METRICS_NAME, make_folder
from ...ipc.wire.descriptors import peer_of
from ..config.config import Config
from ..config.settings import host_and_port
from ..process.logs import logger
from .listener import Listening

LOOK_EVERY_S: Final = 2.0
"""How often the daemon looks whether its sockets' files are there."""
BACKLOG: Final = 512
_FOLDER_MODE: Final = 0o700
_log = logger("tensord")
_WITHOUT_TCP: Final = {
    "metrics.listen": "let it listen for the daemon: docs/metrics.md",
    "http": "set the path of a Unix socket: docs/page.md",
}


class Sockets:
    """`control`, `status`, `metrics` and `page`, non-blocking and listening, for as long as the `with` block lasts.
    Raises SocketForbidden, InstanceBusy or BadConfiguration if one cannot be created. None is left behind then."""

    def __init__(self, config: Config, activated: Mapping[str, socket.socket]) -> None:
        self._open: list[tuple[Listening, SocketFile | None]] = []
        try:
            modes = {"control": config.socket_mode, "status": config.status_mode, "metrics": config.status_mode}
            given = {name: self._given(each, modes.get(name), config) for name, each in activated.items()}
            self.control = given.get("control") or self._listen(config.socket, config.socket_mode, config)
            self.status = given.get("status") or self._listen(config.status_socket, config.status_mode, config)
            self.metrics = self._metrics(config, given.get("metrics"))
            self.page = self._page(config)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for listening, file in self._open:
            if file is not None:
                file.end()
            listening.socket.close()

    @property
    def problems(self) -> list[str]:
        """Which sockets no new client can reach, each with the reason and what to do."""
        return [file.problem for _, file in self._open if file is not None and file.problem]

    async def keep(self) -> None:
        """Looks at the files of the sockets again and again, and makes those anew that somebody has removed."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for listening, file in self._open:
                if file is not None and (made := file.look()) is not None:
                    listening.replace(made)

    def _given(self, given: socket.socket, mode: int | None, config: Config) -> Listening:
        """A socket that the service manager has passed. `mode`: of its file, if there is none to go by; None if the
        daemon does not use the socket."""
        file = None if mode is None else SocketFile.given(given, mode, config.socket_group)
        made = None if file is None else file.look()
        if made is not None:
            given.close()
        return self._opened(made or given, file)

    def _opened(self, listening: socket.socket, file: SocketFile | None = None) -> Listening:
        opened = Listening(listening)
        self._open.append((opened, file))
        return opened

    def _metrics(self, config: Config, given: Listening | None) -> list[Listening]:
        """The sockets for metrics. A socket from the service manager replaces the configured one of the same kind."""
        listening = [] if given is None else [given]
        if given is None or given.socket.family != socket.AF_UNIX:
            # Beside the control socket, also if a service manager has created that.
            control = self.control.address
            beside = Path(control) if control.startswith("/") else config.status_socket
            listening.append(self._listen(beside.with_name(METRICS_NAME), config.status_mode, config))
        if config.metrics.listen is not None and (given is None or given.socket.family == socket.AF_UNIX):
            listening += self._listen_by_tcp("metrics.listen", config.metrics.listen)
        return listening

    def _page(self, config: Config) -> list[Listening]:
        if config.page_socket is not None:
            return [self._listen(config.page_socket, config.status_mode, config)]
        return [] if config.http is None else self._listen_by_tcp("http", config.http)

    def _listen(self, path: Path, mode: int, config: Config) -> Listening:
        file, made = SocketFile.made(path, mode, config.socket_group)
        return self._opened(made, file)

    def _listen_by_tcp(self, key: str, listen: str) -> list[Listening]:
        """One socket for each address of the host name. `key`: the setting that `listen` is the value of."""
        host, port = host_and_port(listen)
        made: list[Listening] = []
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, _, _, _, address in dict.fromkeys(found):
                made.append(self._opened(socket.create_server(address, family=family, backlog=BACKLOG)))
                made[-1].socket.setblocking(False)
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


class SocketFile:
    """The socket at `path`. `problem`: why no new client reaches it, and what to do; empty while its file is there."""

    def __init__(self, path: Path, mode: int, group: str | int | None) -> None:
        self.path = path
        self.problem = ""
        self._mode = mode
        self._group = group
        self._own: tuple[int, int] | None = None
        self._made_here = False
        self._folder: tuple[int, int] | None = None

    @classmethod
    def made(cls, path: Path, mode: int, group: str | None) -> tuple[Self, socket.socket]:
        """A new file with its socket, at a start. Raises SocketForbidden, InstanceBusy or BadConfiguration if it cannot
        be created. No file is left behind then."""
        file = cls(path, mode, group)
        try:
            make_folder(path.parent)
            _clear(path)
            return file, file._listening()
        except OSError as error:
            raise SocketForbidden(f"cannot listen at {path}: {error.strerror}; set another socket") from error

    @classmethod
    def given(cls, listening: socket.socket, mode: int, group: str | None) -> Self | None:
        """The file of a socket that a service manager has passed; None if the socket has none. A service manager does
        not make the file again once it is gone, so the next `look` does: with `mode` and `group`, or with those of the
        file that a killed daemon has made in its place."""
        name = listening.getsockname()
        if not isinstance(name, str) or not name.startswith("/"):
            return None
        file = cls(Path(name), mode, group)
        with suppress(OSError):
            found = os.lstat(name)
            if stat.S_ISSOCK(found.st_mode):
                file._mode, file._group = stat.S_IMODE(found.st_mode), found.st_gid
                if _answers(file.path, listening):
                    file._keep(found)
                else:
                    with suppress(InstanceBusy):
                        _clear(file.path)
        return file

    def look(self) -> socket.socket | None:
        """Sets `problem`, and logs its change. If the file is gone and the path is free, makes both anew, and returns
        the new socket."""
        before, made = self.problem, None
        try:
            there = os.lstat(self.path)
            mine = (there.st_dev, there.st_ino) == self._own
            self.problem = "" if mine else self._taken(there)
        except (FileNotFoundError, NotADirectoryError):
            made = self._made_anew()
        except OSError as error:
            self.problem = f"the socket {self.path} cannot be looked at: {error.strerror}"
        at = str(self.path)
        if made is not None:
            _log.warning("the file of a socket was removed; made anew, with no effect on attached clients", at=at)
        elif self.problem and self.problem != before:
            _log.error("a socket cannot be reached by new clients", why=self.problem)
        elif before and not self.problem:
            _log.info("a socket can be reached again", at=at)
        return made

    def end(self) -> None:
        """Removes the file, if this process has made it."""
        with suppress(OSError):
            there = os.lstat(self.path)
            if self._made_here and (there.st_dev, there.st_ino) == self._own:
                self.path.unlink(missing_ok=True)

    def _made_anew(self) -> socket.socket | None:
        self.problem = ""
        try:
            self._make_folder_anew()
            return self._listening()
        except (OSError, TensordError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            self.problem = (
                f"the file of the socket {self.path} was removed and cannot be made anew: {why}. New clients do not "
                "reach the daemon, attached ones go on. Let the daemon write to the folder, or restart the daemon"
            )
        return None

    def _make_folder_anew(self) -> None:
        """Makes the folder as it was. Its own folder is only made if it is a default one."""
        folder = self.path.parent
        if self._folder is not None:
            mode, gid = self._folder
            with suppress(FileExistsError, FileNotFoundError):
                folder.mkdir(_FOLDER_MODE)
                if folder.stat().st_gid != gid:
                    os.chown(folder, -1, gid)
                folder.chmod(mode)
        make_folder(folder)

    def _listening(self) -> socket.socket:
        """A new socket with its file. No file is left behind by an error."""
        with ExitStack() as undoing:
            listening = undoing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
            listening.bind(str(self.path))
            undoing.callback(self.path.unlink, missing_ok=True)
            if self._group is not None:
                _give_to_group(self.path, self._group)
            self.path.chmod(self._mode)
            # Until here every connect is refused, whatever mode the umask has left.
            listening.listen(BACKLOG)
            listening.setblocking(False)
            self._keep(os.lstat(self.path))
            self._made_here = True
            undoing.pop_all()
        return listening

    def _keep(self, own: os.stat_result) -> None:
        self._own = own.st_dev, own.st_ino
        folder = self.path.parent.stat()
        self._folder = stat.S_IMODE(folder.st_mode), folder.st_gid

    def _taken(self, there: os.stat_result) -> str:
        kind = "another socket" if stat.S_ISSOCK(there.st_mode) else "something that is no socket"
        return (
            f"at {self.path}, the daemon's socket, stands {kind}, of uid {there.st_uid}. It is left alone, and new "
            "clients do not reach the daemon. Stop what made it, and remove it: the daemon then makes its own anew"
        )


def _answers(path: Path, listening: socket.socket) -> bool:
    """Whether the process that made `listening` listens at `path`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True  # A backlog is full.
        except OSError:
            return False
        return peer_of(probe) == peer_of(listening)


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


def _give_to_group(path: Path, group: str | int) -> None:
    try:
        gid = group if isinstance(group, int) else grp.getgrnam(group).gr_gid
        if os.lstat(path).st_gid != gid:
            os.chown(path, -1, gid)
    except (KeyError, OSError) as error:
        why = "there is no such group" if isinstance(error, KeyError) else error
        raise BadConfiguration(f"socket_group = {group!r}: {why}; create the group, or set another one") from error
