"""Reads and writes bytes and descriptors on a Unix socket, and buffers output that the socket does not take.

Owns: the two system calls, the identity of the peer, the closing of descriptors, and the output buffer. Does not own
which message a descriptor belongs to (`connection`), nor what a uid may do.

Invariant: descriptors never arrive later than the message that declares them. They travel with the first byte of the
call that sends them, and the kernel ends a read after bytes that came with descriptors.
"""

from __future__ import annotations

import array
import errno
import os
import resource
import socket
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from ...errors import DaemonUnavailable, LimitReached, ProcessLimit, ProtocolError
from .connection import FDS_MAX

READ_BYTES: Final = 32_768
HELD_FDS_MAX: Final = 64
_ITEM_BYTES: Final = array.array("i").itemsize
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(FDS_MAX * _ITEM_BYTES)
_CREDENTIALS: Final = struct.Struct("@iII")
_FLAGS: Final = socket.MSG_CMSG_CLOEXEC


class Chunk(NamedTuple):
    """The result of one read. Empty data means that the peer has closed the connection."""

    data: bytes
    fds: Sequence[int]
    cut: ProtocolError | ProcessLimit | None  # set if descriptors of this read were lost


def read(sock: socket.socket, most_bytes: int = READ_BYTES) -> Chunk:
    """One non-blocking read. Raises OSError, BlockingIOError among them."""
    data, ancillary, flags, _ = sock.recvmsg(most_bytes, _ANCILLARY_BYTES, _FLAGS)
    if not ancillary and not flags & socket.MSG_CTRUNC:
        return Chunk(data, (), None)
    cut: ProtocolError | ProcessLimit | None = None
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % _ITEM_BYTES])
    if flags & socket.MSG_CTRUNC:
        # The kernel drops those that the buffer has no room for, and those that this process may not open.
        cut = (
            no_descriptor()
            if len(fds) < FDS_MAX
            else ProtocolError(f"descriptors were lost: more than {FDS_MAX} came in one call")
        )
    return Chunk(data, fds.tolist(), cut)


def no_descriptor() -> ProcessLimit:
    """The error of this process when it can open no more files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ProcessLimit(
        f"process {os.getpid()} has no file descriptor left: its limit is {limit} (RLIMIT_NOFILE). Close files, or "
        "raise the limit (`ulimit -n`, LimitNOFILE of a service)"
    )


def lacks_descriptor(error: BaseException) -> bool:
    """Whether an error, or its cause, is that this process can open no more files."""
    return any(isinstance(each, OSError) and each.errno == errno.EMFILE for each in (error, error.__cause__))


def unreachable(error: OSError) -> DaemonUnavailable:
    """The error of a client that cannot take what the daemon sends."""
    return no_descriptor() if lacks_descriptor(error) else DaemonUnavailable(str(error))


def write(sock: socket.socket, data: bytes | bytearray | memoryview, fds: Sequence[int]) -> int:
    """One non-blocking write. Returns how many bytes were written. The descriptors are sent with the first byte."""
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
    """The bytes that a socket did not take yet, in order, with duplicates of their descriptors.

    Invariant: holds at most `bytes_max`. Holds the descriptors of a `push` only until the first byte of that push is
    sent.
    """

    __slots__ = ("_pieces", "bytes_max", "held_bytes")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self._pieces: deque[tuple[bytearray, list[int]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def push(self, data: bytes | memoryview, fds: Sequence[int] = ()) -> None:
        """Appends bytes and duplicates of descriptors.

        Raises LimitReached if more than bytes_max, or more than HELD_FDS_MAX descriptors, would wait.
        """
        if self.held_bytes + len(data) > self.bytes_max:
            raise LimitReached(
                f"the peer leaves {self.held_bytes + len(data)} bytes unread; out_bytes_max is "
                f"{self.bytes_max}: the connection is closed"
            )
        if fds or not self._pieces:
            self._pieces.append((bytearray(data), self._copies(fds)))
        else:
            self._pieces[-1][0].extend(data)
        self.held_bytes += len(data)

    def _copies(self, fds: Sequence[int]) -> list[int]:
        """Duplicates of `fds`, so that the caller may close its own descriptors at once."""
        held = sum(len(copies) for _, copies in self._pieces)
        if held + len(fds) > HELD_FDS_MAX:
            raise LimitReached(
                f"{held + len(fds)} descriptors wait for a peer that does not read; at most "
                f"{HELD_FDS_MAX} may: the connection is closed"
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
        """Writes as much as the socket takes. Raises OSError, but never BlockingIOError."""
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
                del data[:sent]  # free the sent bytes now: the peer may never read the rest
                return
            self._pieces.popleft()

    def clear(self) -> None:
        for _, fds in self._pieces:
            close_all(fds)
        self._pieces.clear()
        self.held_bytes = 0


class Peer(NamedTuple):
    """The process that connected, as it was at that time. `pid` is 0 for a process outside our pid namespace."""

    pid: int
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    """The peer of a connected Unix socket. Raises OSError on any other socket."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(found)
    return Peer(pid, uid, gid)
