"""Checks of access: both sockets, the daemon, deletion at logout, memory without a daemon. Pure."""

from __future__ import annotations

import re
import stat
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from ....errors import LimitReached, SocketForbidden, TensordError
from ....ipc.wire.connect import ROOT_GID
from ..orders.leftovers import Leftover
from ..output import counted, size
from .finding import Finding, fail, ok, warn

_NEEDS_GROUP: Final = "socket_mode = 0660 and socket_group in the configuration, SocketMode= in the socket unit"
_START: Final = "start the daemon, or name its socket with TENSORD_SOCKET"


class FileStat(NamedTuple):
    """The result of stat for a file."""

    path: Path
    mode: int
    uid: int
    gid: int
    group: str

    def lets(self, caller: Caller, wanted: int) -> bool:
        """Whether the permission bits give `caller` the rights `wanted` (4 read, 2 write, 1 enter)."""
        if caller.uid == 0:
            return True
        shift = 6 if caller.uid == self.uid else 3 if self.gid in caller.gids else 0
        return self.mode >> shift & wanted == wanted

    def __str__(self) -> str:
        return f"{self.path} (mode {stat.S_IMODE(self.mode):04o}, uid {self.uid}, group {self.group})"


class Caller(NamedTuple):
    """The calling user. `gids`: the process's groups. `groups`: those of the user database, which a new login would
    have."""

    uid: int
    name: str
    gids: frozenset[int]
    groups: frozenset[str] = frozenset()


class Serving(NamedTuple):
    """A daemon that holds the lock of its instance."""

    instance: str
    pid: int


def socket(
    what: str,
    path: Path,
    node: FileStat | None,
    folder: FileStat | None,
    caller: Caller,
    without_file: Sequence[Serving] = (),
    *,
    dead: bool = False,
) -> Finding:
    """Whether `caller` may use a socket. `folder`: the socket's folder; None if it is missing or not accessible.
    `without_file`: the daemons that may listen on a socket of this path though its file is gone. `dead`: nobody listens
    at the path."""
    no, is_socket = partial(fail, f"{what} socket"), node is not None and stat.S_ISSOCK(node.mode)
    if without_file:
        there, free = "is not there", f"the daemon makes it anew within seconds if it may write to {path.parent}"
        if node is not None:
            there = "is a socket that nobody serves" if is_socket else "is not a socket"
            free = f"remove {path}: the daemon makes its socket anew within seconds"
        lives = " or ".join(f"a daemon of instance {each.instance} lives, pid {each.pid}" for each in without_file)
        again = "its log says why not. Or restart it: its entries stay, and attached clients attach again by themselves"
        return no(f"{path} {there}; {lives}: its socket is gone", f"{free}; {again}")
    if folder is not None and not folder.lets(caller, 1):
        mode = f"chmod 0755 {folder.path}: the mode of each socket decides who may connect"
        return no(f"{caller.name} may not enter {folder}", mode)
    if folder is None or node is None:
        return no(f"{path.parent if folder is None else path} is not there", _START)
    if not is_socket:
        return no(f"{path} is not a socket", "remove it, or name the daemon's socket with TENSORD_SOCKET")
    if folder.mode & 0o002 and not folder.mode & stat.S_ISVTX:
        return no(f"every user may write to {folder}, and so replace the socket", f"chmod 0755 {folder.path}")
    if not node.lets(caller, 2):
        said = f"{node}: {caller.name} may not use it"
        if node.mode & 0o020 and node.group in caller.groups:
            said += f", though a member of {node.group}"
            return no(said, "log in again: a session keeps the groups that it began with")
        if node.mode & 0o020 and node.gid != ROOT_GID:
            return no(said, f"usermod -aG {node.group} {caller.name}, then log in again")
        return no(said, _NEEDS_GROUP)
    if dead:
        return no(f"{node}: nobody serves it", "start the daemon, which replaces what a killed one left")
    if what == "control" and node.mode & 0o002:
        said = f"{node}: every user of this host may read and write every entry"
        return warn("control socket", said, _NEEDS_GROUP)
    return ok(f"{what} socket", f"{node}: {caller.name} may use it")


def reachable(what: str, error: TensordError | None) -> Finding:
    """Whether the daemon answered on a socket."""
    if error is None:
        return ok(f"daemon ({what})", "answers")
    remedy = "`systemctl status tensord` and `journalctl -u tensord` say why"
    if isinstance(error, SocketForbidden):
        remedy = "see the check of the socket above"
    elif isinstance(error, LimitReached):
        remedy = "the daemon runs; close connections, or raise the limit"
    return fail(f"daemon ({what})", str(error), remedy)


def removes_ipc(configuration: str) -> bool:
    """Whether logind deletes a user's shared memory at logout, by its configuration. The default is yes."""
    said = re.findall(r"^\s*RemoveIPC\s*=\s*(\w+)", configuration, re.MULTILINE)
    return not said or said[-1].lower() not in ("no", "false", "off", "0", "n", "f")


def logout(*, uid: int, system_uid_max: int, has_logind: bool, lingers: bool, removes: bool) -> Finding:
    """Whether the daemon's user loses ring and index at logout."""
    for kept, why in (
        (not has_logind, "no logind here that could delete shared memory at logout"),
        (uid <= system_uid_max, f"uid {uid} is a system user, whose shared memory logind leaves alone"),
        (not removes, "RemoveIPC=no: logind leaves shared memory alone at logout"),
        (lingers, f"uid {uid} lingers, so that logind never sees the last logout"),
    ):
        if kept:
            return ok("RemoveIPC", why)
    return warn(
        "RemoveIPC",
        f"logind deletes all shared memory of uid {uid} at the last logout, the ring included",
        "`loginctl enable-linger`, or RemoveIPC=no in /etc/systemd/logind.conf.d/tensord.conf, "
        "or run the daemon as a system user (`tensorctl install` as root)",
    )


def leftover(found: Sequence[Leftover], served: str | None) -> list[Finding]:
    """One finding for each instance that no daemon serves. `served`: the instance that the daemon serves, if it
    answers."""
    findings = []
    for left in found:
        if left.served or left.instance == served:
            continue
        owned = f"{counted(len(left.segments), 'segment', 'segments')} of uid {left.uid}"
        text = f"instance {left.instance} holds {size(left.taken_bytes)} in {owned}"
        if left.served is None:
            text += "; only that user and root can find out whether a daemon serves it"
            findings.append(ok("leftovers", text))
        else:
            purge = f"`tensorctl purge --instance {left.instance}`"
            remedy = f"start its daemon again, which continues with it, or {purge}"
            findings.append(warn("leftovers", f"{text}, and no daemon serves it", remedy))
    return findings or [ok("leftovers", "no shared memory without a daemon")]
