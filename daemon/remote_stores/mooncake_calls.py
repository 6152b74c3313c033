"""Calls of Mooncake's client, which runs in a process of its own (`mooncake_worker` says why).

Owns: that process, the calls under way, and the memory that both processes share. Does not own: what is called.

Invariants: a call ends by its deadline. Memory that a call was left with is not lent again before the call has ended.
If the process ends, all calls fail, and the next one starts another process.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, Final, Self

import msgpack

from ...errors import TierTimedOut, TierUnavailable
from .mooncake_worker import MESSAGE_BYTES_MAX, PIECE_BYTES_MIN

KEPT_BYTES_MAX: Final = 256 << 20
"""Shared memory that is kept for later calls."""
_END_S: Final = 5.0


class Lent:
    """Shared memory for one call. Goes back when the `with` block ends, or when a call that was left has ended."""

    def __init__(self, owner: MooncakeCalls, number: int, memory: mmap.mmap, process: object) -> None:
        self.number = number
        self.bytes = memoryview(memory)
        self.process = process
        self.left = False
        self._owner = owner

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.left:
            self._owner.give_back(self)


class _Pending:
    def __init__(self) -> None:
        self.ended = threading.Event()
        self.answer: list[Any] | None = None
        """None after the end: the process has ended."""
        self.lent: Lent | None = None
        """What is given back when the answer comes."""


class _Process:
    """One process with the client, and the thread that receives its answers."""

    def __init__(self, setup: tuple[Any, ...], give_back: Callable[[Lent], None]) -> None:
        self.lock = threading.Lock()
        self.calls: dict[int, _Pending] = {}
        self.ended = False
        self._give_back = give_back
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tensord.daemon.remote_stores.mooncake_worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.send([0, "setup", setup])
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
                lent = call.lent
            if lent is not None:
                self._give_back(lent)
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
        self._setup = ("P2PHANDSHAKE", segment_bytes, PIECE_BYTES_MIN, protocol, device, master)
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._numbers = count(1)
        self._idle: defaultdict[int, list[Lent]] = defaultdict(list)
        self._idle_bytes = 0
        self._closed = False

    def call(
        self, name: str, deadline: float, *arguments: Any, lent: Lent | None = None, size_bytes: int | None = None
    ) -> Any:
        """The result of a call with these arguments, and those of shared memory.

        Raises:
            TierTimedOut: it has not ended by the deadline. `lent` is given back when it has.
            TierUnavailable: it has failed, the process has ended, or the store was closed.
        """
        left_s = self._left_s(deadline)
        process = self._running() if lent is None else lent.process
        assert isinstance(process, _Process)
        shared = () if lent is None else (lent.number,) if size_bytes is None else (lent.number, size_bytes)
        call, number = _Pending(), next(self._numbers)
        with process.lock:
            if process.ended:
                raise self._gone()
            process.calls[number] = call
        try:
            process.send([number, name, [*arguments, *shared]])
        except OSError:
            raise self._gone() from None
        if not call.ended.wait(left_s):
            with process.lock:
                if not call.ended.is_set() and lent is not None:
                    lent.left, call.lent = True, lent
            raise TierTimedOut(
                f"{self._address} has not answered by the deadline of the call: the store or the way to it is slow or "
                "stopped; the call counts as a miss"
            )
        if call.answer is None:
            raise self._gone()
        if len(call.answer) == 3:
            raise TierUnavailable(f"{self._address}: {call.answer[2]}")
        return call.answer[1]

    def lend(self, size_bytes: int) -> Lent:
        """Shared memory of at least this size. What was in it before is undefined."""
        size = 1 << (max(size_bytes, PIECE_BYTES_MIN) - 1).bit_length()
        process = self._running()
        with self._lock:
            while self._idle[size]:
                lent = self._idle[size].pop()
                self._idle_bytes -= size
                if lent.process is process:
                    lent.left = False
                    return lent
        fd = os.memfd_create("tensord-mooncake", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            number = next(self._numbers)
            lent = Lent(self, number, mmap.mmap(fd, size), process)
            process.send([0, "take", [number, size]], (fd,))
        except OSError as error:
            raise TierUnavailable(f"{self._address}: no memory for {size} bytes: {error}") from None
        finally:
            os.close(fd)
        return lent

    def give_back(self, lent: Lent) -> None:
        """The memory may be lent again."""
        size = len(lent.bytes)
        with self._lock:
            if self._idle_bytes + size <= KEPT_BYTES_MAX and lent.process is self._process:
                self._idle_bytes += size
                self._idle[size].append(lent)
                return
        assert isinstance(lent.process, _Process)
        with suppress(OSError):
            lent.process.send([0, "drop", [lent.number]])

    def close(self) -> None:
        """Ends the process. Calls under way fail."""
        with self._lock:
            process, self._process, self._closed = self._process, None, True
            self._idle.clear()
        if process is not None:
            process.close()

    def _running(self) -> _Process:
        with self._lock:
            if self._closed:
                raise TierUnavailable(f"{self._address} was closed")
            if self._process is None or self._process.ended:
                host = self._host or _own_address(self._master)
                self._process = _Process((host, *self._setup), self.give_back)
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
