"""A store's server as a process of its own, for tests."""

from __future__ import annotations

import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.daemon_process import PATIENCE_S, until


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

    def pause(self) -> None:
        """SIGSTOP, and waits until it has stopped."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self._process.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] in "Tt", "the server to stop")

    def resume(self) -> None:
        assert self._process is not None
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
