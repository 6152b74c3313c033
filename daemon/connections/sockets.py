"""The listening sockets. A service manager passes them in; the others are created here and removed at the end.

    control, status    one Unix socket each
    metrics            a Unix socket, and also TCP if the configuration or a service manager says so
    page               none, a Unix socket, or TCP on the loopback interface, as the configuration says

Owns: which sockets there are, and when their files are looked at. Does not own the files (`socket_files`), nor the
acceptance of connections (`listener`).
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from ...errors import BadConfiguration, InstanceBusy
from ...ipc.places import METRICS_NAME
from ..config.config import Config
from ..config.settings import host_and_port
from .listener import Listening
from .socket_files import BACKLOG, SocketFile

LOOK_EVERY_S: Final = 2.0
"""How often the daemon looks whether its sockets' files are there."""
_WITHOUT_TCP: Final = {
    "metrics.listen": "let it listen for the daemon: docs/metrics.md",
    "http": "set the path of a Unix socket: docs/page.md",
}


class Sockets:
    """`control`, `status`, `metrics` and `page`, non-blocking and listening, for as long as the `with` block lasts.
    Raises SocketForbidden, InstanceBusy or BadConfiguration if one cannot be created. None is left behind then."""

    def __init__(self, config: Config, activated: Mapping[str, socket.socket]) -> None:
        self._open: list[Listening] = []
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
        for each in self._open:
            if each.file is not None:
                each.file.end()
            each.socket.close()

    @property
    def problems(self) -> list[str]:
        """Which sockets no new client can reach, each with the reason and what to do."""
        return [each.file.problem for each in self._open if each.file is not None and each.file.problem]

    async def keep(self) -> None:
        """Looks at the files of the sockets again and again, and makes those anew that somebody has removed."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for each in self._open:
                if each.file is not None and (made := each.file.look()) is not None:
                    each.replace(made)

    def _given(self, given: socket.socket, mode: int | None, config: Config) -> Listening:
        """A socket that the service manager has passed. `mode`: of its file, if there is none to go by; None if the
        daemon does not use the socket."""
        file = None if mode is None else SocketFile.given(given, mode, config.socket_group)
        made = None if file is None else file.look()
        if made is not None:
            given.close()
        return self._opened(made or given, file)

    def _opened(self, listening: socket.socket, file: SocketFile | None = None) -> Listening:
        self._open.append(Listening(listening, file))
        return self._open[-1]

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
