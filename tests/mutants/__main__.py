"""Puts one small fault after the other into a copy of the source, and runs tests until one fails.

    python -m tests.mutants [--only TEXT] [--jobs N]

A fault that no test notices is a gap in the tests. At least 90 % are noticed, or the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Final

from .faults import FAULTS, Fault

ROOT: Final = Path(__file__).parents[2]
SOURCES: Final = ("client", "daemon", "ipc", "shm")
NOTICED_MIN: Final = 0.9
STAGE_S: Final = 1200
"""Of one stage. A fault that makes a test wait for ever is noticed too."""


def source_of(fault: Fault, root: Path) -> Path:
    """The one file that has the text of the fault.

    Raises:
        LookupError: none has it, or it stands in several places.
    """
    found = [
        path for name in SOURCES for path in sorted((root / name).rglob("*.py")) if fault.before in path.read_text()
    ]
    if len(found) != 1 or found[0].read_text().count(fault.before) != 1:
        raise LookupError(
            f"{fault.broken}: {fault.before!r} is in {[str(path) for path in found] or 'no file'}; once is right"
        )
    return found[0]


def copied(folder: Path) -> Path:
    """A copy of the repository."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def noticed(fault: Fault, copies: Queue[Path]) -> str | None:
    """The first test that fails with the fault in one of the copies; None if none does."""
    copy = copies.get()
    path = source_of(fault, copy)
    right = path.read_text()
    path.write_text(right.replace(fault.before, fault.after))
    try:
        for stage in (fault.tests, "tests --ignore=tests/mutants"):
            tests = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "--dist", "loadfile", *stage.split()]
            # `timeout` ends the workers too.
            command = ["timeout", "--signal=KILL", str(STAGE_S), *tests]
            environ = {**os.environ, "PYTHONPATH": str(copy)}
            ended = subprocess.run(command, cwd=copy, env=environ, stdout=subprocess.PIPE, text=True, check=False)
            if ended.returncode:
                failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return failed[0].split(" - ")[0] if failed else f"{stage}: exit status {ended.returncode}"
        return None
    finally:
        path.write_text(right)
        copies.put(copy)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose description has this text")
    parser.add_argument("--jobs", type=int, default=1, help="faults at once")
    given = parser.parse_args()
    faults = [fault for fault in FAULTS if given.only in fault.broken]
    for fault in faults:
        source_of(fault, ROOT)
    seen = 0
    copies: Queue[Path] = Queue()
    with tempfile.TemporaryDirectory(prefix="tensord-mutant-") as folder, ThreadPoolExecutor(given.jobs) as pool:
        for number in range(given.jobs):
            copies.put(copied(Path(folder) / str(number)))
        for fault, by in zip(faults, pool.map(partial(noticed, copies=copies), faults), strict=True):
            seen += by is not None
            print(f"{'noticed' if by else 'NOT NOTICED'}: {fault.broken}{f', by {by}' if by else ''}", flush=True)
    print(f"{seen} of {len(faults)} faults were noticed")
    return int(seen < NOTICED_MIN * len(faults))


if __name__ == "__main__":
    sys.exit(main())
