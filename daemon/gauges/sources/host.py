"""A source for the host's memory: the limit of this process's cgroup, or the memory of the machine.

Used bytes of a cgroup: its memory without what the kernel can take back (`CgroupFolder.reclaimable_bytes`). The ring is
shared memory and counts as used. Used bytes of the machine: MemTotal − MemAvailable. Page cache that is read again and
again counts in neither: whether its loss costs time is told by the stalls. A cgroup of version 1 has no pressure file;
its stalls are the machine's.
Sources: Documentation/filesystems/proc.rst and accounting/psi.rst of the kernel, and those of `shm.cgroups`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from ....ipc.messages.modes import HOST_GAUGE
from ....shm.ring.cgroups import NO_LIMIT_BYTES, CgroupFolder, cgroup_folders, hierarchical_limit
from ..reading import GaugeFailed, Reading, Result, Source, number_in, text_of

_Bound = tuple[Reading, Path]
"""What a limit on memory leaves, that of a cgroup or of the machine; and its pressure file."""


class HostSource(Source):
    """The gauge `host`. It measures the fullest of this process's cgroup and the cgroups above it, by used share.
    Status also shows `of`, the cgroup or the machine. `root`: where cgroup v2 is taken to be mounted if
    /proc/self/mountinfo names no mount. `proc`: the mount point of /proc."""

    name: Final = "host"

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> None:
        self._root = root
        self._proc = proc

    def read(self, now: float) -> Result:
        return {HOST_GAUGE: self._bound()[0]}

    def pressure_files(self) -> list[Path]:
        """The pressure files for a stall trigger, best first: that of the cgroup in use now, then the machine's."""
        machine = self._proc / "pressure/memory"
        try:
            _, found = self._bound()
        except GaugeFailed:
            return [machine]
        return [found] if found == machine else [found, machine]

    def _bound(self) -> _Bound:
        machine = self._machine()
        text_of(self._proc / "self/cgroup")  # a failure, unless it can be read
        found = filter(None, map(self._cgroup, cgroup_folders(None, self._root, self._proc)))
        # A limit above the machine's memory has no effect.
        limited = [each for each in found if each[0].total_bytes < machine[0].total_bytes]
        return max(limited, key=lambda each: each[0].used_bytes / each[0].total_bytes, default=machine)

    def _machine(self) -> _Bound:
        file = self._proc / "meminfo"
        found = dict(re.findall(r"^(\w+):\s+(\d+) kB", text_of(file), re.MULTILINE))
        try:
            total_bytes, available_bytes = (int(found[name]) * 1024 for name in ("MemTotal", "MemAvailable"))
        except KeyError as error:
            raise GaugeFailed(f"{file} has no line for {error.args[0]}") from None
        used = Reading(total_bytes - available_bytes, total_bytes, {"of": "machine"})
        return used, self._proc / "pressure/memory"

    def _cgroup(self, folder: CgroupFolder) -> _Bound | None:
        if not folder.limit.exists() or text_of(folder.limit).strip() == "max":
            return None  # the root, a folder without the controller, or no cgroups at all; or no limit
        total_bytes = min(number_in(folder.limit), hierarchical_limit(folder))
        if folder.version == 1 and total_bytes >= NO_LIMIT_BYTES:
            return None
        reclaimable_bytes = folder.reclaimable_bytes(text_of(folder.stat))
        # The two are not read at the same instant.
        used_bytes = max(0, number_in(folder.usage) - reclaimable_bytes)
        if not total_bytes:
            raise GaugeFailed(f"{folder.limit} is 0")
        stalls = folder.path / "memory.pressure" if folder.version == 2 else self._proc / "pressure/memory"
        return Reading(used_bytes, total_bytes, {"of": f"cgroup {folder.name}"}), stalls
