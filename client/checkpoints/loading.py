"""Checks that a model's files are still those that were loaded. Files are named only after the weights are in memory.

Owns: by model, the time at which this process began to load. Does not own: the names. Changes since then are detected
by the kernel's timestamps of files, links and renamed folders, so no file is read.

Invariants: a file that changed after loading began is reported, unless the start of loading was not recorded.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

_FILES_CLOCK: Final = 5
"""CLOCK_REALTIME_COARSE of clock_gettime(2). The kernel stamps files by this clock, or by a finer one ahead of it."""
_LINKS_MAX: Final = 40
"""The limit of path_resolution(7)."""
_began_ns: dict[str, int] = {}


def loading_begins(model: str = "") -> None:
    """Records that loading of `model` begins now. Without a name: of the model that this process is for."""
    _began_ns[model] = time.clock_gettime_ns(_FILES_CLOCK)


def loading_began_with_process(model: str) -> None:
    """Records that loading of `model` began no earlier than this process, if nothing else was recorded for it."""
    if model not in _began_ns:
        # proc(5): field 22, after the name in brackets, is the process's start in ticks since the boot.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 10**9 // os.sysconf("SC_CLK_TCK")
        _began_ns[model] = time.clock_gettime_ns(_FILES_CLOCK) - age_ns


def changed_since(model: str, files: Iterable[Path]) -> Path | None:
    """A file of the model, or a folder or link on the path to it, that changed since loading began. None if there is
    none, or if the start of loading was not recorded.

    Args:
        model: the model's folder or file, as the engine knows it.
        files: the model's files that were read.

    Raises:
        OSError: a file is gone.
    """
    began_ns = _began_ns.get(model, _began_ns.get(""))
    if began_ns is None:
        return None
    folders: set[Path] = set()
    for path in files:
        if max(path.lstat().st_ctime_ns, path.stat().st_ctime_ns) >= began_ns:
            return path
        folders.update(path.parents)
    for path in (*_path_and_links(Path(os.path.abspath(model)), _LINKS_MAX), *folders):
        about = path.lstat()
        # Creating or removing a file in a folder changes both times of the folder. Renaming the folder changes only
        # ctime.
        renamed = about.st_ctime_ns > about.st_mtime_ns or stat.S_ISLNK(about.st_mode)
        if renamed and about.st_ctime_ns >= began_ns:
            return path
    return None


def _path_and_links(path: Path, links: int) -> Iterator[Path]:
    """The path and its parents, and the same for the targets of all links among them."""
    for each in (path, *path.parents):
        yield each
        if each.is_symlink() and links:
            yield from _path_and_links(Path(os.path.abspath(each.parent / os.readlink(each))), links - 1)
