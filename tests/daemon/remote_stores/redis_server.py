"""A real redis-server on a port of the loopback and in a folder of its own, for tests.

With the path of a valkey-server in TENSORD_TEST_SERVER, that is started instead: `make test-remote` runs the tests of
Redis a second time with it.

Owns: the processes and folders, which are gone when their `with` blocks end.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path

from tests.ports import HOST as HOST
from tests.ports import Port

from .server_process import ServerProcess

PROGRAM = os.environ.get("TENSORD_TEST_SERVER", "redis-server")


class RedisServer(ServerProcess):
    """A server with the command line's `words` besides the ones that every server here has."""

    def __init__(self, *words: str, tls: Path | None = None) -> None:
        """`tls`: the folder with ca.pem, server.pem and server.key. The server then speaks TLS only."""
        program = shutil.which(PROGRAM)
        assert program is not None, f"{PROGRAM} is missing: apt-get install redis-server"
        folder = Path(tempfile.mkdtemp(prefix="tensord-redis-"))
        self._port = Port()
        self.port = self._port.number
        port = ["--port", str(self.port)]
        if tls is not None:
            port = ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            port += ["--tls-ca-cert-file", str(tls / "ca.pem")]
            port += ["--tls-cert-file", str(tls / "server.pem"), "--tls-key-file", str(tls / "server.key")]
        command = [program, *port, "--bind", HOST, "--dir", str(folder), "--save", "", "--appendonly", "no"]
        super().__init__(folder, [*command, *words])

    @property
    def url(self) -> str:
        """As `remote.url` names it."""
        return f"valkey://{HOST}:{self.port}"

    def serves(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((HOST, self.port)) == 0

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._port.free()
        shutil.rmtree(self.folder, ignore_errors=True)
