"""The long runs of `make` leave nothing behind when a signal ends them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .daemon_process import PATIENCE_S, until

ROOT = Path(__file__).parents[1]
LONG = {
    "soak": (str(ROOT / "benchmarks" / "soak.py"), "--minutes", "5"),
    "crossings": ("-m", "tests.crossings", "--rounds", "9"),
}


def marked(mark: str) -> list[int]:
    """The processes that have `mark` in their environment: those that a run has started, and theirs."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


@pytest.mark.parametrize(("name", "number"), [("soak", signal.SIGTERM), ("crossings", signal.SIGINT)], ids=str)
def test_a_signal_leaves_no_process_memory_or_folder_of_a_run(tmp_path: Path, name: str, number: int) -> None:
    mark = f"TEST_OF_SIGNALS={os.getpid()}-{name}-{number}"
    before = set(Path("/dev/shm").iterdir())
    environ = {**os.environ, "TMPDIR": str(tmp_path), **dict([mark.split("=")])}
    run = subprocess.Popen(
        [sys.executable, *LONG[name]],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until(lambda: len(marked(mark)) >= 3, "the run to have begun")
        until(lambda: list(tmp_path.glob("tensord*/control.sock")), "a daemon of the run's")
        pids = {str(pid) for pid in marked(mark)}
        # As `timeout` does it: to the process, and to all of its group.
        run.send_signal(number)
        os.killpg(run.pid, number)
        assert run.wait(PATIENCE_S)
        until(lambda: not marked(mark), "its processes to end")
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("pymp-")] == []
    names = [path.name for path in set(Path("/dev/shm").iterdir()) - before]
    assert [name for name in names if pids & set(re.split("[-.]", name))] == []


def test_daemons_whose_tests_were_killed_free_their_memory(tmp_path: Path) -> None:
    script = "from tests.daemon_process import Daemon; d = Daemon(); d.start(); print(d.instance, flush=True); input()"
    run = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None and run.stdin is not None
    with run.stdin, run.stdout:
        instance = run.stdout.readline().strip()
        assert instance
        run.kill()
        run.wait()
    until(lambda: not list(Path("/dev/shm").glob(f"tensord.{instance}.*")), "its daemon to free its memory")
