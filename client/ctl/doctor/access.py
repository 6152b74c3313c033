"""Checks of access: both sockets, the daemon, deletion at logout, memory without a daemon. Pure."""

from __future__ import annotations

import configparser
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ....errors import LimitReached, SocketForbidden, TensordError
from ....ipc.connect import ROOT_GID
from ..leftovers import Leftover
from ..tables import counted, size
from .finding import Finding, fail, ok, warn

_FOREIGN_TOLD: Final = 4
_NEEDS_GROUP: Final = "socket_mode = 0660 and socket_group in the configuration, SocketMode= in the socket unit"


@dataclass(frozen=True, slots=True)
class FileStat:
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


@dataclass(frozen=True, slots=True)
class Caller:
    """The calling user. `gids`: the process's groups. `groups`: those of the user database, which a new login would
    have."""

    uid: int
    name: str
    gids: frozenset[int]
    groups: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Serving:
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
    check = f"{what} socket"
    if without_file:
        there, free = "is not there", f"the daemon makes it anew within seconds if it may write to {path.parent}"
        if node is not None:
            there = "is a socket that nobody serves" if stat.S_ISSOCK(node.mode) else "is not a socket"
            free = f"remove {path}: the daemon makes its socket anew within seconds"
        lives = " or ".join(f"a daemon of instance {each.instance} lives, pid {each.pid}" for each in without_file)
        return fail(
            check,
            f"{path} {there}; {lives}: its socket is gone",
            f"{free}; its log says why not. Or restart it: its entries stay, and attached clients attach again by "
            "themselves",
        )
    if folder is None:
        return fail(check, f"{path.parent} is not there", "start the daemon, or name its socket with TENSORD_SOCKET")
    if not folder.lets(caller, 1):
        return fail(
            check,
            f"{caller.name} may not enter {folder.path} ({_owner(folder)})",
            f"chmod 0755 {folder.path}: the mode of each socket decides who may connect",
        )
    if node is None:
        return fail(check, f"{path} is not there", "start the daemon, or name its socket with TENSORD_SOCKET")
    if not stat.S_ISSOCK(node.mode):
        return fail(check, f"{path} is not a socket", "remove it, or name the daemon's socket with TENSORD_SOCKET")
    if folder.mode & 0o002 and not folder.mode & stat.S_ISVTX:
        return fail(
            check,
            f"every user may write to {folder.path} ({_owner(folder)}), and so replace the socket",
            f"chmod 0755 {folder.path}",
        )
    text = f"{path} ({_owner(node)})"
    if not node.lets(caller, 2):
        return _kept_out(check, text, node, caller)
    if dead:
        return fail(check, f"{text}: nobody serves it", "start the daemon, which replaces what a killed one left")
    if what == "control" and node.mode & 0o002:
        return warn(
            check,
            f"{text}: every user of this host may read and write every entry",
            _NEEDS_GROUP,
        )
    return ok(check, f"{text}: {caller.name} may use it")


def unreachable(problems: Sequence[str]) -> list[Finding]:
    """One finding for each socket that no new client can reach, as the daemon reports it."""
    return [fail("sockets", each, "the daemon makes its socket anew once the path is free") for each in problems]


def _kept_out(check: str, text: str, node: FileStat, caller: Caller) -> Finding:
    said = f"{text}: {caller.name} may not use it"
    if node.mode & 0o020 and node.group in caller.groups:
        why = f"{said}, though a member of {node.group}"
        return fail(check, why, "log in again: a session keeps the groups that it began with")
    if node.mode & 0o020 and node.gid != ROOT_GID:
        return fail(check, said, f"usermod -aG {node.group} {caller.name}, then log in again")
    return fail(check, said, _NEEDS_GROUP)


def _owner(node: FileStat) -> str:
    return f"mode {stat.S_IMODE(node.mode):04o}, uid {node.uid}, group {node.group}"


def reachable(what: str, error: TensordError | None) -> Finding:
    """Whether the daemon answered on a socket."""
    check = f"daemon ({what})"
    if error is None:
        return ok(check, "answers")
    if isinstance(error, SocketForbidden):
        return fail(check, str(error), "see the check of the socket above")
    if isinstance(error, LimitReached):
        return fail(check, str(error), "the daemon runs; close connections, or raise the limit")
    return fail(check, str(error), "`systemctl status tensord` and `journalctl -u tensord` say why")


def removes_ipc(texts: Iterable[str]) -> bool:
    """Whether logind deletes a user's shared memory at logout. `texts`: its configuration files, the most important
    last. The default is yes."""
    value = True
    for text in texts:
        parser = configparser.RawConfigParser(strict=False, allow_no_value=True, interpolation=None)
        try:
            parser.read_string(text)
        except configparser.Error:
            continue
        said = (parser.get("Login", "RemoveIPC", fallback="") or "").strip().lower()
        if said:
            value = said not in ("no", "false", "off", "0", "n", "f")
    return value


def logout(*, uid: int, system_uid_max: int, has_logind: bool, lingers: bool, removes: bool) -> Finding:
    """Whether the daemon's user loses ring and index at logout."""
    check = "RemoveIPC"
    if not has_logind:
        return ok(check, "no logind here that could delete shared memory at logout")
    if uid <= system_uid_max:
        return ok(check, f"uid {uid} is a system user, whose shared memory logind leaves alone")
    if not removes:
        return ok(check, "RemoveIPC=no: logind leaves shared memory alone at logout")
    if lingers:
        return ok(check, f"uid {uid} lingers, so that logind never sees the last logout")
    return warn(
        check,
        f"logind deletes all shared memory of uid {uid} at the last logout, the ring included",
        "`loginctl enable-linger`, or RemoveIPC=no in /etc/systemd/logind.conf.d/tensord.conf, "
        "or run the daemon as a system user (`tensorctl install` as root)",
    )


def leftover(found: Sequence[Leftover], served: str | None) -> list[Finding]:
    """One finding for each instance that no daemon serves. `served`: the instance that the daemon serves, if it
    answers."""
    check = "leftovers"
    findings = []
    for left in found:
        if left.foreign:
            foreign = left.foreign[:_FOREIGN_TOLD]
            names = ", ".join(f"{segment.name.lstrip('/')} (uid {segment.uid})" for segment in foreign)
            findings.append(
                warn(
                    check,
                    f"instance {left.instance}: {counted(len(left.foreign), 'file', 'files')} with its names "
                    f"{'belongs' if len(left.foreign) == 1 else 'belong'} to other users and are ignored: {names}",
                    "remove them from /dev/shm, as their owner or as root",
                )
            )
        if left.served or left.instance == served:
            continue
        owned = f"{counted(len(left.segments), 'segment', 'segments')} of uid {left.uid}"
        text = f"instance {left.instance} holds {size(left.taken_bytes)} in {owned}"
        if left.served is None:
            findings.append(ok(check, f"{text}; only that user and root can find out whether a daemon serves it"))
            continue
        findings.append(
            warn(
                check,
                f"{text}, and no daemon serves it",
                f"start its daemon again, which continues with it, or `tensorctl purge --instance {left.instance}`",
            )
        )
    return findings or [ok(check, "no shared memory without a daemon")]
