"""The memory limits of a process's cgroup, and of all cgroups above it, of cgroup v1 and v2.

Owns: the way from a process to the folders of its cgroups, the names of their files, their limits, which part of their
memory the kernel can take back, and how much memory they leave.

Invariants: changes nothing; reading raises no exception.

Sources: Documentation/admin-guide/cgroup-v2.rst, admin-guide/cgroup-v1/memory.rst and filesystems/proc.rst of the
kernel.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from msgspec import Struct

ROOT: Final = Path("/sys/fs/cgroup")
PROC: Final = Path("/proc")
NO_LIMIT_BYTES: Final = 1 << 62
"""Version 1 shows LONG_MAX, rounded down to pages, for no limit."""
_MOUNT: Final = re.compile(r"^\S+ \S+ \S+ (\S+) (\S+) .*? - (cgroup2?) \S+ (\S+)$", re.MULTILINE)
_OWN: Final = {
    1: re.compile(r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:(/.*)$", re.MULTILINE),
    2: re.compile(r"^0::(/.*)$", re.MULTILINE),
}


class Cgroup(Struct, frozen=True):
    """A memory limit on a process's cgroup or one above it. `used_bytes` includes the ring's pages, and leaves out what
    the kernel can take back (`reclaimable_bytes`)."""

    path: str
    limit_bytes: int
    used_bytes: int


class CgroupFolder(Struct, frozen=True):
    """The folder of a cgroup with the memory controller. `name`: as below its mount. `version`: 1 or 2."""

    path: Path
    name: str
    version: int

    @property
    def limit(self) -> Path:
        """The file with the limit: bytes; in version 2 also "max", in version 1 a very large number, for no limit."""
        return self.path / ("memory.max" if self.version == 2 else "memory.limit_in_bytes")

    @property
    def usage(self) -> Path:
        """The file with the used bytes, those of the cgroups below included."""
        return self.path / ("memory.current" if self.version == 2 else "memory.usage_in_bytes")

    @property
    def stat(self) -> Path:
        """The file with the used bytes by kind."""
        return self.path / "memory.stat"

    def reclaimable_bytes(self, stat: str) -> int:
        """The bytes that the kernel can take back at once, by the text of memory.stat. That is clean page cache, used
        twice or not, and the slab of dentries and inodes, as in MemAvailable. The ring, other shared memory and locked
        files are in neither list of file pages. Version 1 does not tell the slab."""
        found = {name: int(number) for name, number in re.findall(r"(?m)^(\w+) (\d+)$", stat)}
        prefix, unclean = ("", "file_") if self.version == 2 else ("total_", "total_")
        clean = sum(found.get(f"{prefix}{name}", 0) for name in ("active_file", "inactive_file"))
        clean -= sum(found.get(f"{unclean}{name}", 0) for name in ("dirty", "writeback"))
        return max(0, clean) + found.get("slab_reclaimable", 0)


def cgroup_folders(pid: int | None = None, root: Path = ROOT, proc: Path = PROC) -> Iterator[CgroupFolder]:
    """The folders of a process's cgroups, by default of this one: its own, then those above it up to the mount. `root`:
    where cgroup v2 is taken to be mounted if /proc/self/mountinfo names no mount."""
    membership = text_of(proc / (str(pid) if pid else "self") / "cgroup")
    mounts = []
    for shown, point, kind, options in _MOUNT.findall(text_of(proc / "self/mountinfo")):
        if kind == "cgroup2" or "memory" in options.split(","):
            mounts.append((2 if kind == "cgroup2" else 1, _unescaped(shown), Path(_unescaped(point))))
    for version, shown, point in mounts or [(2, "/", root)]:
        own = _OWN[version].search(membership)
        path = PurePosixPath(own[1] if own else "/")
        # A mount may show another part of the tree than that of the process: then its top is all there is to read.
        seen = ".." not in path.parts and path.is_relative_to(shown)
        below = path.relative_to(shown) if seen else PurePosixPath()
        for place in (below, *below.parents):
            yield CgroupFolder(point / place, "/" + str(place).removeprefix("."), version)


def cgroups(pid: int | None = None, root: Path = ROOT, proc: Path = PROC) -> Iterator[Cgroup]:
    """Every memory limit that applies to a process, by default this one, from its own cgroup upwards. Limits that
    cannot be read are left out."""
    for folder in cgroup_folders(pid, root, proc):
        limit, used, stat = (text_of(file).strip() for file in (folder.limit, folder.usage, folder.stat))
        if limit.isdigit() and used.isdigit():
            limit_bytes = min(int(limit), hierarchical_limit(folder))
            if limit_bytes < NO_LIMIT_BYTES:
                yield Cgroup(folder.name, limit_bytes, max(0, int(used) - folder.reclaimable_bytes(stat)))


def memory_bytes(proc: Path = PROC) -> dict[str, int]:
    """The figures of /proc/meminfo in bytes, by name."""
    found = re.findall(r"(?m)^(\w+):\s+(\d+) kB", text_of(proc / "meminfo"))
    return {name: 1024 * int(kib) for name, kib in found}


def available_bytes(proc: Path = PROC) -> int:
    """Memory that this process can use without swapping, in bytes: MemAvailable, or the cgroup's remaining memory if
    that is less."""
    available = memory_bytes(proc).get("MemAvailable", os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min([available, *(max(0, each.limit_bytes - each.used_bytes) for each in cgroups(proc=proc))])


def hierarchical_limit(folder: CgroupFolder) -> int:
    """The limit of a cgroup of version 1 or of one above it, that a container may not see; else NO_LIMIT_BYTES."""
    found = re.search(r"(?m)^hierarchical_memory_limit (\d+)$", text_of(folder.stat) if folder.version == 1 else "")
    return min(int(found[1]), NO_LIMIT_BYTES) if found else NO_LIMIT_BYTES


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def text_of(path: Path) -> str:
    """The content of a file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
