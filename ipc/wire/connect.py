"""Connects to the daemon's socket, or raises an error that says what to do.

Owns: the connect call, its time limit, and the texts of its errors. Does not own the socket's path (`places`), nor the
protocol (`connection`).
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import socket
import stat
import struct
from pathlib import Path
from typing import Final

from ...errors import BadConfiguration, DaemonUnavailable, SocketForbidden, TimedOut
from ..places import CONTROL_NAME, SOCKET_PATH_BYTES_MAX
from .descriptors import no_descriptor

ROOT_GID: Final = 0
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
        raise DaemonUnavailable(
            f"cannot create a socket to connect to the daemon at {where} ({error.strerror}): free memory and files of "
            "this host"
        ) from None
    try:
        # A non-blocking connect fails at once if the backlog is full. A blocking connect waits for as long as the
        # send timeout says.
        _set_send_timeout(sock, max(timeout_s, 1e-6))
        sock.connect(os.fspath(where))
        _set_send_timeout(sock, 0)
        sock.setblocking(False)
    except BlockingIOError:
        sock.close()
        raise TimedOut(
            f"the daemon at {where} did not accept within {timeout_s:.3g} s: it is stopped or busy; see "
            "`tensorctl health`"
        ) from None
    except PermissionError:
        sock.close()
        raise SocketForbidden(_forbidden(where)) from None
    except OSError as error:
        sock.close()
        if where.exists() and not where.is_socket():
            kind = "folder" if where.is_dir() else "file"
            raise DaemonUnavailable(
                f"{where} is a {kind}, not a socket: give the path of the daemon's socket, such as "
                f"{(where if where.is_dir() else where.parent) / CONTROL_NAME}"
            ) from None
        folder = where.absolute().parent
        why = error.strerror if os.path.exists(folder) else f"there is no folder {folder}"
        raise DaemonUnavailable(
            f"no daemon at {where} ({why}): start it with `systemctl start tensord`, or "
            "run `tensord`; TENSORD_SOCKET names another socket"
        ) from None
    except BaseException:
        sock.close()
        raise
    return sock


def _set_send_timeout(sock: socket.socket, seconds: float) -> None:
    whole = int(seconds)
    sock.setsockopt(
        socket.SOL_SOCKET,
        socket.SO_SNDTIMEO,
        struct.pack("@ll", whole, int((seconds - whole) * 1e6)),
    )


def _forbidden(where: Path) -> str:
    uid = os.geteuid()
    try:
        found = where.stat()
    except OSError:
        return (
            f"uid {uid} may not look into {where.parent}, the folder of the socket {where.name}: "
            "ask for access to that folder, or set TENSORD_SOCKET to another daemon's socket"
        )
    group = _group(found.st_gid)
    if found.st_gid == ROOT_GID or not found.st_mode & stat.S_IWGRP:
        remedy = "set socket_group in the daemon's configuration, and socket_mode = 0660"
    else:
        remedy = f"join the group (`usermod -aG {group} {_user(uid)}`, then log in again)"
    return (
        f"uid {uid} may not use the socket {where}, which belongs to uid {found.st_uid} and group "
        f"{group} with mode {stat.S_IMODE(found.st_mode):04o}: {remedy}, or set TENSORD_SOCKET"
    )


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
