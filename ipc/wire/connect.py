"""Connects to the daemon's socket, or raises an error that says what to do."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

from ...errors import BadConfiguration, DaemonUnavailable, SocketForbidden, TimedOut, Unavailable
from ..places import CONTROL_NAME, SOCKET_PATH_BYTES_MAX
from .descriptors import no_descriptor

_ROOT_GID: Final = 0
"""Nobody is advised to join the group root for a socket."""


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
        raise BadConfiguration(
            f"the socket's path {where} has {size} bytes; a Unix socket's has at most "
            f"{SOCKET_PATH_BYTES_MAX}: set TENSORD_SOCKET to a shorter one"
        )
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
        return DaemonUnavailable(
            f"{where} is a {kind}, not a socket: give the path of the daemon's socket, such as {path}"
        )
    folder = where.absolute().parent
    missing = error.strerror if os.path.exists(folder) else f"there is no folder {folder}"
    return DaemonUnavailable(
        f"no daemon at {where} ({missing}): start it with `systemctl start tensord`, or run `tensord`; TENSORD_SOCKET "
        "names another socket"
    )


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
