"""A real daemon under attack, and the other client, whose entries nothing may happen to."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from ..daemon_process import PATIENCE_S, Daemon

DESCRIPTORS_MORE_MAX: Final = 24
MEMORY_MORE_BYTES_MAX: Final = 192 << 20
ENTRIES: Final = 6


def key(number: int) -> bytes:
    """A key of the other client's."""
    return b"witness-" + number.to_bytes(1, "little") * 20 + bytes(4)


def payload(number: int) -> Any:
    """f(key): (2,000 and some,) uint64."""
    return np.arange(2000 + number, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(number)


class Besieged:
    """Use it in a `with`."""

    lanes_kept = 0
    """Lanes besides the other client's that somebody still holds."""

    def __init__(self, **flags: object) -> None:
        self.daemon = Daemon(**{"limits_hello_s_max": 1.0, "policy": "lru", **flags})

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.daemon)
            self.daemon.start()
            self.client = self.daemon.client()
            self.store()
            self.leases = [self.client.get(key(number)) for number in range(ENTRIES)]
            self._descriptors = self.daemon.descriptors()
            self._memory_bytes = self.daemon.memory_bytes()
            stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.daemon.__exit__(*error)

    @property
    def log(self) -> str:
        return self.daemon.log

    def store(self) -> None:
        """Stores all entries that are not there."""
        for number in range(ENTRIES):
            put = self.client.put(key(number), payload(number), wait=True, timeout_s=PATIENCE_S)
            assert put.state in ("stored", "existed"), f"the other client cannot put any more: {put}"

    def check(self) -> None:
        """Asserts that the daemon serves, that nothing wrong is read, and that it complained without a traceback.

        Raises:
            AssertionError: what does not hold.
        """
        assert self.daemon.running, f"the daemon has ended:\n{self.log[-4000:]}"
        assert "Traceback" not in self.log, f"a traceback in the daemon's log:\n{self.log[-4000:]}"
        assert self.client.wait_connected(PATIENCE_S), "the other client has lost its connection"
        for number, lease in enumerate(self.leases):
            assert lease is not None
            assert np.array_equal(lease.tree, payload(number)), f"a lease on entry {number} has changed"
            found = self.client.get(key(number), verify=True)
            assert found is None or np.array_equal(found.tree, payload(number)), f"entry {number} is not what was put"
        status = self.client.status()
        for figure in ("evicted_while_pinned", "found_corrupt"):
            assert status["store"][figure] == 0, f"{figure} is {status['store'][figure]}"

    def settle(self) -> None:
        """Asserts that nothing is left of those who have hung up: clients, descriptors, memory."""
        self.daemon.until(lambda status: status["clients"] <= 1, "the hostile connections are gone")
        self.daemon.until(lambda status: status["lanes"] <= 1 + self.lanes_kept, "their lanes are gone")
        self.store()
        self.check()
        descriptors = self.daemon.descriptors() - self._descriptors
        assert descriptors <= DESCRIPTORS_MORE_MAX, f"{descriptors} descriptors more than at the beginning"
        memory_bytes = self.daemon.memory_bytes() - self._memory_bytes
        assert memory_bytes <= MEMORY_MORE_BYTES_MAX, f"{memory_bytes} bytes more than at the beginning"

    def tell(self, path: Path, said: Sequence[tuple[bytes, Sequence[int]]], chance: random.Random) -> None:
        """One connection: says all of it, waits for an answer where nothing is to be said, and in the end reads what is
        answered, until the daemon hangs up or nothing more comes.

        Raises:
            AssertionError: the daemon neither answers nor hangs up.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(PATIENCE_S)
            sock.connect(str(path))
            try:
                for data, fds in said:
                    if not data:
                        self._heard(sock)
                    elif fds:
                        socket.send_fds(sock, [data], list(fds))
                    else:
                        sock.sendall(data)
                if chance.random() < 0.2:
                    return
                sock.shutdown(socket.SHUT_WR)
                while self._heard(sock):
                    pass
            except (BrokenPipeError, ConnectionResetError):
                pass
            except TimeoutError:
                raise AssertionError(f"the daemon has not hung up after {PATIENCE_S} s:\n{self.log[-2000:]}") from None

    def _heard(self, sock: socket.socket) -> bool:
        data, fds, _, _ = socket.recv_fds(sock, 65_536, 64)
        for fd in fds:
            os.close(fd)
        return bool(data)
