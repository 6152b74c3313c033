"""A real daemon for tests: a process of its own, watched from outside, its memory removed at the end.

It is forked by the server that children are forked from, which has imported all that a daemon imports: half a second
less for each. It runs the `__main__` of `python -m tensord.daemon`, in a session of its own, but ends as a child ends.

Owns: the process, a folder with its sockets and its log, the segments of its instance. Does not own clients that it did
not make. Nothing here sleeps for a fixed time: READY comes through the daemon's own NOTIFY_SOCKET, everything else is
polled for until a deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import tensord
from tensord.ipc.messages import control as messages
from tensord.ipc.wire.blocking import BlockingChannel
from tensord.ipc.wire.connection import Connection

ROOT: Final = Path(__file__).parent.parent
SHM_FOLDER: Final = Path("/dev/shm")
MIB: Final = 1 << 20
RING_BYTES: Final = 16 * MIB
# How long anything may take before a test gives up on it. No measurement: a loaded machine is slow.
PATIENCE_S: Final = 30.0
# Who holds what is counted twenty times as often as it would be: for tests that wait for it.
COUNTING_OFTEN: Final = {"tensord.daemon.actors.lanes.HOLDERS_EVERY_S": 0.05}

Found = TypeVar("Found")
_PR_SET_PDEATHSIG: Final = 1
_numbers = count(1)
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    [
        "tests.at_fork",  # first: its hook has to stand before the library's
        "numpy.random",
        "pytest",
        "ctypes.util",
        "tensord.client.core.client",
        "tensord.client.core.async_client",
        "tensord.daemon.app",
        "tensord.daemon.remote_stores.directory",
        "tests.crossings.party",
    ]
)


def some(found: Found | None) -> Found:
    """What is there, as a type checker sees it too."""
    assert found is not None
    return found


def until(condition: Callable[[], Found], what: str, patience_s: float = PATIENCE_S) -> Found:
    """Looks again and again until `condition()` is true, and gives its value.

    Raises:
        AssertionError: it is not, after `patience_s`.
    """
    deadline = time.monotonic() + patience_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"timed out after {patience_s} s: {what}; last seen {found!r}"
        time.sleep(0.005)


def forked(act: Callable[..., object], *args: Any) -> ForkServerProcess:
    """Starts `act(*args)` in a process of its own, forked by a server that has no threads."""
    process = _forks.Process(target=act, args=args, daemon=True)
    # Children import the test's module by its name, which begins at the root.
    sys.path.insert(0, str(ROOT))
    try:
        process.start()
    finally:
        sys.path.remove(str(ROOT))
    return process


class Forked:
    """A forked daemon, as a `subprocess.Popen` is one that was run as a program."""

    def __init__(self, *order: Any) -> None:
        self._process = forked(_become, *order)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired("a forked daemon", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _become(
    words: list[str],
    environ: Mapping[str, str],
    log: Path,
    constants: Mapping[str, float],
    before: tuple[str, Mapping[str, object]] | None,
) -> None:
    """Runs a daemon in this process."""
    os.setsid()
    # The server ends with the tests, and with whoever else has this descriptor. A daemon that they have left frees its
    # memory then.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    with log.open("ab") as opened:
        os.dup2(opened.fileno(), 1)
        os.dup2(opened.fileno(), 2)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = ["tensord", *words]
    for kind in (DeprecationWarning, PendingDeprecationWarning, UserWarning):
        warnings.simplefilter("error", kind)
    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        getattr(sys.modules[module], constant)  # there is one to stand for
        setattr(sys.modules[module], constant, value)
    if before is not None:
        module, _, function = before[0].partition(":")
        getattr(importlib.import_module(module), function)(**before[1])
    runpy.run_module("tensord.daemon", run_name="__main__", alter_sys=True)


class Daemon:
    """What `python -m tensord.daemon` is, in a folder and under an instance name of its own. Use it in a `with`.

    Args:
        constants: what stands for a module's own, by its full name.
        flags: settings, as `ring_bytes="64MiB"` or `limits_claim_s=0.5`; True and False for switches.
    """

    def __init__(self, constants: Mapping[str, float] | None = None, /, **flags: object) -> None:
        self.instance = f"test-{os.getpid()}-{next(_numbers)}"
        # Not pytest's own folder: a socket's path has 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="tensord-"))
        self.socket = self.folder / "control.sock"
        self.status_socket = self.folder / "status.sock"
        self.flags: dict[str, object] = {
            "ring_bytes": RING_BYTES,
            "max_entries": 4096,
            "memory_prefault": False,
            **flags,
        }
        self.prefix: list[str] = []
        """What the daemon is run under, as ["unshare", "--mount"]: then it is a program of its own, and not forked."""
        self.constants: Mapping[str, float] = constants or {}
        self.before: tuple[str, Mapping[str, object]] | None = None
        """`module:function` that the process calls before it becomes a daemon, and its arguments."""
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._clients: list[tensord.Client] = []

    # ---- life

    def start(self, patience_s: float = PATIENCE_S) -> Self:
        """Starts it, and returns when it says READY.

        Raises:
            AssertionError: it ended before; the message has its log.
        """
        assert self.try_start(patience_s), f"it ended before it was READY:\n{self.log}"
        return self

    def try_start(self, patience_s: float = PATIENCE_S) -> bool:
        """`start`, but False if it ended before it was READY."""
        with self._notify_socket() as told:
            process = self.spawn()
            deadline = time.monotonic() + patience_s
            while True:
                if select.select([told], [], [], 0.02)[0]:
                    if b"READY=1" in told.recv(4096).splitlines():
                        return True
                elif process.poll() is not None:
                    return False
                assert time.monotonic() < deadline, f"not READY after {patience_s} s:\n{self.log}"

    def spawn(self) -> subprocess.Popen[bytes] | Forked:
        """Starts it without waiting for anything."""
        assert self._process is None or self._process.poll() is not None, "it runs already"
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TENSORD_")}
        environ["NOTIFY_SOCKET"] = str(self.folder / "notify.sock")
        if not self.prefix:
            self._process = Forked(self.words, environ, self.folder / "log", dict(self.constants), self.before)
            return self._process
        assert not self.constants and self.before is None, "a program has its own"
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, start_new_session=True
            )
        return self._process

    def refused(self, patience_s: float = PATIENCE_S) -> str:
        """Starts a daemon that is expected not to serve, and gives what it says about it."""
        status = self.spawn().wait(patience_s)
        assert status not in (0, None), f"it served:\n{self.log}"
        return self.log

    def terminate(self) -> int:
        """SIGTERM: the memory stays. Returns the exit status."""
        return self._end(signal.SIGTERM)

    def interrupt(self) -> int:
        """SIGINT: the memory goes."""
        return self._end(signal.SIGINT)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def restart(self) -> Self:
        """SIGTERM, then a new daemon of the same instance."""
        self.terminate()
        return self.start()

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()
        if self._process is not None and self._process.poll() is None:
            self.kill()
        for segment in self.segments():
            with contextlib.suppress(FileNotFoundError):
                segment.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- what can be seen of it

    @property
    def command(self) -> list[str]:
        return [*self.prefix, sys.executable, "-m", "tensord.daemon", *self.words]

    @property
    def words(self) -> list[str]:
        given = {"instance": self.instance, "socket": self.socket, "status_socket": self.status_socket, **self.flags}
        words = []
        for name, value in given.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words += [f"--{flag}", str(value)]
        return words

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was never started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def segments(self) -> list[Path]:
        return sorted(SHM_FOLDER.glob(f"tensord.{self.instance}.*"))

    def segment(self, part: str) -> Path:
        """One of them: "ring", "index", "lock" …"""
        return SHM_FOLDER / f"tensord.{self.instance}.{part}"

    def lanes(self) -> list[Path]:
        return sorted(SHM_FOLDER.glob(f"tensord.{self.instance}.lane.*"))

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def memory_bytes(self) -> int:
        """What it holds in memory of its own: shared memory is not counted."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:"))

    # ---- talking to it

    def client(self, **options: Any) -> tensord.Client:
        """A client that is attached, and closed at the end. Its calls wait as long as anything in a test."""
        client = tensord.Client(self.socket, **{"timeout_s": PATIENCE_S, **options})
        self._clients.append(client)
        assert client.wait_connected(PATIENCE_S), f"no connection to the daemon:\n{self.log}"
        return client

    def attached(self, *clients: tensord.Client) -> None:
        """Waits until these clients are attached to the daemon that runs now. A client may hear late that the daemon
        before has ended, and is connected to nobody until then."""
        epoch = self.status()["epoch"]
        for client in clients:
            link = client.link
            until(lambda link=link: link.connected and link.epoch == epoch, "the client to attach again")  # type: ignore[misc]

    def ask(self, make: Callable[[int], messages.Message]) -> dict[str, Any]:
        """One question on the status socket."""
        channel = BlockingChannel.connect(self.status_socket, PATIENCE_S, Connection.status_client())
        try:
            channel.send(make(1), timeout_s=PATIENCE_S)
            answer, _ = channel.receive(PATIENCE_S)
        finally:
            channel.close()
        if isinstance(answer, messages.Error):
            raise answer.to_error()
        body: dict[str, Any] = answer.body
        return body

    def status(self) -> dict[str, Any]:
        return self.ask(messages.StatusQuery)

    def store(self, name: str) -> Any:
        return self.status()["store"][name]

    def client_rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.ask(messages.ClientsQuery)["clients"]
        return rows

    def until(self, condition: Callable[[dict[str, Any]], Found], what: str) -> Found:
        return until(lambda: condition(self.status()), what)

    # ---- inside

    def _notify_socket(self) -> socket.socket:
        path = self.folder / "notify.sock"
        path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listening.bind(str(path))
        return listening

    def _end(self, number: signal.Signals) -> int:
        process = self._process
        assert process is not None, "it was never started"
        if process.poll() is None:
            process.send_signal(number)
            if number != signal.SIGKILL:
                process.send_signal(signal.SIGCONT)
        return process.wait(PATIENCE_S)
