"""A connected socket that several threads share: a client's callers and its background thread.

Invariants: those of `channel`. No call waits for a lock longer than its time limit, and `close` for none: a signal
handler may call it, or wait for a thread that does, while its own thread is in the channel. No message is written into
the middle of another.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import select
import socket
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self, TypeVar

from ...errors import (
    BadConfiguration,
    DaemonUnavailable,
    ProtocolError,
    SocketForbidden,
    TensordError,
    TimedOut,
    Unavailable,
)
from ..messages.control import Error
from ..messages.schema import Message
from ..places import CONTROL_NAME, SOCKET_PATH_BYTES_MAX
from .connection import Connection, Delivery
from .descriptors import close_all, no_descriptor, read, write

_POLL_MS_MAX: Final = (1 << 31) - 1
"""The longest timeout that poll() takes, in milliseconds: 24 days."""

_ROOT_GID: Final = 0
"""Nobody is advised to join the group root for a socket."""

Answer = TypeVar("Answer", bound=Message)


class BlockingChannel:
    """The connection to one daemon. Any thread may `send`, one at a time may `receive`. Any may `close`: all waiting
    threads then leave it, and the last of them closes the descriptors."""

    def __init__(self, sock: socket.socket, connection: Connection, name: str = "the peer") -> None:
        sock.setblocking(False)
        self.connection = connection
        self.closed = False
        self._name = name
        self._sock = sock
        self._ready: deque[Delivery] = deque()
        self._failure: TensordError | None = None
        self._served = False
        # One object for each call that may use the socket. Changed in single steps, without a lock.
        self._inside: set[object] = set()
        self._over = False
        self._unclosed = [None]  # empty once a thread closes the descriptors
        self._writing = False
        # Reentrant: only the thread that has one can give it back, and `send` tries to in any case.
        self._receiving = threading.RLock()
        self._sending = threading.RLock()

    @classmethod
    def connect(cls, path: str | os.PathLike[str], timeout_s: float, connection: Connection | None = None) -> Self:
        """Connects to the socket at `path`, as `connect`. `connection` defaults to a control client's."""
        return cls(connect(path, timeout_s), connection or Connection.control_client(), f"the daemon at {path}")

    def send(self, *messages: Message, fds: Sequence[int] = (), timeout_s: float) -> None:
        """Sends the messages in one call. Raises TimedOut, DaemonUnavailable, what `Connection.send` raises, or on a
        new connection the error with which the daemon has refused it. After TimedOut either nothing was sent, or the
        channel is closed. A signal handler that has interrupted a send of its own thread gets TimedOut. After an
        exception of a signal handler the channel is closed."""
        here = object()
        deadline = time.monotonic() + timeout_s
        try:
            self._inside.add(here)
            # The acquire is inside the try: a signal handler may raise right after the lock was taken.
            if self._sending.acquire(timeout=max(0.0, timeout_s)):
                self._send(messages, fds, deadline, timeout_s)
                return
        except TensordError:
            raise
        except BaseException:
            # An exception of a signal handler: part of a message may have been sent.
            self.shut()
            raise
        finally:
            try:
                self._sending.release()
            except RuntimeError:
                pass  # the lock was not taken
            finally:
                self._leave(here)
        raise self._timed_out("other threads are sending", timeout_s)

    def _send(self, messages: Sequence[Message], fds: Sequence[int], deadline: float, timeout_s: float) -> None:
        self._check_open()
        if self._writing:
            raise self._timed_out("the signal handler that sends has interrupted a send of its thread", timeout_s)
        data = self.connection.send(*messages, fds=len(fds))
        try:
            self._writing = True
            sent = self._write(data, fds, deadline)
        except DaemonUnavailable:
            if (refusal := self._refusal()) is not None:
                raise refusal from None
            raise
        finally:
            self._writing = False
        if sent == len(data):
            return
        if sent:
            self.shut()
        raise self._timed_out("the peer does not read", timeout_s)

    def receive(self, timeout_s: float) -> Delivery:
        """The next message and its descriptors, which are the caller's.

        Raises:
            TimedOut: no message came in time.
            DaemonUnavailable, ProtocolError: the connection has ended. Close the channel.
        """
        here = object()
        try:
            self._inside.add(here)
            return self._receive(time.monotonic() + timeout_s, timeout_s)
        finally:
            self._leave(here)

    def _receive(self, deadline: float, timeout_s: float) -> Delivery:
        if self._over:
            self._check_open()
        if not self._receiving.acquire(timeout=max(0.0, timeout_s)):
            raise self._timed_out("another thread is receiving", timeout_s)
        try:
            while not self._ready:
                if self._failure is not None:
                    raise self._failure
                self._check_open()
                if not self._read() and not self._wait(select.POLLIN, deadline):
                    raise self._timed_out("the peer sent nothing", timeout_s)
            self._served = True
            return self._ready.popleft()
        finally:
            self._receiving.release()

    def receive_one(self, kind: type[Answer], deadline: float) -> tuple[Answer, tuple[int, ...]]:
        """The next message, which must be of this kind, and its descriptors. `deadline`: a time of `time.monotonic`.
        Raises DaemonUnavailable for another message, the error that the peer sent instead, or what `receive` raises."""
        message, fds = self.receive(max(0.0, deadline - time.monotonic()))
        if isinstance(message, kind):
            return message, fds
        close_all(fds)
        if isinstance(message, Error):
            raise message.to_error()
        found = f"the daemon answered {type(message).__name__}, expected {kind.__name__}"
        raise DaemonUnavailable(f"{found}: it has another version; see `tensorctl doctor`")

    def close(self) -> None:
        """As `shut`, and closes the socket and the descriptors of unreceived messages, or has the last thread that
        leaves the channel close them. Waits for nothing."""
        self.shut()
        self._over = True
        self._end()

    def _leave(self, here: object) -> None:
        self._inside.discard(here)
        if self._over:
            self._end()

    def _end(self) -> None:
        """SYNC POINT: a call enters `_inside` before it looks whether the channel is closed; `close` says so before it
        looks into `_inside`. So the socket's descriptor number is not reused while a call may use it."""
        if self._inside:
            return
        try:
            self._unclosed.pop()
        except IndexError:
            return
        self._sock.close()
        self._drop()

    def close_in_child(self) -> None:
        """For the child of a fork: closes the child's copies. The parent's connection goes on."""
        self.closed = True
        self._sock.close()
        self._drop()

    def _drop(self) -> None:
        while self._ready:
            close_all(self._ready.popleft()[1])
        close_all(self.connection.close())

    def shut(self) -> None:
        """Ends the channel and wakes all threads that wait in it. Takes no lock. Call `close` afterwards."""
        self.closed = True
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def _read(self) -> bool:
        """One read. Returns False if the socket had no bytes. A failure is noted in `_failure`."""
        try:
            chunk = read(self._sock)
        except BlockingIOError:
            return False
        except OSError as error:
            self._failure = self._gone(error.strerror)
            return True
        if not chunk.data:
            self._failure = self._gone("the peer closed the connection")
            return True
        arrival = self.connection.receive_data(*chunk)
        close_all(arrival.discarded)
        self._ready.extend(arrival.messages)
        if arrival.failure is not None:
            self._failure = arrival.failure
            if not self._served and not self._ready and isinstance(arrival.failure, ProtocolError):
                why = f"{self._name} does not speak tensord's protocol: it may be the socket of another program, or "
                why += "tensord's metrics or page, which speak HTTP. Name the control or the status socket"
                self._failure = type(arrival.failure)(f"{why} ({arrival.failure})")
        return True

    def _write(self, data: bytes, fds: Sequence[int], deadline: float) -> int:
        """How many bytes were written before the deadline."""
        sent = 0
        view = memoryview(data)
        while sent < len(data):
            try:
                sent += write(self._sock, view[sent:], () if sent else fds)
            except BlockingIOError:
                if not self._wait(select.POLLOUT, deadline):
                    break
            except OSError as error:
                raise self._gone(error.strerror) from None
        return sent

    def _refusal(self) -> TensordError | None:
        """The error with which the peer has refused a new connection. It is sent before the connection is closed, and a
        write notices the close first."""
        if self._served or not self._receiving.acquire(blocking=False):
            return None
        try:
            while not self._ready and self._failure is None and self._read():
                pass
            first = self._ready[0][0] if self._ready else None
            return first.to_error() if isinstance(first, Error) else None
        finally:
            self._receiving.release()

    def _wait(self, events: int, deadline: float) -> bool:
        # In the child of a fork the socket has no descriptor.
        self._check_open()
        poll = select.poll()
        poll.register(self._sock, events)
        while (left_s := deadline - time.monotonic()) > 0:
            if poll.poll(min(left_s * 1000, _POLL_MS_MAX)):
                return True
        return False

    def _check_open(self) -> None:
        if self.closed:
            raise DaemonUnavailable(f"the connection to {self._name} is closed: connect anew")

    def _gone(self, reason: str | None) -> DaemonUnavailable:
        return DaemonUnavailable(f"{self._name} is gone ({reason}): connect anew")

    def _timed_out(self, reason: str, timeout_s: float) -> TimedOut:
        return TimedOut(f"{self._name} did not respond within {timeout_s:.3g} s: {reason}")


def connect(path: str | os.PathLike[str], timeout_s: float) -> socket.socket:
    """A connected, non-blocking Unix stream socket.

    Raises:
        DaemonUnavailable: no daemon listens at `path`.
        ProcessLimit: this process can open no more files.
        SocketForbidden: this user may not connect.
        TimedOut: the daemon's backlog stayed full for `timeout_s`.
        BadConfiguration: `path` is too long for a Unix socket.
    """
    where = Path(path)
    size = len(os.fsencode(where))
    if size > SOCKET_PATH_BYTES_MAX:
        why = f"the socket's path {where} has {size} bytes; a Unix socket's has at most {SOCKET_PATH_BYTES_MAX}"
        raise BadConfiguration(f"{why}: set TENSORD_SOCKET to a shorter one")
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise no_descriptor() from None
        why = f"cannot create a socket to connect to the daemon at {where} ({error.strerror})"
        raise DaemonUnavailable(f"{why}: free memory and files of this host") from None
    try:
        # A non-blocking connect fails at once if the backlog is full. A blocking connect waits for as long as the
        # send timeout says.
        _set_send_timeout(sock, max(timeout_s, 1e-6))
        sock.connect(os.fspath(where))
        _set_send_timeout(sock, 0)
        sock.setblocking(False)
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):
            raise _refusal(error, where, timeout_s) from None
        raise
    return sock


def _refusal(error: OSError, where: Path, timeout_s: float) -> Unavailable:
    if isinstance(error, BlockingIOError):
        why = f"the daemon at {where} did not accept within {timeout_s:.3g} s"
        return TimedOut(f"{why}: it is stopped or busy; see `tensorctl health`")
    if isinstance(error, PermissionError):
        return SocketForbidden(_forbidden(where))
    if where.exists() and not where.is_socket():
        kind, folder = ("folder", where) if where.is_dir() else ("file", where.parent)
        path = folder / CONTROL_NAME
        wanted = f"give the path of the daemon's socket, such as {path}"
        return DaemonUnavailable(f"{where} is a {kind}, not a socket: {wanted}")
    folder = where.absolute().parent
    missing = error.strerror if os.path.exists(folder) else f"there is no folder {folder}"
    remedy = "start it with `systemctl start tensord`, or run `tensord`; set TENSORD_SOCKET for another socket"
    return DaemonUnavailable(f"no daemon at {where} ({missing}): {remedy}")


def _set_send_timeout(sock: socket.socket, seconds: float) -> None:
    whole = int(seconds)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", whole, int((seconds - whole) * 1e6)))


def _forbidden(where: Path) -> str:
    uid = os.geteuid()
    try:
        found = where.stat()
    except OSError:
        return (
            f"uid {uid} may not look into {where.parent}, the folder of the socket {where.name}: "
            "ask for access to that folder, or set TENSORD_SOCKET to another daemon's socket"
        )
    group, user = str(found.st_gid), str(uid)
    with suppress(KeyError):
        group = grp.getgrgid(found.st_gid).gr_name
    with suppress(KeyError):
        user = pwd.getpwuid(uid).pw_name
    remedy = f"join the group (`usermod -aG {group} {user}`, then log in again)"
    if found.st_gid == _ROOT_GID or not found.st_mode & stat.S_IWGRP:
        remedy = "set socket_group in the daemon's configuration, and socket_mode = 0660"
    return (
        f"uid {uid} may not use the socket {where}, which belongs to uid {found.st_uid} and group "
        f"{group} with mode {stat.S_IMODE(found.st_mode):04o}: {remedy}, or set TENSORD_SOCKET"
    )
