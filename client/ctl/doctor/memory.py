"""Checks of memory: /dev/shm, the memory of machine and cgroup, locked memory, the fence. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ....shm.cgroups import Cgroup
from ....shm.layout import LANE_BYTES
from ....shm.segments import MAKE_WRITABLE
from ..tables import number, share, size
from .finding import Finding, fail, ok, warn

# Warns if less than this share of memory remains.
_SCARCE: Final = 0.05
# Warns if fewer than this number of further clients could attach.
_LANES_FEW: Final = 64


@dataclass(frozen=True, slots=True)
class RingRoom:
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

    @property
    def missing_bytes(self) -> int:
        return max(0, self.ring_bytes - self.ready_bytes)


def shm(room: RingRoom) -> Finding:
    """Whether /dev/shm has room for the ring, and for the lanes of the next clients."""
    if room.shm_problem:
        return fail(
            "/dev/shm",
            f"{room.shm_problem}: neither the daemon nor a client can get memory",
            MAKE_WRITABLE,
        )
    there = f"/dev/shm has {size(room.shm_total_bytes)}, {size(room.shm_free_bytes)} free"
    if room.missing_bytes > room.shm_free_bytes:
        return fail(
            "/dev/shm",
            f"{there}; the ring of {size(room.ring_bytes)} needs {size(room.missing_bytes)} more",
            f"mount -o remount,size={_gib(room.shm_total_bytes + room.missing_bytes - room.shm_free_bytes)}G /dev/shm "
            "(in a container: --shm-size), set a smaller ring_bytes, or remove other files there",
        )
    lanes = (room.shm_free_bytes - room.missing_bytes) // LANE_BYTES
    if lanes < _LANES_FEW:
        more = (
            f"mount -o remount,size={_gib(room.shm_total_bytes) + 1}G /dev/shm (in a container: --shm-size), free what "
            "others left there, or have the ring give memory back with `tensorctl limit SIZE`"
        )
        text = f"{there}; each client takes {size(LANE_BYTES)}: there is room for {lanes} more"
        return fail("/dev/shm", text, more) if lanes < 1 else warn("/dev/shm", text, more)
    return ok("/dev/shm", f"{there}; the ring {_has(room)}")


def available(room: RingRoom) -> Finding:
    """Whether the machine has memory for the ring, and some to spare."""
    there = f"{size(room.available_bytes)} of {size(room.memory_bytes)} are available"
    left = room.available_bytes - room.missing_bytes
    if left < 0:
        return fail(
            "memory",
            f"{there}; the ring of {size(room.ring_bytes)} needs {size(room.missing_bytes)} more",
            "set a smaller ring_bytes, or free memory; otherwise the daemon refuses to start",
        )
    if left < _SCARCE * room.memory_bytes:
        return warn(
            "memory",
            f"{there}; with the ring of {size(room.ring_bytes)} {size(left)} are left",
            "`tensorctl limit SIZE` or a smaller ring_bytes before the kernel kills a process",
        )
    return ok("memory", f"{there}; the ring {_has(room)}")


def cgroup(room: RingRoom) -> Finding:
    """Whether the limits of the daemon's cgroup, and of those above it, leave room for the ring."""
    if not room.cgroups:
        return ok("cgroup", "no visible memory limit")
    tight = min(room.cgroups, key=lambda limited: limited.limit_bytes - limited.used_bytes)
    left = tight.limit_bytes - tight.used_bytes
    text = (
        f"{tight.path} may have {size(tight.limit_bytes)} and uses {size(tight.used_bytes)} "
        f"({share(tight.used_bytes, tight.limit_bytes)})"
    )
    if room.missing_bytes > left:
        return fail(
            "cgroup",
            f"{text}; the ring needs {size(room.missing_bytes)} more",
            "raise MemoryMax= of the service (in a container: --memory) above ring_bytes, or set a smaller ring_bytes",
        )
    if left - room.missing_bytes < _SCARCE * tight.limit_bytes:
        return warn(
            "cgroup",
            f"{text}; with the ring {size(left - room.missing_bytes)} are left",
            "raise MemoryMax= of the service (in a container: --memory), or set a smaller ring_bytes",
        )
    return ok("cgroup", text)


def sizes(configured: Mapping[str, int | None] | None, ring_bytes: int, max_entries: int) -> Finding:
    """Whether ring and index are as large as configured.

    `configured`: None without a daemon; a value is None if it is derived from this machine.
    """
    check = "sizes"
    if configured is None:
        return ok(check, "no daemon to ask")
    ring, entries = configured["ring_bytes"], configured["max_entries"]
    asked = "" if ring is None else f" of {size(ring)} asked"
    text = f"ring_bytes {size(ring_bytes)}{asked}, max_entries {number(max_entries)}"
    if ring is not None and ring > ring_bytes:
        return warn(
            check, f"{text}: the ring is smaller than configured", "free memory, and restart the daemon: it grows"
        )
    if entries is not None and entries > max_entries:
        return warn(
            check,
            f"{text}; max_entries is configured as {number(entries)}, and the index has no room for more",
            "stop the daemon, `tensorctl purge`, which drops every entry, and start it: it creates a new index",
        )
    return ok(check, text)


def memlock(whose: str, limit_bytes: int | None, ring_bytes: int, *, privileged: bool) -> Finding:
    """Whether the ring can be locked, as GPU drivers do to copy from it. `limit_bytes` None: no limit."""
    if privileged:
        return ok("memlock", f"{whose} may lock any amount (CAP_IPC_LOCK)")
    if limit_bytes is None:
        return ok("memlock", f"{whose} has no limit")
    text = f"{whose} may lock {size(limit_bytes)}, the ring has {size(ring_bytes)}"
    if limit_bytes >= ring_bytes:
        return ok("memlock", text)
    return warn(
        "memlock",
        f"{text}: it works, but a GPU cannot copy from the ring without staging",
        "LimitMEMLOCK=infinity in the service, or `* - memlock unlimited` in /etc/security/limits.conf",
    )


def membarrier(*, plain: bool, expedited: bool, in_use: str | None) -> Finding:
    """Whether the kernel offers the fence. `in_use`: the kind that the daemon uses; None without a daemon."""
    if not plain and not expedited:
        return fail(
            "membarrier",
            "the kernel, or a sandbox's filter, refuses membarrier(2), without which no memory can be reused",
            "Linux 4.16 or newer; allow the system call membarrier in the container's seccomp profile",
        )
    if not expedited:
        return warn(
            "membarrier",
            "GLOBAL_EXPEDITED is not offered here: each reclaim takes 8 to 16 ms",
            "Linux 4.16 or newer; allow the system call membarrier in the container's seccomp profile",
        )
    if in_use == "global":
        return warn(
            "membarrier",
            "GLOBAL_EXPEDITED is offered, but some client could not register for it: each reclaim takes 8 to 16 ms",
            "`tensorctl clients` lists them; allow membarrier in the seccomp profile of those in containers",
        )
    return ok("membarrier", "GLOBAL_EXPEDITED is offered" + (" and in use" if in_use else ""))


def _has(room: RingRoom) -> str:
    if not room.missing_bytes:
        return f"has its {size(room.ring_bytes)}"
    return f"of {size(room.ring_bytes)} fits"


def _gib(value_bytes: int) -> int:
    return -(-value_bytes // (1 << 30))
