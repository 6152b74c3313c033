"""The paths of the daemon's three sockets, for the daemon and for clients, and the home folder of a user.

Owns: the names of folders, sockets and environment variables, and the check that a folder belongs to this user.

The folder is the first of these that exists or applies:

    daemon   $RUNTIME_DIRECTORY (set by a service manager) │ for root: /run/tensord │ the user's folder
    client   $TENSORD_SOCKET │ the user's folder, if a socket is there │ the system's folder, /run/tensord
    user's   $XDG_RUNTIME_DIR/tensord │ /tmp/tensord-<uid>

Invariant: a folder in /tmp is used only if it belongs to this user and no other user may write to it. Any user can
create a folder of that name first.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ..errors import SocketForbidden

CONTROL_NAME: Final = "control.sock"
STATUS_NAME: Final = "status.sock"
METRICS_NAME: Final = "metrics.sock"
SYSTEM_FOLDER: Final = Path("/run/tensord")
FALLBACK_FOLDER: Final = Path("/tmp")
SOCKET_PATH_BYTES_MAX: Final = 107
"""The longest path of a Unix socket: the size of `sun_path` without its final zero byte."""


def home_folder(environ: Mapping[str, str]) -> Path:
    """The home folder of this process's user. An empty HOME counts as not set: `Path.home()` would be `/`. Raises
    KeyError: HOME is not set, and the user has no entry in the user database."""
    return Path(environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir)


def user_folder(environ: Mapping[str, str], uid: int) -> Path:
    """The socket folder of this user's daemon. The folder may not exist yet."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    return Path(runtime, "tensord") if runtime else FALLBACK_FOLDER / f"tensord-{uid}"


def daemon_folder(environ: Mapping[str, str], uid: int) -> Path:
    """The folder for the sockets of a daemon started in this environment. The folder may not exist yet."""
    if given := environ.get("RUNTIME_DIRECTORY"):
        return Path(given.split(":")[0])
    return SYSTEM_FOLDER if uid == 0 else user_folder(environ, uid)


def control_socket(environ: Mapping[str, str], uid: int | None = None, system_folder: Path = SYSTEM_FOLDER) -> Path:
    """The control socket that a client connects to. `uid` defaults to the effective uid of this process. Raises
    SocketForbidden if the user's folder in /tmp belongs to another user or is writable for others."""
    if given := environ.get("TENSORD_SOCKET"):
        return Path(given)
    uid = os.geteuid() if uid is None else uid
    folder = user_folder(environ, uid)
    try:
        found = (folder / CONTROL_NAME).is_socket()
    except OSError:
        found = False
    if found and folder.parent == FALLBACK_FOLDER:
        check_folder(folder, uid)
    return (folder if found else system_folder) / CONTROL_NAME


def status_socket(environ: Mapping[str, str], uid: int | None = None, system_folder: Path = SYSTEM_FOLDER) -> Path:
    """The status socket that a reader connects to: $TENSORD_STATUS_SOCKET, or the one beside the control socket."""
    given = environ.get("TENSORD_STATUS_SOCKET")
    return Path(given) if given else control_socket(environ, uid, system_folder).with_name(STATUS_NAME)


def make_folder(folder: Path, uid: int | None = None, environ: Mapping[str, str] = os.environ) -> None:
    """Creates `folder` for a socket if it is missing and is one of the default folders. The default folders are the
    system's, those of `daemon_folder` and `user_folder`, and one level of folders in them, for instances. The system's
    folder gets mode 0755, any other 0700; folders in /tmp are checked. The parents of default folders, and all other
    folders, must exist already: a mistyped path creates no folder. Raises SocketForbidden if the folder is missing and
    is not created, or if a folder in /tmp fails the check."""
    uid = os.geteuid() if uid is None else uid
    usual = {SYSTEM_FOLDER, daemon_folder(environ, uid), user_folder(environ, uid)}
    for each in (folder.parent, folder):
        if each in usual or (each == folder and each.parent in usual):
            try:
                each.mkdir(0o755 if each == SYSTEM_FOLDER else 0o700, exist_ok=True)
            except FileExistsError:
                raise SocketForbidden(f"{each} is not a folder: remove it, or set another socket") from None
            except OSError as error:
                why = f"the socket's folder {each} cannot be created: {error.strerror}"
                raise SocketForbidden(f"{why}; create it, or set another socket") from error
        if each.parent == FALLBACK_FOLDER and (each in usual or each == folder):
            check_folder(each, uid)
    if not folder.is_dir():
        if os.path.lexists(folder):
            raise SocketForbidden(f"{folder} is not a folder: remove it, or set another socket")
        why = f"the socket's folder {folder} does not exist, and only default folders are created"
        raise SocketForbidden(f"{why}: create it, or set another socket")


def check_folder(folder: Path, uid: int) -> None:
    """Raises SocketForbidden unless `folder` belongs to `uid` and only `uid` may write to it."""
    found = os.lstat(folder)
    remedy = "remove it, or set XDG_RUNTIME_DIR or TENSORD_SOCKET"
    if not stat.S_ISDIR(found.st_mode):
        raise SocketForbidden(f"{folder} is a link or a file, not a folder: {remedy}")
    if found.st_uid != uid:
        raise SocketForbidden(f"{folder} belongs to uid {found.st_uid}, not to {uid}: {remedy}")
    if found.st_mode & 0o022:
        mode = f"{stat.S_IMODE(found.st_mode):04o}"
        raise SocketForbidden(f"{folder} has mode {mode}, so that other users may write to it: {remedy}")
