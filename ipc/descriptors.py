"""Bytes and descriptors through a Unix socket, and what becomes of descriptors that nobody takes.

Owns: the two system calls, and closing. Does not own which message a descriptor belongs to.

A descriptor travels with the first byte of the call that sends it. The kernel ends a read after
bytes that came with descriptors, so they never arrive later than the message that declares them.
"""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from ..errors import LimitReached, ProtocolError
from .connection import FDS_MAX

READ_BYTES: Final = 32_768
HELD_FDS_MAX: Final = 64
_ITEM_BYTES: Final = array.array("i").itemsize
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(FDS_MAX * _ITEM_BYTES)
_FLAGS: Final = socket.MSG_CMSG_CLOEXEC


class Chunk(NamedTuple):
    """What one read returned; no data means that the peer is gone."""

    data: bytes
    fds: Sequence[int]
    cut: ProtocolError | None  # descriptors were lost on the way


def read(sock: socket.socket, most_bytes: int = READ_BYTES) -> Chunk:
    """One non-blocking read. Raises OSError, BlockingIOError among them."""
    data, ancillary, flags, _ = sock.recvmsg(most_bytes, _ANCILLARY_BYTES, _FLAGS)
    if not ancillary and not flags & socket.MSG_CTRUNC:
        return Chunk(data, (), None)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % _ITEM_BYTES])
    cut = None
    if flags & socket.MSG_CTRUNC:
        cut = ProtocolError(
            f"descriptors were lost: more than {FDS_MAX} in one call, or this process has as many "
            "open as RLIMIT_NOFILE allows"
        )
    return Chunk(data, fds.tolist(), cut)


def write(sock: socket.socket, data: bytes | bytearray | memoryview, fds: Sequence[int]) -> int:
    """One non-blocking write; how many bytes went. The descriptors go if any byte does."""
    if not fds:
        return sock.send(data, socket.MSG_NOSIGNAL)
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
    return sock.sendmsg([data], [rights], socket.MSG_NOSIGNAL)


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            pass


class OutBuffer:
    """What a socket would not take yet, in order, with duplicates of the descriptors that go along.

    Invariant: holds at most `bytes_max`, and descriptors only until the first byte of their piece
    has gone.
    """

    __slots__ = ("_pieces", "bytes_max", "held_bytes")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self._pieces: deque[tuple[bytearray, list[int]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def push(self, data: bytes | memoryview, fds: Sequence[int] = ()) -> None:
        """Raises LimitReached when the peer has left more than bytes_max unread."""
        if self.held_bytes + len(data) > self.bytes_max:
            raise LimitReached(
                f"the peer leaves {self.held_bytes + len(data)} bytes unread; out_bytes_max is "
                f"{self.bytes_max}: it is dropped"
            )
        if fds or not self._pieces:
            self._pieces.append((bytearray(data), self._copies(fds)))
        else:
            self._pieces[-1][0].extend(data)
        self.held_bytes += len(data)

    def _copies(self, fds: Sequence[int]) -> list[int]:
        """The caller may close its own as soon as it has given them."""
        held = sum(len(copies) for _, copies in self._pieces)
        if held + len(fds) > HELD_FDS_MAX:
            raise LimitReached(
                f"{held + len(fds)} descriptors wait for a peer that does not read; at most "
                f"{HELD_FDS_MAX} may: it is dropped"
            )
        copies: list[int] = []
        try:
            for fd in fds:
                copies.append(os.dup(fd))  # noqa: PERF401 - those made so far are closed below
        except OSError:
            close_all(copies)
            raise
        return copies

    def flush(self, sock: socket.socket) -> None:
        """Sends what the socket takes. Raises OSError, but BlockingIOError never."""
        while self._pieces:
            data, fds = self._pieces[0]
            try:
                sent = write(sock, data, fds)
            except BlockingIOError:
                return
            self.held_bytes -= sent
            close_all(fds)
            fds.clear()
            if sent < len(data):
                del data[:sent]  # what has gone must not be kept: the peer may be slow for ever
                return
            self._pieces.popleft()

    def clear(self) -> None:
        for _, fds in self._pieces:
            close_all(fds)
        self._pieces.clear()
        self.held_bytes = 0
