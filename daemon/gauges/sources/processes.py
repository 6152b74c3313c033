"""The processes that use a GPU, as a reading shows them beside the used bytes.

Owns: the names of processes, the form of the list, and the list that the amdgpu driver keeps for computing (kfd).
Does not own the calls of a library (nvidia).

A driver tells pids of the host. Where the daemon runs in a pid namespace of its own, as in a container, such a pid is
another process there or none: then the process is not `seen`, and has no name. Neither has a process that is hidden
from the daemon's user (hidepid, ProtectProc).

Invariants: nothing here raises for what a process does meanwhile, as end. At most PROCESSES_MAX processes of a GPU are
listed, those with the most bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..reading import pci_name

PROCESSES_MAX: Final = 64
_NAME_BYTES_MAX: Final = 64
_HOST_NAMESPACE: Final = "pid:[4026531836]"
"""The first pid namespace of a kernel: its number is fixed (PROC_PID_INIT_INO)."""


def listed(used: Mapping[int, int | None], root: Path = Path("/")) -> dict[str, Any]:
    """The fields for status of a GPU's processes. `seen`: the pid is that of the same process for the daemon.

    Args:
        used: bytes by the pid of the host; None if the driver does not tell them.
        root: the folder that has /proc.
    """
    most = sorted(used.items(), key=lambda each: (-(each[1] or 0), each[0]))[:PROCESSES_MAX]
    seen = _sees_pids_of_the_host(root)
    return {
        "processes": [
            {"pid": pid, "name": _name(root, pid) if seen else None, "bytes": size_bytes, "seen": seen}
            for pid, size_bytes in most
        ]
    }


def computing(root: Path = Path("/")) -> dict[str, dict[int, int | None]] | None:
    """By the name of each AMD GPU: the bytes that each process which computes there uses, by pid.

    The partitions of a card that share an address are counted, as their gauges are (amd).

    Args:
        root: the folder that has /sys.

    Returns:
        None if the driver shows no such list.
    """
    folder = root / "sys/class/kfd/kfd"
    try:
        processes = [(int(each.name), each) for each in (folder / "proc").iterdir() if each.name.isdecimal()]
    except OSError:
        return None
    found: dict[str, dict[int, int | None]] = {}
    for gpu, name in _gpus(folder / "topology/nodes").items():
        used = ((pid, _number(each / f"vram_{gpu}")) for pid, each in processes)
        # Every process that computes has a file for each GPU, also for those that it does not use.
        found[name] = {pid: size_bytes for pid, size_bytes in used if size_bytes}
    return found


def _gpus(folder: Path) -> dict[int, str]:
    """The names of the GPUs by their numbers in kfd. A node without a number is a processor."""
    try:
        nodes = sorted((each for each in folder.iterdir() if each.name.isdecimal()), key=lambda each: int(each.name))
    except OSError:
        return {}
    names: dict[int, str] = {}
    for node in nodes:
        gpu = _number(node / "gpu_id")
        properties = _properties(node / "properties")
        if not gpu or "location_id" not in properties:
            continue
        place = properties["location_id"]
        domain, bus, device, function = properties.get("domain", 0), place >> 8 & 0xFF, place >> 3 & 0x1F, place & 0x7
        name = pci_name(domain, bus, device, function)
        while name in names.values():
            function += 1
            name = pci_name(domain, bus, device, function)
        names[gpu] = name
    return names


def _properties(file: Path) -> dict[str, int]:
    try:
        pairs = [line.split() for line in file.read_text(encoding="ascii", errors="replace").splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(file: Path) -> int | None:
    try:
        text = file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _sees_pids_of_the_host(root: Path) -> bool:
    try:
        return os.readlink(root / "proc/self/ns/pid") == _HOST_NAMESPACE
    except OSError:
        return False


def _name(root: Path, pid: int) -> str | None:
    """The name of a process; None if there is none of that pid."""
    try:
        with (root / f"proc/{pid}/comm").open("rb") as file:
            return file.read(_NAME_BYTES_MAX).decode(errors="replace").strip()
    except OSError:
        return None
