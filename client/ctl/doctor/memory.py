"""Checks of memory: /dev/shm, the memory of machine and cgroup, the fence. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from ....shm.ring.cgroups import Cgroup
from ....shm.ring.layout import LANE_BYTES
from ....shm.ring.segments import MAKE_WRITABLE
from ..output import share, size
from .finding import Finding, fail, ok, warn

# Warns if less than this share of memory remains.
_SCARCE: Final = 0.05
# Warns if fewer than this number of further clients could attach.
_LANES_FEW: Final = 64
_ALLOW: Final = "Linux 4.16 or newer; allow the system call membarrier in the container's seccomp profile"


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

    @property
    def missing_bytes(self) -> int:
        return max(0, self.ring_bytes - self.ready_bytes)

    def _rest(self, check: str, there: str, free_bytes: int, of_bytes: int, remedy: str) -> Finding:
        """Whether the ring fits into what is free, and leaves a share of the whole."""
        left = free_bytes - self.missing_bytes
        ring = f"the ring of {size(self.ring_bytes)}"
        if left < 0:
            return fail(check, f"{there}; {ring} needs {size(self.missing_bytes)} more", remedy)
        if left < _SCARCE * of_bytes:
            return warn(check, f"{there}; with {ring} {size(left)} are left", remedy)
        return ok(check, f"{there}; {ring} {'fits' if self.missing_bytes else 'has its memory'}")


def shm(room: RingRoom) -> Finding:
    """Whether /dev/shm has room for the ring, and for the lanes of the next clients."""
    if room.shm_problem:
        text = f"{room.shm_problem}: neither the daemon nor a client can get memory"
        return fail("/dev/shm", text, MAKE_WRITABLE)
    there = f"/dev/shm has {size(room.shm_total_bytes)}, {size(room.shm_free_bytes)} free"
    left = room.shm_free_bytes - room.missing_bytes
    if 0 <= left < _LANES_FEW * LANE_BYTES:
        lanes = left // LANE_BYTES
        text = f"{there}; each client takes {size(LANE_BYTES)}: there is room for {lanes} more"
        more = (
            f"mount -o remount,size={_gib(room.shm_total_bytes) + 1}G /dev/shm (in a container: --shm-size), free what "
            "others left there, or have the ring give memory back with `tensorctl limit SIZE`"
        )
        return warn("/dev/shm", text, more) if lanes else fail("/dev/shm", text, more)
    more = (
        f"mount -o remount,size={_gib(room.shm_total_bytes - left)}G /dev/shm "
        "(in a container: --shm-size), set a smaller ring_bytes, or remove other files there"
    )
    return room._rest("/dev/shm", there, room.shm_free_bytes, 0, more)


def available(room: RingRoom) -> Finding:
    """Whether the machine has memory for the ring, and some to spare."""
    there = f"{size(room.available_bytes)} of {size(room.memory_bytes)} are available"
    remedy = "`tensorctl limit SIZE`, a smaller ring_bytes, or free memory, before the kernel kills a process"
    return room._rest("memory", there, room.available_bytes, room.memory_bytes, remedy)


def cgroup(room: RingRoom) -> Finding:
    """Whether the limits of the daemon's cgroup, and of those above it, leave room for the ring."""
    if not room.cgroups:
        return ok("cgroup", "no visible memory limit")
    tight = min(room.cgroups, key=lambda limited: limited.limit_bytes - limited.used_bytes)
    text = (
        f"{tight.path} may have {size(tight.limit_bytes)} and uses {size(tight.used_bytes)} "
        f"({share(tight.used_bytes, tight.limit_bytes)})"
    )
    remedy = "raise MemoryMax= of the service (in a container: --memory) above ring_bytes, or set a smaller ring_bytes"
    return room._rest("cgroup", text, tight.limit_bytes - tight.used_bytes, tight.limit_bytes, remedy)


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


def _gib(value_bytes: int) -> int:
    return -(-value_bytes // (1 << 30))
