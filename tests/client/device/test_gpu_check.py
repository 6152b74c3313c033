"""The check of a real card says plainly that there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu_check.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_nothing_is_checked_and_it_says_so(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = subprocess.run([sys.executable, str(SCRIPT), "--json", str(report)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("nothing was checked: torch ")
    assert "sees no NVIDIA card" in done.stderr
    assert not report.exists()
