"""`doctor`: reads the facts of a daemon and of this machine, judges them, and says what to do.

Owns: the checks. Changes nothing. Does not own: the daemon's health, which the daemon tells.

Invariants: a failure becomes a finding, not an exception. What cannot be read of the machine is left out.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
from click.exceptions import Exit

from tensord import __version__

from ...errors import BadConfiguration, DaemonUnavailable, NotEnoughMemory, TensordError
from ...ipc.messages.control import HealthQuery
from ...ipc.messages.modes import HOST_GAUGE
from ...ipc.quantities import read_size
from ...shm.lanes import fence
from ...shm.ring import segments
from ...shm.ring.cgroups import text_of
from .daemon import Daemon, checked, pass_daemon
from .leftovers import Leftover, instances, look
from .output import as_json, counted, pairs, show, size

_SYSTEM_UID_MAX: Final = 999
_LISTENS: Final = "00010000"
"""The flags of a listening socket in /proc/net/unix (__SO_ACCEPTCON)."""
_JOURNAL: Final = "`systemctl status tensord` and `journalctl -u tensord`"
_NEEDS_GROUP: Final = "socket_mode = 0660 and socket_group in the configuration, SocketMode= in the socket unit"
_MAKE_ROOM: Final = (
    "set a smaller ring_bytes; or free memory, mount -o remount,size=SIZE /dev/shm (in a container: --shm-size), raise "
    "MemoryMax= of the service (in a container: --memory)"
)
_ALLOW: Final = "Linux 4.16 or newer; allow the system call membarrier in the container's seccomp profile"


class Level(StrEnum):
    """FAIL: it does not work, or will not. WARN: it works, but with less performance, or not permanently."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


class Finding(NamedTuple):
    """The result of one check. `remedy`: what to do; empty if nothing has to be done."""

    check: str
    level: Level
    text: str
    remedy: str = ""


def ok(check: str, text: str) -> Finding:
    return Finding(check, Level.OK, text)


def warn(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Level.WARN, text, remedy)


def fail(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Level.FAIL, text, remedy)


def diagnose(daemon: Daemon) -> Iterator[Finding]:
    """All findings about the daemon behind `daemon`, and about this machine for that daemon; without one, for a daemon
    started here."""
    status: dict[str, Any] = {}
    try:
        yield socket("control", daemon.control_path, daemon.greeted)
        yield socket("status", daemon.status_path, lambda: status.update(daemon.status()))
        if status:
            yield versions(__version__, status["version"])
            yield from health(daemon.ask(HealthQuery))
            yield gauges(status["governor"]["gauges"])
    except TensordError as error:
        yield fail("daemon", str(error), f"{_JOURNAL} say why")
    ring_bytes, ignored = status.get("ring_bytes", 0), list[str]()
    refused = None
    try:
        rows, ignored = checked()
        ring_bytes = ring_bytes or sum(read_size(row["value"]) for row in rows if row["key"] == "ring_bytes")
    except BadConfiguration as error:
        refused = str(error)
    yield configuration(refused, ignored, served=bool(status))
    yield memory(ring_bytes, status.get("ring_ready_bytes", 0))
    plain, expedited = fence.supported()
    yield membarrier(plain=plain, expedited=expedited, in_use=status.get("fence"))
    uid = status.get("uid", os.geteuid())
    yield logout(uid, removes=removes_ipc(), lingers=lingers(uid))
    yield from leftovers([left for name in instances() if (left := look(name))])


def socket(what: str, path: Path, use: Callable[[], object]) -> Finding:
    """Whether the daemon answers on a socket that is not for everybody. `use` raises TensordError if it does not
    answer. A daemon may listen on a socket of this path though its file is gone."""
    check = f"{what} socket"
    try:
        use()
    except TensordError as error:
        if isinstance(error, DaemonUnavailable) and (lives := without_file(path)):
            remedy = (
                f"remove what stands at {path}, and let the daemon write to {path.parent}: it makes its socket anew "
                "within seconds. Or restart it: its entries stay, and attached clients attach again by themselves"
            )
            return fail(check, f"nobody listens at {path}; {' or '.join(lives)}: its socket is gone", remedy)
        return fail(check, str(error), f"{_JOURNAL} have the daemon's side")
    with suppress(OSError):
        if what == "control" and path.stat().st_mode & 0o002:
            return warn(check, f"{path}: every user of this host may read and write every entry", _NEEDS_GROUP)
    return ok(check, f"the daemon answers at {path}")


def without_file(path: Path) -> list[str]:
    """The daemons that listen on a socket that was bound to `path`, and those that may, since this user may not see
    their sockets."""
    names = {str(path), str(path.absolute())}
    rows = [line.split(maxsplit=7) for line in text_of(Path("/proc/net/unix")).splitlines()]
    bound = {f"socket:[{row[6]}]" for row in rows if len(row) == 8 and row[7] in names and row[3] == _LISTENS}
    found = []
    for instance in instances() if bound else ():
        pid = segments.serving_pid(instance)
        if pid is None:
            continue
        try:
            listens = any(each.resolve().name in bound for each in Path(f"/proc/{pid}/fd").iterdir())
        except PermissionError:
            listens = True
        except OSError:
            continue  # it has ended
        if listens:
            found.append(f"a daemon of instance {instance} lives, pid {pid}")
    return found


def versions(client: str, daemon: str) -> Finding:
    """Whether tensorctl and the daemon have the same version. Another protocol is refused at the control socket."""
    text = f"tensorctl {client}, daemon {daemon}"
    if client != daemon:
        remedy = "install the same version on both sides, and restart the daemon: it keeps its entries"
        return warn("versions", text, remedy)
    return ok("versions", text)


def health(body: Mapping[str, Any]) -> list[Finding]:
    told = [*body["problems"], *body["notices"]]
    remedy = "the daemon serves all the same; its log has more"
    return [warn("health", each, remedy) for each in told] or [ok("health", "the daemon reports no problem")]


def gauges(found: Sequence[Mapping[str, Any]], root: Path = Path("/")) -> Finding:
    """Whether the daemon measures the GPUs whose drivers are loaded. `found`: the gauges in its status."""
    text = ", ".join(f"{gauge['gauge']} by {gauge['source']}" for gauge in found) or "none"
    drivers = (("nvidia", "dev/nvidiactl"), ("nvidia", "proc/driver/nvidia"), ("amd", "dev/kfd"))
    present = [extra for extra, file in drivers if (root / file).exists()]
    if present and all(gauge["gauge"] == HOST_GAUGE for gauge in found):
        install = f"gauges.device = auto, and pip install 'tensord[{present[0]}]'; the daemon's log gives the reason"
        return warn("gauges", f"{text}; there is a GPU, and its memory use is unknown", install)
    return ok("gauges", text)


def configuration(error: str | None, ignored: Sequence[str], *, served: bool) -> Finding:
    """Whether a daemon started here would accept its configuration. `ignored`: a text for each unknown variable."""
    if error is not None:
        report = warn if served else fail
        return report("configuration", error, "correct it; a running daemon keeps its present configuration")
    if ignored:
        return warn("configuration", "; ".join(ignored), "correct the misspelt; the daemon ignores them")
    return ok("configuration", "a daemon would start with it; `tensord --check-config` lists it")


def memory(ring_bytes: int, ready_bytes: int) -> Finding:
    """Whether there is memory for what the ring lacks, as the daemon judges it at a start. `ready_bytes`: the allocated
    part of the ring."""
    ring, needed_bytes = f"the ring of {size(ring_bytes)}", max(0, ring_bytes - ready_bytes)
    if not os.access(segments.SHM_FOLDER, os.W_OK | os.X_OK):
        why = "/dev/shm is not there, is read-only, or does not let this user make files"
        return fail("memory", why, segments.MAKE_WRITABLE)
    try:
        segments.check_memory(needed_bytes, ring, remedy="")
    except NotEnoughMemory as error:
        return fail("memory", str(error), _MAKE_ROOM)
    free = f"{size(segments.shm_free_bytes())} are free in /dev/shm"
    return ok("memory", f"{ring} {'fits' if needed_bytes else 'has its memory'}; {free}")


def membarrier(*, plain: bool, expedited: bool, in_use: str | None) -> Finding:
    """Whether the kernel offers the fence. `in_use`: the kind that the daemon uses; None without a daemon."""
    if not plain and not expedited:
        why = "the kernel, or a sandbox's filter, refuses membarrier(2), without which no memory can be reused"
        return fail("membarrier", why, _ALLOW)
    if not expedited or in_use == "global":
        who = "some client cannot register for it (`tensorctl clients`)" if expedited else "it is not offered here"
        return warn("membarrier", f"each reclaim takes 8 to 16 ms without GLOBAL_EXPEDITED, and {who}", _ALLOW)
    return ok("membarrier", "GLOBAL_EXPEDITED is offered" + (" and in use" if in_use else ""))


def logout(uid: int, *, removes: bool, lingers: bool) -> Finding:
    """Whether logind deletes the ring at the logout of the daemon's user. `removes`: whether it does so for users."""
    if not removes or uid <= _SYSTEM_UID_MAX or lingers:
        return ok("RemoveIPC", f"logind leaves the shared memory of uid {uid} alone at logout")
    remedy = (
        "`loginctl enable-linger`, or RemoveIPC=no in /etc/systemd/logind.conf.d/tensord.conf, or run the daemon as a "
        "system user (`tensorctl install` as root)"
    )
    why = f"logind deletes all shared memory of uid {uid} at the last logout, the ring included"
    return warn("RemoveIPC", why, remedy)


def removes_ipc() -> bool:
    """Whether logind deletes a user's shared memory at logout, as it says itself; False without logind."""
    place = "org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager", "RemoveIPC"
    try:
        asked = subprocess.run(("busctl", "get-property", *place), capture_output=True, text=True, timeout=5.0)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.stdout.strip() == "b true"


def lingers(uid: int, root: Path = Path("/")) -> bool:
    """Whether a user's services continue after logout."""
    try:
        return (root / "var/lib/systemd/linger" / pwd.getpwuid(uid).pw_name).exists()
    except (KeyError, OSError):
        return False


def leftovers(found: Sequence[Leftover]) -> list[Finding]:
    """One finding for each instance that no daemon serves."""
    findings = []
    for left in found:
        if not left.served:
            owned = f"{counted(len(left.segments), 'segment', 'segments')} of uid {left.uid}"
            text = f"instance {left.instance} holds {size(left.taken_bytes)} in {owned}, and no daemon serves it"
            purge = f"`tensorctl purge --instance {left.instance}`"
            findings.append(warn("leftovers", text, f"start its daemon again, which continues with it, or {purge}"))
    return findings or [ok("leftovers", "no shared memory without a daemon")]


def findings_text(findings: Sequence[Finding]) -> str:
    rows = []
    for check, level, text, remedy in findings:
        rows.append((f"{level:<4}  {check}", text))
        if remedy:
            rows.append(("", f"-> {remedy}"))
    sums = Counter(finding.level for finding in findings)
    return f"{pairs(rows)}\n\n{', '.join(f'{sums[level]} {level}' for level in Level)}"


@click.command()
@as_json
@pass_daemon
def doctor(daemon: Daemon, as_json: bool) -> None:
    """Checks the environment of a daemon, and says what to do.

    Checks sockets, the daemon behind them, versions, its health and gauges, the configuration, memory, the fence,
    deletion at logout, and memory of ended daemons. Exit code 1 if anything FAILs.
    """
    findings = list(diagnose(daemon))
    show([finding._asdict() for finding in findings], as_json, lambda _: findings_text(findings))
    raise Exit(1 if any(finding.level is Level.FAIL for finding in findings) else 0)
