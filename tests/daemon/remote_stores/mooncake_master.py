"""A Mooncake master for tests, in the network namespace of this process: it and its clients listen on all addresses."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Self

PATIENCE_S: Final = 30.0


def program() -> Path | None:
    """The master's program; None if Mooncake is not installed."""
    spec = find_spec("mooncake")
    if spec is None or spec.origin is None:
        return None
    found = Path(spec.origin).parent / "mooncake_master"
    return found if found.exists() else None


class MooncakeMaster:
    """A master at `address`.

    Args:
        prefix: what it is run under.
    """

    def __init__(self, folder: Path, *, address: str = "127.0.0.1", port: int = 50051, prefix: list[str] | None = None):
        self.address = f"{address}:{port}"
        self._log = folder / "master.log"
        self._words = [
            *(prefix or []),
            str(program()),
            f"-rpc_address={address}",
            f"-rpc_port={port}",
            f"-metrics_port={port + 1}",
            "-enable_metric_reporting=false",
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Starts it, and returns when it serves."""
        before = self._served()
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if name != "GLOG_minloglevel"},
            )
        deadline = time.monotonic() + PATIENCE_S
        while self._served() == before:
            assert self._process.poll() is None and time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.02)
        return self

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and waits for its end."""
        if self._process is not None and self._process.poll() is None:
            self._signal(signal.SIGKILL)
            self._process.wait(PATIENCE_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def _served(self) -> int:
        return self._log.read_text(errors="replace").count("Task cleanup thread started") if self._log.exists() else 0
