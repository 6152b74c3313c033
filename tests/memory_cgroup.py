"""A real cgroup with a memory limit, for tests of what counts against one.

Owns: the folder, of version 1 or 2, and its removal. Does not own the processes that a test puts into it.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Final

import pytest

from tensord.shm.ring.cgroups import CgroupFolder, cgroup_folders

PATIENCE_S: Final = 30.0
_numbers = count(1)


@contextmanager
def memory_cgroup(version: int, limit_bytes: int) -> Iterator[Path]:
    """The folder of a new, empty cgroup. Skips the test, with the reason, where none can be made."""
    made = _made(version, limit_bytes)
    try:
        yield made.path
    finally:
        deadline = time.monotonic() + PATIENCE_S
        while made.path.exists():
            try:
                made.path.rmdir()
            except OSError as error:
                # A process that has ended leaves its cgroup a moment later.
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)


def within(folder: Path, command: Sequence[str] = ()) -> list[str]:
    """`command` as a process in that cgroup. Without a command: the beginning of such a command."""
    return ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh", *command]


def _made(version: int, limit_bytes: int) -> CgroupFolder:
    why = ""
    for above in cgroup_folders():
        if above.version != version:
            continue
        made = CgroupFolder(above.path / f"tensord-test-{os.getpid()}-{next(_numbers)}", "", version)
        try:
            if version == 2 and "memory" not in (above.path / "cgroup.subtree_control").read_text().split():
                (above.path / "cgroup.subtree_control").write_text("+memory")
            made.path.mkdir()
        except OSError as error:
            why = why or f"{above.path}: {error.strerror}"
            continue
        made.limit.write_text(str(limit_bytes))
        return made
    pytest.skip(f"no memory cgroup of version {version} can be made here: {why or 'none is mounted'}")
