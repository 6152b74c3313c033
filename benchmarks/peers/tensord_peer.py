"""tensord: a private daemon, a client that writes, and a client that reads.

Owns: how every benchmark starts a daemon, waits until it serves, and stops it.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

import tensord
from tensord.client.ctl.daemon import Daemon as StatusOf
from tensord.ipc.messages.control import WhyQuery

from . import PUT_OPS, READ_OPS, Array, BasePeer, BaseReader, BaseWriter, consume

RING_BYTES = 3 << 30
"""The values that are read, 256 MiB, are less than an eighth of the ring, so that the puts in between evict none."""
START_S = 60.0
UNIT = Path(__file__).parents[2] / "systemd" / "tensord.service"
WAIT_S = 30.0


class Daemon:
    """A daemon with its own instance name. Its sockets are in `folder`."""

    def __init__(self, folder: Path, ring_bytes: int, *flags: str) -> None:
        self.socket = folder / "control.sock"
        # The daemon ignores the user's settings: a figure shows the defaults and these flags.
        ours = {name: value for name, value in os.environ.items() if not name.startswith("TENSORD_")}
        instance = f"bench-{os.getpid()}-{os.urandom(3).hex()}"
        named = ["--config", os.devnull, "--instance", instance, "--socket", str(self.socket)]
        sized = ["--ring-bytes", str(ring_bytes), "--log-level", "warning"]
        self._process = subprocess.Popen([sys.executable, "-m", "tensord.daemon", *named, *sized, *flags], env=ours)

    def wait_serving(self, ring_bytes: int = 0) -> None:
        """Returns when the daemon answers and `ring_bytes` of its ring are ready. Raises RuntimeError."""
        deadline = time.monotonic() + START_S
        logging.getLogger("tensord").setLevel(logging.ERROR)  # it is known that there is no daemon yet
        with tensord.Client(self.socket) as client:
            while not (client.wait_connected(0.1) and client.status()["ring_ready_bytes"] >= ring_bytes):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"tensord did not serve; exit code {self._process.returncode}")
                time.sleep(0.02)

    def as_service(self) -> None:
        """Gives the daemon the priority that the service's unit gives it, if this user may."""
        nice = int(UNIT.read_text().partition("\nNice=")[2].partition("\n")[0])
        with suppress(PermissionError):
            for thread in os.listdir(f"/proc/{self._process.pid}/task"):
                os.setpriority(os.PRIO_PROCESS, int(thread), nice)

    def stop(self) -> None:
        """Stops the daemon, which removes its memory."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait()


@contextmanager
def serving(ring_bytes: int, *flags: str, folder: Path | None = None) -> Iterator[Daemon]:
    """A daemon that serves until the block ends, with its whole ring ready.

    Its sockets are in `folder`, or in a temporary folder. Raises RuntimeError if it does not serve.
    """
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensord-bench-")))
        daemon = Daemon(folder, ring_bytes, *flags)
        stack.callback(daemon.stop)
        daemon.wait_serving(ring_bytes)
        yield daemon


class Peer(BasePeer):
    ops = (*READ_OPS, *PUT_OPS, "put_many")
    evicts_by_itself = True
    warm_bytes = RING_BYTES

    def start(self) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(serving(RING_BYTES, folder=self.folder))

    def stop(self) -> None:
        self._stack.close()


def _client(folder: Path, name: str) -> tensord.Client:
    return tensord.Client(folder / "control.sock", name=name, timeout_s=WAIT_S, required=True)


class Writer(BaseWriter):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._client = _client(folder, "bench-writer")
        self._sent: list[tensord.Put] = []

    def put(self, key: bytes, value: Array) -> None:
        self._sent.append(self._client.put(key, value))

    def put_many(self, pairs: Sequence[tuple[bytes, Array]]) -> None:
        for put in self._client.put_many(pairs, wait=True):
            _check(put)

    def put_visible(self, key: bytes, value: Array) -> None:
        _check(self._client.put(key, value, wait=True))

    def flush(self) -> None:
        for put in self._sent:
            _check(put.wait(WAIT_S))
        self._sent.clear()

    def close(self) -> None:
        self._client.close()


def _check(put: tensord.Put) -> None:
    if put.state not in ("stored", "existed"):
        raise RuntimeError(f"a put was {put.state}: {put.error}")


class Reader(BaseReader):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._client = _client(folder, "bench-reader")
        self._status = StatusOf(folder / "control.sock")

    def get(self, key: bytes) -> None:
        _ = self._client.get(key).tree  # type: ignore[union-attr] # a miss fails the run

    def get_consume(self, key: bytes) -> int:
        lease = self._client.get(key)
        if lease is None:
            raise RuntimeError(f"a stored key was missed: {self._status.ask(WhyQuery, key)}")
        return consume(lease.tree)

    def batch(self, keys: Sequence[bytes]) -> Any:
        return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)

    def get_many(self, batch: Any) -> None:
        self._client.get_many(batch)

    def get_many_views(self, batch: Any) -> None:
        [lease.tree for lease in self._client.get_many(batch)]  # type: ignore[union-attr]

    def close(self) -> None:
        self._client.close()
