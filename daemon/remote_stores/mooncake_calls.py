"""Calls of Mooncake's client, which runs in a process of its own (`mooncake_worker` says why).

Owns: that process, and the calls under way. Does not own: what is called.

Invariants: a call ends by its deadline. If the process ends, all calls fail, and the next one starts another process.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, Final, Self

import msgpack

from ...errors import TierUnavailable
from .mooncake_worker import BUFFER_BYTES, MESSAGE_BYTES_MAX
from .store import timed_out

_END_S: Final = 5.0


class SharedMemory:
    """Memory of one call, which both processes have. A call that was left may still read and write it."""

    def __init__(self, size_bytes: int) -> None:
        self.fd = os.memfd_create("tensord-mooncake", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size_bytes)
            self.bytes = memoryview(mmap.mmap(self.fd, size_bytes))
        except OSError as error:
            os.close(self.fd)
            raise TierUnavailable(f"no memory for a call of Mooncake with {size_bytes} bytes: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


class _Pending:
    def __init__(self) -> None:
        self.ended = threading.Event()
        self.answer: list[Any] | None = None
        """None after the end: the process has ended."""


class _Process:
    """One process with the client, and the thread that receives its answers."""

    def __init__(self, setup: tuple[Any, ...]) -> None:
        self.lock = threading.Lock()
        self.calls: dict[int, _Pending] = {}
        self.ended = False
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tensord.daemon.remote_stores.mooncake_worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.send([0, "setup", setup, 0])
        self._receiver = threading.Thread(target=self._receive, name="tensord-mooncake", daemon=True)
        self._receiver.start()

    def send(self, message: list[Any], fds: tuple[int, ...] = ()) -> None:
        """Raises OSError if the process has ended."""
        socket.send_fds(self._channel, [msgpack.packb(message)], fds)

    def close(self) -> None:
        """Ends the process, and the calls under way."""
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._receiver.join(_END_S)
        if self._receiver.is_alive():
            self._process.kill()
            self._receiver.join()

    def _receive(self) -> None:
        while True:
            try:
                packed = self._channel.recv(MESSAGE_BYTES_MAX)
            except OSError:
                packed = b""
            if not packed:
                break
            answer = msgpack.unpackb(packed)
            with self.lock:
                call = self.calls.pop(answer[0])
                call.answer = answer
                call.ended.set()
        with self.lock:
            self.ended = True
            for call in self.calls.values():
                call.ended.set()
            self.calls.clear()
        self._channel.close()
        self._process.wait()


class MooncakeCalls:
    """The calls of one store. `left_s` gives the seconds until a deadline, or raises TierTimedOut."""

    def __init__(
        self,
        address: str,
        left_s: Callable[[float], float],
        master: str,
        segment_bytes: int,
        host: str,
        protocol: str,
        device: str,
    ) -> None:
        self._address = address
        self._left_s = left_s
        self._master = master
        self._host = host
        self._setup = ("P2PHANDSHAKE", segment_bytes, BUFFER_BYTES, protocol, device, master)
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._numbers = count(1)
        self._closed = False

    def call(self, name: str, deadline: float, *arguments: Any, memory: SharedMemory | None = None) -> Any:
        """The result of a call with these arguments, which reads or writes `memory`.

        Raises:
            TierTimedOut: it has not ended by the deadline.
            TierUnavailable: it has failed, the process has ended, or the store was closed.
        """
        left_s = self._left_s(deadline)
        process, call, number = self._running(), _Pending(), next(self._numbers)
        with process.lock:
            if process.ended:
                raise self._gone()
            process.calls[number] = call
        message = [number, name, arguments, 0 if memory is None else len(memory.bytes)]
        try:
            process.send(message, () if memory is None else (memory.fd,))
        except OSError:
            raise self._gone() from None
        if not call.ended.wait(left_s):
            raise timed_out(self._address)
        if call.answer is None:
            raise self._gone()
        if len(call.answer) == 3:
            raise TierUnavailable(f"{self._address}: {call.answer[2]}")
        return call.answer[1]

    def close(self) -> None:
        """Ends the process. Calls under way fail."""
        with self._lock:
            process, self._process, self._closed = self._process, None, True
        if process is not None:
            process.close()

    def _running(self) -> _Process:
        with self._lock:
            if self._closed:
                raise TierUnavailable(f"{self._address} was closed")
            if self._process is None or self._process.ended:
                host = self._host or _own_address(self._master)
                self._process = _Process((host, *self._setup))
            return self._process

    def _gone(self) -> TierUnavailable:
        return TierUnavailable(f"{self._address} was closed, or the process with Mooncake's client has ended")


def _own_address(master: str) -> str:
    """This host's address on the way to the master."""
    host, _, port = master.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise TierUnavailable(f"mooncake://{master} cannot be reached from here: {error}") from None
