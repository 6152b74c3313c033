"""Checks that a model's files are still those that were loaded. Files are named only after the weights are in memory.

Owns: by model, the time at which this process began to load, and the folder that its name led to then. Does not own:
the names. Changes since then are detected by the kernel's timestamps of files, so no file is read.

Invariants: a file that changed after loading began is reported, unless the start of loading was not recorded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

_FILES_CLOCK: Final = 5
"""CLOCK_REALTIME_COARSE of clock_gettime(2). The kernel stamps files by this clock, or by a finer one ahead of it."""
_began: dict[str, tuple[int, tuple[int, int] | None]] = {}


def loading_begins(model: str = "") -> None:
    """Records that loading of `model` begins now. Without a name: of the model that this process is for."""
    _began[model] = time.clock_gettime_ns(_FILES_CLOCK), _place(model)


def loading_began_with_process(model: str) -> None:
    """Records that loading of `model` began no earlier than this process, if nothing else was recorded for it."""
    if model not in _began:
        # proc(5): field 22, after the name in brackets, is the process's start in ticks since the boot.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 10**9 // os.sysconf("SC_CLK_TCK")
        _began[model] = time.clock_gettime_ns(_FILES_CLOCK) - age_ns, None


def changed_since(model: str, files: Iterable[Path]) -> Path | None:
    """A file of the model that changed since loading began, or the model's path if it leads to another folder. None if
    there is none, or if the start of loading was not recorded. Raises OSError if a file is gone.

    `model`: its folder or file, as the engine knows it. `files`: those that were read.
    """
    began_ns, place = _began.get(model, _began.get("", (None, None)))
    if began_ns is None:
        return None
    for path in files:
        if max(path.lstat().st_ctime_ns, path.stat().st_ctime_ns) >= began_ns:
            return path
    return None if place is None or _place(model) == place else Path(model)


def _place(model: str) -> tuple[int, int] | None:
    """The device and the inode that a path leads to. None for a name that is no path."""
    with suppress(OSError):
        found = os.stat(model)
        return found.st_dev, found.st_ino
    return None
