"""Where the daemon's three sockets stand, for whoever listens and whoever connects.

Owns: the names of the folders and of the environment variables, and the check that a folder is not
somebody else's.
Does not own: the sockets. Nothing here connects, listens or reads the configuration.

A socket's folder is found so:

    daemon   $RUNTIME_DIRECTORY (a service manager's) │ root: /run/tensord │ else the user's folder
    client   $TENSORD_SOCKET │ the user's, if a socket is there │ the system's
    user's   $XDG_RUNTIME_DIR/tensord, or without one /tmp/tensord-<uid>

Invariant: a folder in /tmp is used only if this user made it and nobody else may write there, since
anyone can make a folder of that name first.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ..errors import SocketForbidden

CONTROL_VARIABLE: Final = "TENSORD_SOCKET"
STATUS_VARIABLE: Final = "TENSORD_STATUS_SOCKET"
CONTROL_NAME: Final = "control.sock"
STATUS_NAME: Final = "status.sock"
METRICS_NAME: Final = "metrics.sock"
SYSTEM_FOLDER: Final = Path("/run/tensord")
FALLBACK_FOLDER: Final = Path("/tmp")
SOCKET_PATH_BYTES_MAX: Final = 107
"""What `sun_path` holds, less its final zero."""


def user_folder(environ: Mapping[str, str], uid: int) -> Path:
    """The folder of this user's daemon. It need not exist."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    return Path(runtime, "tensord") if runtime else FALLBACK_FOLDER / f"tensord-{uid}"


def daemon_folder(environ: Mapping[str, str], uid: int) -> Path:
    """The folder in which a daemon started here puts its sockets. It need not exist."""
    given = environ.get("RUNTIME_DIRECTORY")
    if given:
        return Path(given.split(":")[0])
    return SYSTEM_FOLDER if uid == 0 else user_folder(environ, uid)


def control_socket(environ: Mapping[str, str], uid: int | None = None, system_folder: Path = SYSTEM_FOLDER) -> Path:
    """The control socket a client connects to; `uid` is this process's unless given.

    Raises SocketForbidden when the user's folder in /tmp is somebody else's.
    """
    given = environ.get(CONTROL_VARIABLE)
    if given:
        return Path(given)
    uid = os.geteuid() if uid is None else uid
    folder = user_folder(environ, uid)
    if _is_socket(folder / CONTROL_NAME):
        if folder.parent == FALLBACK_FOLDER:
            check_folder(folder, uid)
        return folder / CONTROL_NAME
    return system_folder / CONTROL_NAME


def status_socket(environ: Mapping[str, str], uid: int | None = None, system_folder: Path = SYSTEM_FOLDER) -> Path:
    """The status socket: $TENSORD_STATUS_SOCKET, else the one beside the control socket."""
    given = environ.get(STATUS_VARIABLE)
    if given:
        return Path(given)
    return control_socket(environ, uid, system_folder).with_name(STATUS_NAME)


def make_folder(folder: Path, uid: int | None = None, environ: Mapping[str, str] = os.environ) -> None:
    """Make `folder` for a socket if it is missing and one of the usual: 0755 for the system's, else 0700 and checked.

    The usual folders are those of `daemon_folder` and `user_folder`, and one for each instance in them. Their own
    parents, and folders elsewhere, have to be there: a mistyped path leaves no folders behind.

    Raises SocketForbidden when it is not there and not made, or is not this user's alone.
    """
    uid = os.geteuid() if uid is None else uid
    usual = {SYSTEM_FOLDER, daemon_folder(environ, uid), user_folder(environ, uid)}
    for each in (folder.parent, folder):
        if each in usual or (each == folder and each.parent in usual):
            _make(each, 0o755 if each == SYSTEM_FOLDER else 0o700)
        if each.parent == FALLBACK_FOLDER and (each in usual or each == folder):
            check_folder(each, uid)
    if not folder.is_dir():
        if os.path.lexists(folder):
            raise SocketForbidden(f"{folder} is no folder: remove it, or set another socket")
        raise SocketForbidden(
            f"the socket's folder {folder} is not there, and only usual ones are made: make it, or set another socket"
        )


def _make(folder: Path, mode: int) -> None:
    try:
        folder.mkdir(mode, exist_ok=True)
    except FileExistsError:
        raise SocketForbidden(f"{folder} is no folder: remove it, or set another socket") from None
    except OSError as error:
        raise SocketForbidden(
            f"the socket's folder {folder} cannot be made: {error.strerror}; make it, or set another socket"
        ) from error


def check_folder(folder: Path, uid: int) -> None:
    """Raise SocketForbidden unless `folder` is a folder of `uid` where nobody else may write."""
    found = os.lstat(folder)
    remedy = "remove it, or set XDG_RUNTIME_DIR or TENSORD_SOCKET"
    if not stat.S_ISDIR(found.st_mode):
        raise SocketForbidden(f"{folder} is no folder of its own (a link or a file): {remedy}")
    if found.st_uid != uid:
        raise SocketForbidden(f"{folder} belongs to uid {found.st_uid}, not to {uid}: {remedy}")
    if found.st_mode & 0o022:
        raise SocketForbidden(f"{folder} has mode {stat.S_IMODE(found.st_mode):04o}, others may write there: {remedy}")


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False
