"""The fuzz target finds nothing in a bounded number of runs, and would find something."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("atheris", reason="atheris is not installed: it has wheels for x86-64 only")

from tensord.ipc.messages import control as m
from tensord.ipc.wire.frames import pack

TARGET = Path(__file__).with_name("fuzz_connection.py")
ROOT = Path(__file__).parents[2]


def fuzz(tmp_path: Path, script: str, runs: int) -> subprocess.CompletedProcess[str]:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, message in enumerate(
        [
            m.AskForGrants(4, [4096, 64], [1, 2]),
            m.ReturnGrants([3]),
            m.OpenInbox(3, 4096),
            m.Evict(5, [b"k" * 32] * 2),
            m.RegisterEntry(6, "card", b"k" * 32, 4096, 10, "planner", 3),
            m.AcknowledgeOrder(7, "card", 1, [b"k" * 32], [], [], 4096),
            m.RegisterWorkflow(8, "w", [m.Step("a", 0), m.Step("b", 1, ["a"], 5, True)]),
            m.RequestCompleted("card", 0.5, 3),
            m.Drill(9, "host", 1, 2, True),
        ]
    ):
        (corpus / str(number)).write_bytes(pack(message))
    # Not the limit on the peak of memory, which a process has from its parent: tests before this one may have had more.
    options = [f"-runs={runs}", "-seed=1", f"-artifact_prefix={tmp_path}/", "-max_len=1024"]
    options += ["-rss_limit_mb=0", "-malloc_limit_mb=512"]
    return subprocess.run(
        [sys.executable, "-c", script, str(corpus), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


RUN = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
sys.argv[0] = {str(TARGET)!r}
{{sabotage}}
runpy.run_path({str(TARGET)!r}, run_name="__main__")
"""

SABOTAGE = """
from tensord.ipc.connection import Connection
Connection.close = lambda self: []
"""


def test_the_target_finds_nothing(tmp_path: Path) -> None:
    done = fuzz(tmp_path, RUN.format(sabotage=""), 20_000)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Done 20000 runs" in done.stderr


def test_the_target_finds_a_descriptor_that_never_comes_back(tmp_path: Path) -> None:
    done = fuzz(tmp_path, RUN.format(sabotage=SABOTAGE), 20_000)
    assert done.returncode != 0
    assert "AssertionError" in done.stderr + done.stdout
