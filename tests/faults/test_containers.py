"""A client in a container: its own pids, its own IPC, its own /dev/shm, with nothing but the socket's folder shared."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from ..daemon_process import MIB, PATIENCE_S, Daemon
from .payloads import key

UNSHARE = ["unshare", "--pid", "--ipc", "--mount", "--fork", "--kill-child"]
INSIDE = 'mount -t tmpfs tmpfs /dev/shm && mount -t proc proc /proc && exec "$@"'
pytestmark = pytest.mark.root


def _may_unshare() -> bool:
    try:
        return not subprocess.run([*UNSHARE, "sh", "-c", INSIDE, "sh", "true"], capture_output=True).returncode
    except OSError:
        return False


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    if not _may_unshare():
        pytest.skip("no namespaces for this user here")


class Container:
    """A client in namespaces of its own, told what to do line by line."""

    def __init__(self, socket: Path) -> None:
        script = Path(__file__).with_name("in_container.py")
        command = [*UNSHARE, "sh", "-c", INSIDE, "sh", sys.executable, str(script), str(socket)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, *order: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE_S)
        assert ready, f"no answer to {order}"
        return json.loads(self._process.stdout.readline())

    def kill(self) -> None:
        """SIGKILL, to it and to all in it."""
        self._process.kill()
        self._process.wait(PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def small() -> Iterator[Daemon]:
    with Daemon(ring_bytes=4 * MIB, policy="lru") as running:
        yield running.start()


def test_a_client_in_a_container_shares_entries_with_one_outside(small: Daemon) -> None:
    outside = small.client()
    assert outside.put(key(1), np.arange(5), wait=True).state == "stored"
    with Container(small.socket) as container:
        assert container.ask("look around") == {"pid": 1, "shm": [], "connected": True}
        assert container.ask("get", key(1).hex()) == [0, 1, 2, 3, 4]
        assert container.ask("put", key(2).hex(), [7, 8]) == "stored"
        assert container.ask("computed", key(2).hex(), [0]) == [7, 8]
        lease = outside.get(key(2))
        assert lease is not None and lease.tree.tolist() == [7, 8]
        assert sorted(row["pid"] == 1 for row in small.client_rows()) == [False, True]
