"""The memory limits of a process's cgroup, and of all cgroups above it, of cgroup v1 and v2.

Owns: the way from a process to the folders of its cgroups, the names of their files, their limits, which part of their
memory the kernel can take back, and how much memory they leave. Does not own: what a limit means for a ring.
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
_FIGURE: Final = re.compile(r"^(\w+) (\d+)$", re.MULTILINE)
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
        """The bytes that the kernel can take back at once, by the text of memory.stat.

        That is clean page cache, used twice or not, and the slab of dentries and inodes, as in MemAvailable. The ring,
        other shared memory and locked files are in neither list of file pages. Version 1 does not tell the slab.
        """
        prefix, dirty = ("", "file_dirty") if self.version == 2 else ("total_", "dirty")
        writeback = "file_writeback" if self.version == 2 else "writeback"
        found = {name: int(number) for name, number in _FIGURE.findall(stat)}
        file, unclean = (
            sum(found.get(prefix + name, 0) for name in names)
            for names in (("active_file", "inactive_file"), (dirty, writeback))
        )
        return max(0, file - unclean) + found.get("slab_reclaimable", 0)


def cgroup_folders(pid: int | None = None, root: Path = ROOT, proc: Path = PROC) -> Iterator[CgroupFolder]:
    """The folders of a process's cgroups, by default of this one: its own, then those above it up to the mount.

    Args:
        root: where cgroup v2 is taken to be mounted if /proc/self/mountinfo names no mount.
    """
    membership = _text(proc / (str(pid) if pid else "self") / "cgroup")
    for version, shown, point in _mounts(proc, root):
        own = _OWN[version].search(membership)
        below = _below(own[1] if own else "/", shown)
        for place in (below, *below.parents):
            yield CgroupFolder(point / place, "/" + str(place).removeprefix("."), version)


def cgroups(pid: int | None = None, root: Path = ROOT, proc: Path = PROC) -> Iterator[Cgroup]:
    """Every memory limit that applies to a process, by default this one, from its own cgroup upwards. Limits that
    cannot be read are left out."""
    for folder in cgroup_folders(pid, root, proc):
        limit, used, stat = (_text(file).strip() for file in (folder.limit, folder.usage, folder.stat))
        if limit.isdigit() and used.isdigit():
            limit_bytes = min(int(limit), hierarchical_limit(folder))
            if limit_bytes < NO_LIMIT_BYTES:
                yield Cgroup(folder.name, limit_bytes, max(0, int(used) - folder.reclaimable_bytes(stat)))


def available_bytes(proc: Path = PROC) -> int:
    """Memory that this process can use without swapping, in bytes: MemAvailable, or the cgroup's remaining memory if
    that is less."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(proc / "meminfo"), re.MULTILINE)
    available = int(found[1]) * 1024 if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([available, *(max(0, each.limit_bytes - each.used_bytes) for each in cgroups(proc=proc))])


def hierarchical_limit(folder: CgroupFolder) -> int:
    """The limit of a cgroup of version 1 or of one above it, that a container may not see; else NO_LIMIT_BYTES."""
    if folder.version == 2:
        return NO_LIMIT_BYTES
    found = re.search(r"^hierarchical_memory_limit (\d+)$", _text(folder.stat), re.MULTILINE)
    return min(int(found[1]), NO_LIMIT_BYTES) if found else NO_LIMIT_BYTES


def _mounts(proc: Path, root: Path) -> list[tuple[int, str, Path]]:
    """(version, the cgroup at the mount, the mount point) of each mount with the memory controller, or of version 2."""
    found = []
    for shown, point, kind, options in _MOUNT.findall(_text(proc / "self/mountinfo")):
        if kind == "cgroup2" or "memory" in options.split(","):
            found.append((2 if kind == "cgroup2" else 1, _unescaped(shown), Path(_unescaped(point))))
    return found or [(2, "/", root)]


def _below(own: str, shown: str) -> PurePosixPath:
    """The way from a mount, which shows the cgroup `shown`, to the cgroup `own`; "." if it is not below the mount."""
    path = PurePosixPath(own)
    if ".." in path.parts or not path.is_relative_to(shown):
        return PurePosixPath()
    return path.relative_to(shown)


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
