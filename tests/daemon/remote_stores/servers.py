"""The servers of remote stores as processes of their own, for tests. They are gone when their `with` blocks end.

A real redis-server is on a port of the loopback and in a folder of its own. With the path of a valkey-server in
TENSORD_TEST_SERVER, that is started instead: `make test-remote` runs the tests of Redis a second time with it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from tests.daemon_process import PATIENCE_S, until
from tests.ports import HOST as HOST
from tests.ports import Port

PROGRAM = os.environ.get("TENSORD_TEST_SERVER", "redis-server")


class ServerProcess(ABC):
    """Runs `command` in a `with`, as often as it is started. Its log is in `folder`."""

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self.folder = folder
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def serves(self) -> bool: ...

    def start(self) -> Self:
        """Starts it, and returns when it serves."""
        with (self.folder / "log").open("ab") as log:
            self._process = process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

        def serves() -> bool:
            assert process.poll() is None, f"{self._command[0]} has ended:\n{self.log}"
            return self.serves()

        until(serves, f"{self._command[0]} to serve")
        return self

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops it, and lets it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            stat = Path(f"/proc/{self._process.pid}/stat")
            until(lambda: stat.read_text().rpartition(")")[2].split()[0] in "Tt", "the server to stop")
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and waits for its end."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(PATIENCE_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


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


def mooncake_master() -> Path | None:
    """The master's program; None if Mooncake is not installed."""
    spec = find_spec("mooncake")
    if spec is None or spec.origin is None:
        return None
    found = Path(spec.origin).parent / "mooncake_master"
    return found if found.exists() else None


class MooncakeMaster(ServerProcess):
    """A Mooncake master at `address`, run under `prefix`. It and its clients listen on all addresses of this process's
    network namespace."""

    def __init__(self, folder: Path, *, address: str = "127.0.0.1", port: int = 50051, prefix: list[str] | None = None):
        self.address = f"{address}:{port}"
        about = [f"-rpc_address={address}", f"-rpc_port={port}", f"-metrics_port={port + 1}"]
        # It says in its log that it serves, whatever it is told of logs.
        command = ["env", "-u", "GLOG_minloglevel", str(mooncake_master()), *about, "-enable_metric_reporting=false"]
        super().__init__(folder, [*(prefix or []), *command])
        self._starts = 0

    def start(self) -> Self:
        self._starts += 1
        return super().start()

    def serves(self) -> bool:
        return self.log.count("Task cleanup thread started") == self._starts
