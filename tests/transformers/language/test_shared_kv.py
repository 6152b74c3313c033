"""The demonstration: two processes of transformers, and one system prompt that one of them computes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "shared_kv.py"


def test_two_processes_compute_one_system_prompt_once_and_answer_as_without_the_cache(tmp_path: Path) -> None:
    told = tmp_path / "answers.json"
    done = subprocess.run([sys.executable, str(EXAMPLE), "--json", str(told)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = json.loads(told.read_text())
    assert [answer["process"] for answer in answers] == ["planner", "coder"] * 2
    assert all(answer["same"] for answer in answers)
    assert answers[1]["computed"] * 10 < answers[1]["prompt"]
    assert "tokens of prompts computed" in done.stdout
