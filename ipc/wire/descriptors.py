"""Reads and writes bytes and descriptors on a Unix socket. Which message a descriptor belongs to: `connection`.

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
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from ...errors import DaemonUnavailable, ProcessLimit, ProtocolError
from .connection import FDS_MAX, Cut

READ_BYTES: Final = 32_768
_ITEM_BYTES: Final = array.array("i").itemsize
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(FDS_MAX * _ITEM_BYTES)


class Chunk(NamedTuple):
    """The result of one read. Empty data means that the peer has closed the connection."""

    data: bytes
    fds: Sequence[int]
    cut: Cut  # set if descriptors of this read were lost


def read(sock: socket.socket, most_bytes: int = READ_BYTES) -> Chunk:
    """One non-blocking read. Raises OSError, BlockingIOError among them."""
    data, ancillary, flags, _ = sock.recvmsg(most_bytes, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    if not ancillary and not flags & socket.MSG_CTRUNC:
        return Chunk(data, (), None)
    cut: Cut = None
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % _ITEM_BYTES])
    if flags & socket.MSG_CTRUNC:
        # The kernel drops those that the buffer has no room for, and those that this process may not open.
        cut = ProtocolError(f"descriptors were lost: more than {FDS_MAX} came in one call")
        if len(fds) < FDS_MAX:
            cut = no_descriptor()
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
        with suppress(OSError):
            os.close(fd)


class Peer(NamedTuple):
    """The process that connected, as it was at that time. `pid` is 0 for a process outside our pid namespace."""

    pid: int
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    """The peer of a connected Unix socket. Raises OSError on any other socket."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("@iII"))
    return Peer(*struct.unpack("@iII", found))
