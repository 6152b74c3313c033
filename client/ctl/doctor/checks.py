"""The checks: each makes a finding of facts that are arguments. Pure."""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ....errors import TensordError
from ....ipc.messages.modes import HOST_GAUGE
from ....shm.ring.cgroups import Cgroup
from ....shm.ring.segments import MAKE_WRITABLE
from ..orders.leftovers import Leftover
from ..output import counted, share, size
from .finding import Finding, fail, ok, warn

# Warns if less than this share of memory remains.
_SCARCE: Final = 0.05
_SYSTEM_UID_MAX: Final = 999
_NEEDS_GROUP: Final = "socket_mode = 0660 and socket_group in the configuration, SocketMode= in the socket unit"
_SAME: Final = "install the same version on both sides, and restart the daemon: it keeps its entries"
_ALLOW: Final = "Linux 4.16 or newer; allow the system call membarrier in the container's seccomp profile"


class Serving(NamedTuple):
    """A daemon that holds the lock of its instance."""

    instance: str
    pid: int


class RingRoom(NamedTuple):
    """The memory for a ring of `ring_bytes`, of which `ready_bytes` are allocated; 0 without a daemon."""

    ring_bytes: int
    ready_bytes: int
    shm_total_bytes: int
    shm_free_bytes: int
    available_bytes: int
    memory_bytes: int
    cgroups: tuple[Cgroup, ...] = ()
    shm_problem: str = ""
    """Why no file can be made in /dev/shm, whatever is free."""


def socket(
    what: str, path: Path, folder_mode: int, mode: int, error: TensordError | None, without_file: Sequence[Serving] = ()
) -> Finding:
    """Whether the daemon answers on a socket, and nobody else can take its place. `error`: why it does not. The modes
    are those of the socket and its folder. `without_file`: the daemons that may listen on a socket of this path though
    its file is gone."""
    check = f"{what} socket"
    if without_file:
        lives = " or ".join(f"a daemon of instance {each.instance} lives, pid {each.pid}" for each in without_file)
        remedy = (
            f"remove what stands at {path}, and let the daemon write to {path.parent}: it makes its socket anew within "
            "seconds. Or restart it: its entries stay, and attached clients attach again by themselves"
        )
        return fail(check, f"nobody listens at {path}; {lives}: its socket is gone", remedy)
    if error is not None:
        return fail(check, str(error), "`systemctl status tensord` and `journalctl -u tensord` have the daemon's side")
    if folder_mode & 0o002 and not folder_mode & stat.S_ISVTX:
        return fail(
            check, f"every user may write to {path.parent}, and so replace the socket", f"chmod 0755 {path.parent}"
        )
    if what == "control" and mode & 0o002:
        return warn(check, f"{path}: every user of this host may read and write every entry", _NEEDS_GROUP)
    return ok(check, f"the daemon answers at {path}")


def versions(client: str, daemon: str, protocol: int, daemon_protocol: int) -> Finding:
    """Whether tensorctl and the daemon have the same version and protocol."""
    text = f"tensorctl {client} of protocol {protocol}, daemon {daemon} of protocol {daemon_protocol}"
    if protocol != daemon_protocol:
        return fail("versions", text, _SAME)
    return ok("versions", text) if client == daemon else warn("versions", text, _SAME)


def health(body: Mapping[str, Any]) -> list[Finding]:
    """The problems and notices that the daemon reports of itself."""
    told = [*body["problems"], *body["notices"]]
    remedy = "the daemon serves all the same; its log has more"
    return [warn("health", each, remedy) for each in told] or [ok("health", "the daemon reports no problem")]


def gauges(found: Sequence[Mapping[str, Any]], hardware: Mapping[str, bool]) -> Finding:
    """Whether the daemon measures the GPUs that are there; its health tells which of its sources fail. `found`: the
    gauges in its status. `hardware`: by extra ("nvidia", "amd"), whether such a GPU is present."""
    text = ", ".join(f"{gauge['gauge']} by {gauge['source']}" for gauge in found) or "none"
    present = [extra for extra, there in hardware.items() if there]
    if present and all(gauge["gauge"] == HOST_GAUGE for gauge in found):
        install = f"gauges.device = auto, and pip install 'tensord[{present[0]}]'; the daemon's log gives the reason"
        return warn("gauges", f"{text}; there is a GPU, and its memory use is unknown", install)
    return ok("gauges", text)


def configuration(error: str | None, ignored: Sequence[str], *, served: bool) -> Finding:
    """Whether a daemon started here would accept its configuration. A running daemon may have another one.

    `ignored`: a text for each unknown variable.
    """
    if error is not None:
        report = warn if served else fail
        return report("configuration", error, "correct it; a running daemon keeps its present configuration")
    if ignored:
        return warn("configuration", "; ".join(ignored), "correct the misspelt; the daemon ignores them")
    return ok("configuration", "a daemon would start with it; `tensord --check-config` lists it")


def memory(room: RingRoom) -> list[Finding]:
    """Whether /dev/shm, the machine, and the tightest limit of the daemon's cgroups have room for the ring."""
    if room.shm_problem:
        text = f"{room.shm_problem}: neither the daemon nor a client can get memory"
        return [fail("/dev/shm", text, MAKE_WRITABLE)]
    needed_bytes = max(0, room.ring_bytes - room.ready_bytes)
    gib = -(-(room.shm_total_bytes - room.shm_free_bytes + needed_bytes) // (1 << 30))
    rows = [
        (
            "/dev/shm",
            f"/dev/shm has {size(room.shm_total_bytes)}, {size(room.shm_free_bytes)} free",
            room.shm_free_bytes,
            0,
            f"mount -o remount,size={gib}G /dev/shm (in a container: --shm-size), or set a smaller ring_bytes",
        ),
        (
            "memory",
            f"{size(room.available_bytes)} of {size(room.memory_bytes)} are available",
            room.available_bytes,
            room.memory_bytes,
            "`tensorctl limit SIZE`, a smaller ring_bytes, or free memory, before the kernel kills a process",
        ),
    ]
    for tight in sorted(room.cgroups, key=lambda limited: limited.limit_bytes - limited.used_bytes)[:1]:
        used = share(tight.used_bytes, tight.limit_bytes)
        rows.append(
            (
                "cgroup",
                f"{tight.path} may have {size(tight.limit_bytes)} and uses {size(tight.used_bytes)} ({used})",
                tight.limit_bytes - tight.used_bytes,
                tight.limit_bytes,
                "raise MemoryMax= of the service (in a container: --memory), or set a smaller ring_bytes",
            )
        )
    found, ring = [], f"the ring of {size(room.ring_bytes)}"
    for check, there, free_bytes, of_bytes, remedy in rows:
        left = free_bytes - needed_bytes
        if left < 0:
            found.append(fail(check, f"{there}; {ring} needs {size(needed_bytes)} more", remedy))
        elif left < _SCARCE * of_bytes:
            found.append(warn(check, f"{there}; with {ring} {size(left)} are left", remedy))
        else:
            found.append(ok(check, f"{there}; {ring} {'fits' if needed_bytes else 'has its memory'}"))
    return found


def membarrier(*, plain: bool, expedited: bool, in_use: str | None) -> Finding:
    """Whether the kernel offers the fence. `in_use`: the kind that the daemon uses; None without a daemon."""
    if not plain and not expedited:
        why = "the kernel, or a sandbox's filter, refuses membarrier(2), without which no memory can be reused"
        return fail("membarrier", why, _ALLOW)
    if not expedited:
        return warn("membarrier", "GLOBAL_EXPEDITED is not offered here: each reclaim takes 8 to 16 ms", _ALLOW)
    if in_use == "global":
        return warn(
            "membarrier",
            "GLOBAL_EXPEDITED is offered, but some client could not register for it: each reclaim takes 8 to 16 ms",
            "`tensorctl clients` lists them; allow membarrier in the seccomp profile of those in containers",
        )
    return ok("membarrier", "GLOBAL_EXPEDITED is offered" + (" and in use" if in_use else ""))


def logout(uid: int, configuration: str, *, lingers: bool) -> Finding:
    """Whether logind deletes the ring at the logout of the daemon's user. `configuration`: logind's; empty without
    logind. RemoveIPC is on unless it says otherwise."""
    said = re.findall(r"^\s*RemoveIPC\s*=\s*(\w+)", configuration, re.MULTILINE)
    removes = bool(configuration) and (not said or said[-1].lower() not in ("no", "false", "off", "0"))
    if not removes or uid <= _SYSTEM_UID_MAX or lingers:
        return ok("RemoveIPC", f"logind leaves the shared memory of uid {uid} alone at logout")
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
