"""A real daemon under attack, and a witness client whose entries must stay intact."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from ..daemon_process import PATIENCE_S, Daemon, until

DESCRIPTORS_MORE_MAX: Final = 24
MEMORY_MORE_BYTES_MAX: Final = 192 << 20
ENTRIES: Final = 6


def key(number: int) -> bytes:
    return b"witness-" + number.to_bytes(1, "little") * 20 + bytes(4)


def payload(number: int) -> Any:
    """The value of entry `number`: uint64 of shape (2000 + number,)."""
    return np.arange(2000 + number, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(number)


class Besieged:
    """Starts the daemon and the witness client at the beginning of a `with` block, and stops the daemon at its end."""

    lanes_kept = 0
    """Number of lanes, besides the witness client's, that other processes still hold."""
    may_be_corrupt = False
    """Whether clients of the daemon's uid put entries of their own with any checksum."""

    def __init__(self, hello_s_max: float = 1.0, **flags: object) -> None:
        self.daemon = Daemon({"tensord.daemon.connections.session.HELLO_S_MAX": hello_s_max}, policy="lru", **flags)

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
        for number in range(ENTRIES):
            put = self.client.put(key(number), payload(number), wait=True, timeout_s=PATIENCE_S)
            assert put.state in ("stored", "existed"), f"the witness client cannot put entries any more: {put}"

    def end(self, *, at_once: bool) -> None:
        """Ends the daemon, by SIGKILL or SIGTERM, and waits until the witness client has noticed it."""
        self.daemon.kill() if at_once else self.daemon.terminate()
        # Until then it takes the ended connection for one to the next daemon.
        until(lambda: not self.client.connected, "the witness client to notice the daemon's end")

    def check(self) -> None:
        """Asserts that the daemon runs, that its log has no traceback, and that every read returns the stored value.

        Raises:
            AssertionError: one of these conditions is violated.
        """
        assert self.daemon.running, f"the daemon has ended:\n{self.log[-4000:]}"
        assert "Traceback" not in self.log, f"a traceback in the daemon's log:\n{self.log[-4000:]}"
        assert self.client.wait_connected(PATIENCE_S), "the witness client has lost its connection"
        for number, lease in enumerate(self.leases):
            assert lease is not None
            assert np.array_equal(lease.tree, payload(number)), f"a lease on entry {number} has changed"
            found = self.client.get(key(number), verify=True)
            assert found is None or np.array_equal(found.tree, payload(number)), f"entry {number} has a wrong value"
        # A client of the daemon's uid may give a wrong checksum: its own entry is corrupt then.
        corrupt = [line for line in self.log.splitlines() if "the checksum of an entry is wrong" in line]
        mine = tuple(f"key={key(number).hex()}" for number in range(ENTRIES))
        assert not any(name in line for line in corrupt for name in mine), corrupt
        found = self.client.status()["store"]["found_corrupt"]
        assert not found or self.may_be_corrupt, f"found_corrupt is {found}"

    def settle(self) -> None:
        """Asserts that the daemon has released the clients, descriptors and memory of closed connections."""
        self.daemon.until(lambda status: status["clients"] <= 1, "the hostile connections to be closed")
        self.daemon.until(lambda status: status["lanes"] <= 1 + self.lanes_kept, "their lanes to be removed")
        self.store()
        self.check()
        descriptors = self.daemon.descriptors() - self._descriptors
        assert descriptors <= DESCRIPTORS_MORE_MAX, f"{descriptors} descriptors more than at the start"
        memory_bytes = self.daemon.memory_bytes() - self._memory_bytes
        assert memory_bytes <= MEMORY_MORE_BYTES_MAX, f"{memory_bytes} bytes of memory more than at the start"

    def tell(self, path: Path, said: Sequence[tuple[bytes, Sequence[int]]], chance: random.Random) -> None:
        """Plays one connection: sends the messages, then reads the answers until the daemon closes the connection.

        An empty message stands for a wait for one answer. One connection in five closes without reading to the end.

        Raises:
            AssertionError: the daemon neither answers nor closes the connection.
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
