"""The code blocks of README.md and docs/, and the examples, that need transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import tensord

from ..daemon_process import Daemon
from ..public.pages import TRANSFORMERS, blocks_of

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
PRINTED: Final = ["True EncoderTally(found=2, waited=0, encoded=2, passed=0)", "1000 1005"]
"""The output of the blocks that print, in their order."""


def test_the_blocks_that_need_transformers_run_as_printed(
    daemon: Daemon, client: tensord.Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TENSORD_SOCKET", str(daemon.socket))
    names: dict[str, object] = {}
    for block in blocks_of(TRANSFORMERS):
        block.run(names)
    assert capsys.readouterr().out.splitlines() == PRINTED


def test_two_processes_compute_one_system_prompt_once_and_answer_as_without_the_cache(tmp_path: Path) -> None:
    told = tmp_path / "answers.json"
    command = [sys.executable, str(EXAMPLES / "shared_kv.py"), "--json", str(told)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = json.loads(told.read_text())
    assert [answer["process"] for answer in answers] == ["planner", "coder"] * 2
    assert all(answer["same"] for answer in answers)
    assert answers[1]["computed"] * 10 < answers[1]["prompt"]
    assert "tokens of prompts computed" in done.stdout
