"""Whether a model's files are still those that were loaded: they are named only once the weights are in memory.

Owns: when this process began to load, by model. What has changed since is found by the times that the kernel gives to
files, links and renamed folders, so no file is read for it.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

_FILES_CLOCK: Final = 5
"""CLOCK_REALTIME_COARSE of clock_gettime(2): by it, or by a finer clock ahead of it, the kernel stamps files."""
_LINKS_MAX: Final = 40
"""As path_resolution(7) has it."""
_began_ns: dict[str, int] = {}


def loading_begins(model: str = "") -> None:
    """The weights of `model` are loaded from now on; without it, those of whatever model this process is for."""
    _began_ns[model] = time.clock_gettime_ns(_FILES_CLOCK)


def changed_since(model: str, files: Iterable[Path]) -> Path | None:
    """One of a model's files, or what leads to it, that has changed since it began to be loaded; None if there is none,
    or nobody said when that was.

    Args:
        model: its folder, or its file, as the engine has it.
        files: what was read of it.

    Raises:
        OSError: one of them is gone.
    """
    began_ns = _began_ns.get(model, _began_ns.get(""))
    if began_ns is None:
        return None
    folders: set[Path] = set()
    for path in files:
        if max(path.lstat().st_ctime_ns, path.stat().st_ctime_ns) >= began_ns:
            return path
        folders.update(path.parents)
    for path in (*_way(Path(os.path.abspath(model)), _LINKS_MAX), *folders):
        about = path.lstat()
        # What is made or removed in a folder changes both of its times; its own name's change only this one.
        renamed = about.st_ctime_ns > about.st_mtime_ns or stat.S_ISLNK(about.st_mode)
        if renamed and about.st_ctime_ns >= began_ns:
            return path
    return None


def _way(path: Path, links: int) -> Iterator[Path]:
    """The path, what it lies in, and the same of whatever links among them lead to."""
    for each in (path, *path.parents):
        yield each
        if each.is_symlink() and links:
            yield from _way(Path(os.path.abspath(each.parent / os.readlink(each))), links - 1)
