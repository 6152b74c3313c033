"""Child processes for tests: a function of the test's own module, run in its own process, talked to through a pipe.

    def reader(stage: Stage, socket: Path) -> None:        # at the top of the test's module
        lease = tensord.Client(socket).get(KEY)
        stage.tell("holding")
        stage.hear()

    with Child(reader, daemon.socket) as child:
        assert child.hear() == "holding"
        child.kill()

Owns: the children, all of which have ended when their `with` blocks have. They are forked as daemons are
(daemon_process.py), so starting one is quick, and inherits nothing from the tests.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

from .daemon_process import PATIENCE_S, ROOT, forked, until


def python(*words: str, timeout_s: float = PATIENCE_S, **options: Any) -> subprocess.CompletedProcess[str]:
    """What an interpreter of its own says, given these words; it runs in the root of the checkout."""
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False, **options)


def child_says(act: Callable[[], object]) -> int:
    """The exit status of a child, forked from this process, in which `act()` runs: 0 where it is true. A child that
    waits for ever ends by SIGALRM."""
    forked = os.fork()
    if not forked:
        status = 9
        try:
            signal.alarm(int(PATIENCE_S))
            status = 0 if act() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])


class Stage:
    """The child's end of the pipe. Once the test has hung up, `hear` ends the child."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def tell(self, what: object) -> None:
        self._pipe.send(("told", what))

    def fail(self) -> None:
        """Says that the exception which is handled now has ended it: for a process that the child has forked."""
        self._pipe.send(("failed", traceback.format_exc()))

    def hear(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            os._exit(0)


class Child:
    """Runs `act(stage, *args)` in a process of its own; what it returns is the last thing it tells."""

    def __init__(self, act: Callable[..., Any], *args: Any) -> None:
        self._pipe, theirs = Pipe()
        self._process = forked(_perform, act, theirs, args, list(warnings.filters))
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def tell(self, what: object = None) -> None:
        self._pipe.send(what)

    def hear(self, patience_s: float = PATIENCE_S) -> Any:
        """The next thing the child says.

        Raises:
            AssertionError: it said nothing in time, or ended, or failed; the message has its trace.
        """
        assert self._pipe.poll(patience_s), f"the child {self.pid} said nothing for {patience_s} s"
        try:
            kind, what = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise AssertionError(f"the child ended without a word, with status {self.wait()}") from None
        assert kind == "told", f"the child failed:\n{what}"
        return what

    def silent(self) -> bool:
        return not self._pipe.poll(0)

    def kill(self) -> None:
        self._process.kill()
        self.wait()

    def pause(self) -> None:
        """SIGSTOP, and waits until it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        until(lambda: _state(self.pid) in "Tt", f"process {self.pid} to stop")

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def wait(self, patience_s: float = PATIENCE_S) -> int | None:
        """Its exit status; negative for a signal."""
        wait([self._process.sentinel], patience_s)
        self._process.join(0)
        return self._process.exitcode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        if self.running:
            self._process.kill()
            self.wait()


def _perform(act: Callable[..., Any], pipe: Connection, args: tuple[Any, ...], filters: list[Any]) -> None:
    # A warning is here what it is in the test.
    warnings.resetwarnings()
    warnings.filters[:] = filters  # type: ignore[index]  # typeshed has a Sequence
    # Away from pytest's process group: its ^C is not for us.
    with suppress(OSError):
        os.setpgid(0, 0)
    try:
        pipe.send(("told", act(Stage(pipe), *args)))
    except BaseException:
        with suppress(OSError):
            pipe.send(("failed", traceback.format_exc()))


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
