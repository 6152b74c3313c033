"""Loans: leases that one process keeps until another process has read their payloads, and references to them.

    frontend:  loan = lender.lend(lease); send(lease.handle(), loan)
    engine:    fetch(loan)                   # a copy of the span, over a socket, if the ring itself cannot be read
               done([loan, …])               # the lender ends the loan

Owns: the lender's abstract Unix socket, and its thread. Does not own: how long leases are kept (book.py), nor how a
handle is read (client/reading/ring_reader.py).

A loan is 16 bytes: the socket's random name, and a number. A connection is for one message, and its answer. The lender
answers only processes of its own user.

Invariants: no call raises because the other process is gone. `fetch` waits at most FETCH_S seconds; `done` and `lend`
do not wait.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from errno import EINVAL
from functools import partial
from itertools import groupby
from mmap import MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap
from typing import Any, Final, NamedTuple

import numpy as np

from ....errors import ProcessLimit
from ...reading.lease import Lease
from ...threads import forks
from ...threads.aside import begin
from .book import LeaseBook

Array = np.ndarray[Any, Any]

LOAN_BYTES: Final = 16
FETCH_S: Final = 10.0
_NAME_BYTES: Final = 8
_NUMBER: Final = struct.Struct("<Q")
_CREDENTIALS: Final = struct.Struct("3i")
_DONE: Final = b"d"
_FETCH: Final = b"f"
_HERE: Final = b"+"
_MESSAGE_BYTES: Final = 1 << 16
_NUMBERS_MAX: Final = 1024
_BACKLOG: Final = 1024
_SWEEP_S: Final = 5.0
_SEND_S: Final = 1.0
_AGAIN_S: Final = 0.01


class Reference(NamedTuple):
    """A sender sends it in place of a tree. As msgpack: `msgpack.packb(reference)`, then `Reference(*unpacked)`.

    With `handle` and `loan` a receiver finds exactly the entry that the sender keeps for it.

    Example:
        >>> reference = tensord.Reference(key)
        >>> tensord.Reference(*tuple(reference)) == reference       # as msgpack and other codecs send it
        True
    """

    key: bytes
    handle: bytes = b""
    loan: bytes = b""


class Lender:
    """Lends leases to other processes. Thread-safe. The child of a fork starts with no loans.

    Args:
        book: keeps the leases. While the lender runs, it ends what is over there.
    """

    def __init__(self, book: LeaseBook) -> None:
        self._book = book
        self._closed = False
        self._reset()
        forks.follow(self)

    def _reset(self) -> None:
        self._start_lock = threading.Lock()
        self._name = b""
        self._ends: weakref.finalize[Any, Lender] | None = None

    def lend(self, lease: Lease) -> bytes | None:
        """Keeps `lease` until the loan is done. Returns the loan, LOAN_BYTES bytes; None if there is no room, or no
        socket or thread to serve it."""
        number = self._book.lend(lease) if self.start() else None
        return None if number is None else self._name + _NUMBER.pack(number)

    def made(self, loan: bytes) -> bool:
        """Whether a loan is one of this lender's, done or not."""
        return len(loan) == LOAN_BYTES and bool(self._name) and loan.startswith(self._name)

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._closed = True
        if self._ends is not None:
            self._ends()

    def after_fork_in_child(self) -> None:
        """The thread and the leases belong to the parent. For the library."""
        detached = self._ends.detach() if self._ends is not None else None
        if detached is not None:
            # Closed, not shut down: a shutdown would end the parent's socket too.
            detached[2][0].close()
        self._reset()
        self._book.clear_in_child()

    def start(self) -> bool:
        """Starts the thread, if it does not run yet. False if the lender is closed, or there is no socket or thread."""
        with self._start_lock:
            if self._ends is not None or self._closed:
                return not self._closed
            name = os.urandom(_NAME_BYTES)
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                listening.bind(_address(name))
                listening.listen(_BACKLOG)
                # The thread refers to the book, not to the lender, so the lender can be collected.
                serve = partial(_serve, listening, self._book)
                begin(threading.Thread(target=serve, name="tensord-loans", daemon=True))
            except (OSError, ProcessLimit):
                listening.close()
                return False
            self._name = name
            self._ends = weakref.finalize(self, _end, listening)
            return True


def fetch(loan: bytes) -> Array | None:
    """A private copy of a loan's span, its header first, as uint8 of shape (n,). None if the lender is gone, does not
    answer in time, or has ended the loan."""
    try:
        with _connected(loan[:_NAME_BYTES]) as connection:
            connection.settimeout(FETCH_S)
            connection.send(_FETCH + loan[_NAME_BYTES:])
            _, fds, *_ = socket.recv_fds(connection, 1, 1)
    except OSError:
        return None
    return _mapped(fds[0]) if fds else None


def done(loans: Iterable[bytes]) -> None:
    """Tells the lenders that these loans were read. An empty one is none. What a lender that is gone or stopped does
    not take, ends by its time limit."""
    for name, of_lender in groupby(sorted(filter(None, loans)), lambda loan: loan[:_NAME_BYTES]):
        numbers = [loan[_NAME_BYTES:] for loan in of_lender]
        with suppress(OSError):
            for start in range(0, len(numbers), _NUMBERS_MAX):
                with _connected(name) as connection:
                    connection.send(_DONE + b"".join(numbers[start : start + _NUMBERS_MAX]))


def _connected(name: bytes) -> socket.socket:
    """A new connection to a lender. Raises OSError if there is none that takes it."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # Non-blocking: a lender with a full backlog counts as one that does not answer.
        made.setblocking(False)
        made.connect(_address(name))
        if not _is_ours(made):
            raise PermissionError("a lender of another user")
    except OSError:
        made.close()
        raise
    return made


def _address(name: bytes) -> bytes:
    return b"\0tensord-loans-" + name.hex().encode()


def _is_ours(connection: socket.socket) -> bool:
    """Whether the peer runs under the same user."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(packed)[1] == os.geteuid())


def _end(listening: socket.socket) -> None:
    """Wakes the thread, which then ends and closes the descriptor."""
    with suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)


def _mapped(fd: int) -> Array | None:
    """The memory behind a descriptor, mapped privately. Closes the descriptor."""
    try:
        return np.frombuffer(mmap(fd, 0, MAP_PRIVATE, PROT_READ | PROT_WRITE), np.uint8)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


def _serve(listening: socket.socket, book: LeaseBook) -> None:
    """Answers borrowers until the lender closes."""
    # The socket blocks: after the shutdown, an accept with a time limit would say that nobody is there.
    ready = select.poll()
    ready.register(listening, select.POLLIN)
    with listening:
        while True:
            if ready.poll(_SWEEP_S * 1000):
                try:
                    connection, _ = listening.accept()
                    with connection, suppress(OSError):
                        if _is_ours(connection):
                            connection.settimeout(_SEND_S)
                            _answer(connection, book)
                except OSError as error:
                    if error.errno == EINVAL:
                        # The lender was closed.
                        return
                    # No descriptor is free, or the peer has gone already.
                    time.sleep(_AGAIN_S)
            book.end_old()


def _answer(connection: socket.socket, book: LeaseBook) -> None:
    """Handles the message of a connection."""
    message = connection.recv(_MESSAGE_BYTES)
    if len(message) % _NUMBER.size != 1:
        return
    numbers = [number for (number,) in _NUMBER.iter_unpack(message[1:])]
    if message[:1] == _DONE:
        book.done(numbers)
    elif message[:1] == _FETCH and len(numbers) == 1:
        lease = book.loans.get(numbers[0])
        fd = _copied(lease) if lease is not None else -1
        if fd >= 0:
            try:
                socket.send_fds(connection, [_HERE], [fd])
            finally:
                os.close(fd)


def _copied(lease: Lease) -> int:
    """A descriptor of a memfd with a copy of a lease's span; -1 if the lease has no span, or there is no memory."""
    span = lease.span()
    if span is None:
        return -1
    fd = os.memfd_create("tensord-loan", os.MFD_CLOEXEC)
    try:
        left = span.data
        while left:
            left = left[os.write(fd, left) :]
    except OSError:
        os.close(fd)
        return -1
    return fd
