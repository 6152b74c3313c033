"""Loans: leases that one process keeps until another process has read their payloads, and references to them.

    frontend:  loan = loans.lend(lease); send(lease.handle(), loan)
    engine:    fetch(loan)                   # a copy of the span, over a socket, if the ring itself cannot be read
               done([loan, …])               # the sender ends the loan

Owns: how many leases of how many bytes a sender keeps, and for how long; the sender's abstract Unix socket, and its
thread. Does not own: where leases come from, nor how a handle is read (client/reading/lease.py).

A lease is *promised* to the thread that asked for the entry, until that thread releases it. It is *lent* once a
reference to it was sent, until a receiver has read it. A loan is 16 bytes: the socket's random name, and a number. A
connection is for one message, and its answer. A sender answers only processes of its own user.

Invariants
- At most `entries_max` leases with `bytes_max` bytes of payloads are promised, and as many are lent. A promise ends
  after `seconds`. A loan ends once it is done, or after UNREAD_S_MAX; within `seconds` nothing else ends it, and after
  that it makes room for a new one. The sender's thread ends what is over.
- No call raises because the other process is gone. `fetch` waits at most FETCH_S seconds; `done` and `lend` do not
  wait.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from errno import EINVAL
from functools import partial
from itertools import count, groupby
from mmap import MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap
from typing import Any, Final, NamedTuple

import numpy as np

from ....errors import ProcessLimit
from ...arguments.checks import check_count, check_seconds
from ...reading.lease import Lease
from ...threads import forks
from ...threads.aside import begin

Array = np.ndarray[Any, Any]
Kept = dict[Any, tuple[Lease, float]]
"""Leases by a name, and since when each is kept, by time.monotonic. The oldest comes first."""

LOAN_BYTES: Final = 16
FETCH_S: Final = 10.0
UNREAD_S_MAX: Final = 600.0
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


# ---- the sender


class Loans:
    """The leases that one sender keeps, and its lender. Thread-safe. The child of a fork begins without any.

    Args:
        entries_max: limit of leases.
        bytes_max: limit of their payloads' bytes, tree headers and padding included.
        seconds: how long a lease is promised, and how long new loans cannot replace a loan.

    Raises:
        UsageError: a limit is out of its range.
    """

    def __init__(self, entries_max: int, bytes_max: int, seconds: float) -> None:
        self.entries_max = check_count("entries_max", entries_max, sys.maxsize, 1)
        self.bytes_max = check_count("bytes_max", bytes_max, sys.maxsize, 1)
        self.seconds = check_seconds("seconds", seconds, above_0=True)
        self._numbers = count(1)
        self._closed = False
        self._reset()
        forks.follow(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._name = b""
        self._ends: weakref.finalize[Any, Loans] | None = None
        self._promised: Kept = {}
        """By thread and key."""
        self._lent: Kept = {}
        """By number."""

    def promise(self, key: bytes, lease: Lease) -> bool:
        """Keeps `lease` for the calling thread, in place of an earlier one under `key`. False if it is not kept:
        promised leases leave no room, it could not be lent, or the lease is a copy, which keeps no entry from
        eviction."""
        name = threading.get_ident(), key
        if not self._serves():
            return False
        with self._lock:
            if lease.handle() is None:
                return name in self._promised
            self._promised.pop(name, None)
            return self._add(self._promised, name, lease)

    def promised(self, key: bytes) -> Lease | None:
        """The lease that is promised to the calling thread under `key`, or None."""
        return self._promised.get((threading.get_ident(), key), (None, 0.0))[0]

    @property
    def promised_bytes(self) -> int:
        with self._lock:
            return _bytes(self._promised)

    @property
    def lent_bytes(self) -> int:
        with self._lock:
            return _bytes(self._lent)

    def release(self, keys: Iterable[bytes] | None = None) -> None:
        """Ends the promises of these keys to the calling thread; by default all."""
        ident = threading.get_ident()
        with self._lock:
            if keys is None:
                keys = [key for of, key in self._promised if of == ident]
            for key in keys:
                self._promised.pop((ident, key), None)

    def forget(self) -> None:
        """Ends all promises. Loans stay."""
        with self._lock:
            self._promised = {}

    def lend(self, lease: Lease) -> bytes | None:
        """Keeps `lease` until the loan is done. Returns the loan; None if there is no room, socket or thread for it."""
        if not self._serves():
            return None
        with self._lock:
            number, old = next(self._numbers), iter(_older(self._lent, self.seconds))
            while not self._add(self._lent, number, lease):
                replaced = next(old, None)
                if replaced is None:
                    return None
                del self._lent[replaced]
            return self._name + _NUMBER.pack(number)

    def lent(self, number: int) -> Lease | None:
        return self._lent.get(number, (None, 0.0))[0]

    def has_made(self, loan: bytes) -> bool:
        """Whether a loan is one of this sender's, done or not."""
        return len(loan) == LOAN_BYTES and bool(self._name) and loan.startswith(self._name)

    def done(self, numbers: Iterable[int]) -> None:
        with self._lock:
            for number in numbers:
                self._lent.pop(number, None)

    def end_old(self) -> None:
        with self._lock:
            for kept, seconds in ((self._promised, self.seconds), (self._lent, UNREAD_S_MAX)):
                for name in _older(kept, seconds):
                    del kept[name]

    def close(self) -> None:
        """Ends all promises, all loans and the thread. Idempotent."""
        self._closed = True
        if self._ends is not None:
            self._ends()
        with self._lock:
            self._promised, self._lent = {}, {}

    def after_fork_in_child(self) -> None:
        """The thread and the leases belong to the parent, whose threads may have held the lock. For the library."""
        detached = self._ends.detach() if self._ends is not None else None
        if detached is not None:
            # Closed, not shut down: a shutdown would end the parent's socket too.
            detached[2][0].close()
        self._reset()

    def _add(self, kept: Kept, name: Any, lease: Lease) -> bool:
        if len(kept) >= self.entries_max or _bytes(kept) + lease.payload_bytes > self.bytes_max:
            return False
        kept[name] = lease, time.monotonic()
        return True

    def _serves(self) -> bool:
        """Starts the thread, if it does not run yet. False if this is closed, or there is no socket or thread."""
        with self._lock:
            if self._ends is not None or self._closed:
                return not self._closed
            name = os.urandom(_NAME_BYTES)
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                listening.bind(_address(name))
                listening.listen(_BACKLOG)
                serve = partial(_serve, listening, weakref.ref(self))
                begin(threading.Thread(target=serve, name="tensord-loans", daemon=True))
            except (OSError, ProcessLimit):
                listening.close()
                return False
            self._name = name
            # Wakes the thread, which then ends and closes the descriptor.
            self._ends = weakref.finalize(self, _shut_down, listening)
            return True


def _bytes(kept: Kept) -> int:
    return sum(lease.payload_bytes for lease, _ in kept.values())


def _older(kept: Kept, seconds: float) -> list[Any]:
    """The names of the leases that were added so long ago, oldest first."""
    until = time.monotonic() - seconds
    return [name for name, (_, since) in kept.items() if since <= until]


def _shut_down(listening: socket.socket) -> None:
    with suppress(OSError):
        listening.shutdown(socket.SHUT_RDWR)


def _serve(listening: socket.socket, sender: weakref.ref[Loans]) -> None:
    """Answers borrowers until the sender is closed or forgotten."""
    # The socket blocks: after the shutdown, an accept with a time limit would say that nobody is there.
    ready = select.poll()
    ready.register(listening, select.POLLIN)
    with listening:
        while True:
            asked = ready.poll(_SWEEP_S * 1000)
            loans = sender()
            if loans is None:
                return
            if asked:
                try:
                    connection, _ = listening.accept()
                    with connection, suppress(OSError):
                        if _is_ours(connection):
                            connection.settimeout(_SEND_S)
                            _answer(connection, loans)
                except OSError as error:
                    if error.errno == EINVAL:
                        # It was closed.
                        return
                    # No descriptor is free, or the peer has gone already.
                    time.sleep(_AGAIN_S)
            loans.end_old()
            # Not held while it waits, so that the sender can be collected.
            del loans


def _answer(connection: socket.socket, loans: Loans) -> None:
    message = connection.recv(_MESSAGE_BYTES)
    if len(message) % _NUMBER.size != 1:
        return
    numbers = [number for (number,) in _NUMBER.iter_unpack(message[1:])]
    if message[:1] == _DONE:
        loans.done(numbers)
    elif message[:1] == _FETCH and len(numbers) == 1:
        lease = loans.lent(numbers[0])
        span = lease.span() if lease is not None else None
        if span is not None:
            with open(os.memfd_create("tensord-loan", os.MFD_CLOEXEC), "wb", buffering=0) as copied:
                left = span.data
                while left:
                    left = left[copied.write(left) :]
                socket.send_fds(connection, [_HERE], [copied.fileno()])


# ---- the borrower


def fetch(loan: bytes) -> Array | None:
    """A private copy of a loan's span, its header first, as uint8 of shape (n,). None if the lender is gone, does not
    answer in time, or has ended the loan."""
    try:
        with _connected(loan[:_NAME_BYTES]) as connection:
            connection.settimeout(FETCH_S)
            connection.send(_FETCH + loan[_NAME_BYTES:])
            _, fds, *_ = socket.recv_fds(connection, 1, 1)
        if not fds:
            return None
        with open(fds[0], "rb", buffering=0) as copied:
            return np.frombuffer(mmap(copied.fileno(), 0, MAP_PRIVATE, PROT_READ | PROT_WRITE), np.uint8)
    except (OSError, ValueError):
        return None


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
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(packed)[1] == os.geteuid())
