"""A private daemon and processes with a pipe, for the examples.

Owns: the start and the end of both. Does not own: what the processes do.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import tensord

PATIENCE_S: Final = 60.0


@contextmanager
def own_daemon(folder: Path, name: str, *, under: Sequence[str] = (), **settings: Any) -> Iterator[Path]:
    """A daemon with a private name and private sockets in `folder`; yields its control socket.

    Args:
        name: a part of the name of its shared memory.
        under: the command that the daemon is run under, such as ("ip", "netns", "exec", "NAME").
        settings: settings of the daemon, as its flags name them, with `_` for `-`.

    Raises:
        SystemExit: the daemon does not serve; it has printed why.
    """
    socket = folder / "control.sock"
    given = {"config": os.devnull, "instance": f"demo-{name}-{os.getpid()}", "socket": socket, "log_level": "warning"}
    flags = [
        word for key, value in {**given, **settings}.items() for word in (f"--{key}".replace("_", "-"), str(value))
    ]
    ours = {key: value for key, value in os.environ.items() if not key.startswith("TENSORD_")}
    process = subprocess.Popen([*under, sys.executable, "-m", "tensord.daemon", *flags], env=ours)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not _serves(socket):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the daemon does not serve; its messages are above")
        yield socket
    finally:
        process.send_signal(signal.SIGINT)  # SIGTERM would keep its memory for the next daemon
        process.wait(PATIENCE_S)


def _serves(socket: Path) -> bool:
    if not socket.exists():  # a client would log that there is no daemon
        time.sleep(0.02)
        return False
    with tensord.Client(socket) as client:
        return client.wait_connected(0.1)


class OwnProcess:
    """A process that runs `act(name, *given, orders)`, seen from the demonstration. It ends at the order None.

    Attributes:
        answers: the connection on which the process answers, for `multiprocessing.connection.wait`.
    """

    def __init__(self, name: str, act: Callable[..., None], *given: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.name = name
        self.answers: Connection
        self.answers, theirs = spawn.Pipe()
        self._process = spawn.Process(target=act, args=(name, *given, theirs), daemon=True)
        self._process.start()
        theirs.close()  # so that the pipe ends when the process ends

    def tell(self, order: object) -> None:
        """Sends an order."""
        self.answers.send(order)

    def hear(self, patience_s: float = PATIENCE_S) -> Any:
        """The next answer. Raises RuntimeError if none comes in time, or the process has ended."""
        if not self.answers.poll(patience_s):
            raise RuntimeError(f"{self.name} did not answer within {patience_s:g} s")
        try:
            return self.answers.recv()
        except EOFError:
            self._process.join(PATIENCE_S)
            raise RuntimeError(f"{self.name} ended with exit code {self._process.exitcode}") from None

    def end(self) -> None:
        """Lets the process end, and waits for it."""
        with suppress(BrokenPipeError):
            self.answers.send(None)
        self._process.join(PATIENCE_S)
