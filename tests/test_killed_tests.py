"""What is left behind when tests are killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .daemon_process import until

ROOT = Path(__file__).parents[1]


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
