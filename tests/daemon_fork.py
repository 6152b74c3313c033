"""Daemons for tests, forked by a process that has imported all that a daemon imports: half a second less for each.

Such a daemon runs the same `__main__` as `python -m tensord.daemon`, with the same words, environment, folder and
descriptors, in a session of its own, and ends like that program. It differs in its parent, in its command line in
/proc, and in how much memory it copies to measure the machine. What only a new interpreter reads, as LD_LIBRARY_PATH,
has to be what it was for the tests.

Owns: that process, which has one thread and ends with the tests. Does not own the daemons.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parent.parent
_ORDER_BYTES_MAX: Final = 1 << 20


class Forked:
    """What a `subprocess.Popen` is for a program. Owns two descriptors until it is known to have ended.

    Args:
        words: those behind `python -m tensord.daemon`.
        log: a descriptor for what it writes.
        constants: what stands for a module's own, by its full name.
        before: `module:function` that is called before the program begins, and its arguments.

    Raises:
        RuntimeError: there is nobody to fork it.
    """

    def __init__(
        self,
        words: Sequence[str],
        environ: Mapping[str, str],
        log: int,
        constants: Mapping[str, float],
        before: tuple[str, Mapping[str, object]] | None = None,
    ) -> None:
        self.returncode: int | None = None
        self._told, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            order = {
                "words": words,
                "environ": dict(environ),
                "folder": os.getcwd(),
                "constants": dict(constants),
                "before": before,
            }
            packed = json.dumps(order).encode()
            assert len(packed) < _ORDER_BYTES_MAX
            socket.send_fds(_server(), [packed], [log, theirs.fileno()])
        pid, pidfds, _, _ = socket.recv_fds(self._told, 64, 1)
        if not pid:
            raise RuntimeError("the process that forks daemons for tests has ended; its standard error says why")
        self.pid = int(pid)
        self.pidfd = pidfds[0]

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self.pidfd], [], [], 0)[0]:
            self.returncode = int(self._told.recv(64))
            self._told.close()
            os.close(self.pidfd)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        if self.returncode is None:
            select.select([self.pidfd], [], [], timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired("a forked daemon", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Nothing happens if it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)


@functools.cache
def _server() -> socket.socket:
    """Starts the process that forks, for the first daemon, and gives its socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.daemon_fork", str(theirs.fileno())],
            cwd=_ROOT,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # a process with threads is none to be forked
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    tests = os.getpid()

    def end() -> None:
        if os.getpid() == tests:  # and not in a process that a test forked
            ours.close()
            server.wait()

    atexit.register(end)
    return ours


# ---- the process that forks


def _serve(orders: socket.socket) -> None:
    """Returns in each daemon that is to be; in the process that forks, when the tests have hung up it ends."""
    running: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: the process, and who hears of its end
    ready = select.poll()
    ready.register(orders, select.POLLIN)
    while True:
        for fd, _ in ready.poll():
            if fd in running:
                ready.unregister(fd)
                pid, asker = running.pop(fd)
                os.close(fd)
                _, status = os.waitpid(pid, 0)
                with asker, contextlib.suppress(OSError):  # who asked may be gone
                    asker.send(b"%d" % os.waitstatus_to_exitcode(status))
                continue
            order, fds, _, _ = socket.recv_fds(orders, _ORDER_BYTES_MAX, 2)
            if not order:
                # Daemons that are left lost whoever ends them: SIGINT has them free their memory.
                for left in running:
                    for number in (signal.SIGCONT, signal.SIGINT):
                        with contextlib.suppress(ProcessLookupError):
                            signal.pidfd_send_signal(left, number)
                raise SystemExit
            log, asker = fds[0], socket.socket(fileno=fds[1])
            pid = os.fork()
            if not pid:
                for _, other in running.values():
                    other.close()
                for pidfd in running:
                    os.close(pidfd)
                asker.close()
                orders.close()
                _become(log, **json.loads(order))
                return
            os.close(log)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid, asker
            ready.register(pidfd, select.POLLIN)
            with contextlib.suppress(OSError):
                socket.send_fds(asker, [b"%d" % pid], [pidfd])


def _become(
    log: int,
    words: list[str],
    environ: dict[str, str],
    folder: str,
    constants: dict[str, float],
    before: tuple[str, dict[str, object]] | None,
) -> None:
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv[1:] = words
    for kind in (DeprecationWarning, PendingDeprecationWarning, UserWarning):
        warnings.simplefilter("error", kind)
    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        getattr(sys.modules[module], constant)  # there is one to stand for
        setattr(sys.modules[module], constant, value)
    if before is not None:
        module, _, function = before[0].partition(":")
        getattr(importlib.import_module(module), function)(**before[1])


if __name__ == "__main__":
    # What a daemon imports at its start, also where it does so late.
    import ctypes.util  # noqa: F401

    import numpy.random  # noqa: F401

    import tensord.daemon.app
    import tensord.daemon.remote_stores.directory  # noqa: F401

    gc.collect()
    gc.freeze()  # no daemon looks at these objects for cycles, which would copy their pages
    _serve(socket.socket(fileno=int(sys.argv[1])))
    # Here and not in a function's frame: it ends as a program ends.
    runpy.run_module("tensord.daemon", run_name="__main__", alter_sys=True)
