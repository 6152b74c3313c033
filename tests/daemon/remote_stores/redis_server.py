"""A real redis-server on a port of the loopback and in a folder of its own, for tests.

With the path of a valkey-server in TENSORD_TEST_SERVER, that is started instead: `make test-remote` runs the tests of
Redis a second time with it.

Owns: the processes and folders, which are gone when their `with` blocks end.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Self

from tests.daemon_process import PATIENCE_S, until
from tests.ports import HOST as HOST
from tests.ports import Port

PROGRAM = os.environ.get("TENSORD_TEST_SERVER", "redis-server")


class RedisServer:
    """A server with the command line's `words` besides the ones that every server here has."""

    def __init__(self, *words: str, tls: Path | None = None) -> None:
        """`tls`: the folder with ca.pem, server.pem and server.key. The server then speaks TLS only."""
        self.folder = Path(tempfile.mkdtemp(prefix="tensord-redis-"))
        self._port = Port()
        self.port = self._port.number
        self._words = words
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        program = shutil.which(PROGRAM)
        assert program is not None, f"{PROGRAM} is missing: apt-get install redis-server"
        port = ["--port", str(self.port)]
        if self._tls is not None:
            port = ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            port += ["--tls-ca-cert-file", str(self._tls / "ca.pem")]
            port += ["--tls-cert-file", str(self._tls / "server.pem"), "--tls-key-file", str(self._tls / "server.key")]
        command = [program, *port, "--bind", HOST, "--dir", str(self.folder), "--save", "", "--appendonly", "no"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self._words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        until(self._listens, f"{PROGRAM} to listen")
        return self

    @property
    def url(self) -> str:
        """As `remote.url` names it."""
        return f"valkey://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def pause(self) -> None:
        """SIGSTOP, and waits until it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] in "Tt", f"{PROGRAM} to stop")

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and waits for its end."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(PATIENCE_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._port.free()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _listens(self) -> bool:
        assert self._process is not None and self._process.poll() is None, f"{PROGRAM} has ended:\n{self.log}"
        with socket.socket() as probe:
            return probe.connect_ex((HOST, self.port)) == 0
