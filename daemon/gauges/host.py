"""The host's memory, as it is left to this process: the limits of its cgroup, or what the machine has available.

Owns: which limit counts, what counts as used, memory stalls (PSI) as they are shown. Does not own the ring's own size.

Used, of a cgroup: memory.current without inactive_file, the page cache that the kernel takes back first; the ring is
shared memory, and stays in. Of the machine: MemTotal − MemAvailable.
Sources: Documentation/admin-guide/cgroup-v2.rst, filesystems/proc.rst and accounting/psi.rst of the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...ipc.modes import HOST_GAUGE, Tier
from .offers import offer
from .reading import GaugeFailed, Reading, Result

_SHOWN: Final = (("some", "avg10"), ("some", "avg60"), ("full", "avg10"))


@dataclass(frozen=True, slots=True)
class _Bound:
    """Something that memory can be too little for: a cgroup with a limit, or the machine."""

    of: str
    used_bytes: int
    total_bytes: int
    stalls: Path


class HostSource:
    """The gauge `host`. The tightest of this process's cgroup and those above it counts, by share.

    Shown besides: `of`, a cgroup or the machine; `psi_some_avg10`, `psi_some_avg60` and `psi_full_avg10`, the
    percentage of time that some or all tasks there stood still, waiting for memory, over 10 or 60 s.

    Args:
        root: where cgroup v2 is mounted. proc: where /proc is.
    """

    name: Final = "host"

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> None:
        self._root = root
        self._proc = proc

    def read(self, now: float) -> Result:
        """As in Source."""
        bound = self._bound()
        shown = {"of": bound.of, **_stalls(bound.stalls)}
        return {HOST_GAUGE: Reading(bound.used_bytes, bound.total_bytes, shown)}

    def close(self) -> None:
        """As in Source."""

    def pressure_files(self) -> list[Path]:
        """Where stalls for memory can be waited for, best first: the cgroup that counts now, then the machine."""
        machine = self._proc / "pressure/memory"
        try:
            found = self._bound().stalls
        except GaugeFailed:
            return [machine]
        return [found] if found == machine else [found, machine]

    def _bound(self) -> _Bound:
        machine = self._machine()
        # A limit that the machine's own memory lies below is none.
        limited = [each for each in self._cgroups() if each.total_bytes < machine.total_bytes]
        return max(limited, key=lambda each: each.used_bytes / each.total_bytes, default=machine)

    def _machine(self) -> _Bound:
        file = self._proc / "meminfo"
        found = dict(re.findall(r"^(\w+):\s+(\d+) kB", _text(file), re.MULTILINE))
        try:
            total_bytes, available_bytes = (int(found[name]) * 1024 for name in ("MemTotal", "MemAvailable"))
        except KeyError as error:
            raise GaugeFailed(f"{file} has no line {error.args[0]}") from None
        return _Bound("machine", total_bytes - available_bytes, total_bytes, self._proc / "pressure/memory")

    def _cgroups(self) -> Iterator[_Bound]:
        own = re.search(r"^0::/(.*)$", _text(self._proc / "self/cgroup"), re.MULTILINE)
        folder = self._root / (own[1] if own else "")
        for place in (folder, *folder.parents):
            found = self._cgroup(place)
            if found is not None:
                yield found
            if place == self._root:
                return

    def _cgroup(self, folder: Path) -> _Bound | None:
        try:
            limit = (folder / "memory.max").read_text().strip()
        except FileNotFoundError:
            return None  # the root, a folder without the controller, or no cgroup v2 at all
        except OSError as error:
            raise GaugeFailed(str(error)) from error
        if limit == "max":
            return None
        inactive = re.search(r"^inactive_file (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
        total_bytes = _number(folder / "memory.max", limit)
        current_bytes = _number(folder / "memory.current", _text(folder / "memory.current").strip())
        # The two are not read at the same instant.
        used_bytes = max(0, current_bytes - (int(inactive[1]) if inactive else 0))
        if not total_bytes:
            raise GaugeFailed(f"{folder}/memory.max is 0")
        of = "cgroup /" + str(folder.relative_to(self._root)).removeprefix(".")
        return _Bound(of, used_bytes, total_bytes, folder / "memory.pressure")


def _stalls(file: Path) -> dict[str, Any]:
    """Nothing where the kernel does not tell: a gauge is read without them as well."""
    try:
        lines = {line.split()[0]: line for line in file.read_text().splitlines() if line}
        found = {
            f"psi_{who}_{over}": re.search(rf"\b{over}=([0-9.]+)", lines[who]) for who, over in _SHOWN if who in lines
        }
        return {name: float(share[1]) for name, share in found.items() if share}
    except (OSError, ValueError):
        return {}


def _number(file: Path, text: str) -> int:
    if not text.isdecimal():
        raise GaugeFailed(f"{file} says {text[:64]!r}; wanted: a number of bytes")
    return int(text)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise GaugeFailed(str(error)) from error


offer(
    "host",
    Tier.HOST,
    lambda given: HostSource(),
    auto=1,
    says="the cgroup's limit, or MemAvailable where it has none",
    by_name=False,
)
