"""Each fuzzer passes a few rounds and detects injected faults. `make fuzz` runs the fuzzers at length."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ..processes import python
from . import fuzz

LONG_S = 1200.0


def fuzzed(findings: Path, *arguments: str, sabotage: str = "") -> subprocess.CompletedProcess[str]:
    """Runs fuzzers in a process of their own, after the code of `sabotage`."""
    program = f"""
import sys, pathlib
from tests.fuzz import fuzz
fuzz.FINDINGS = pathlib.Path({str(findings)!r})
{sabotage}
sys.exit(fuzz.main({arguments!r}))
"""
    return python("-c", program, timeout_s=LONG_S, env={**os.environ, "PYTHONHASHSEED": "0"})


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_nothing_is_found_in_a_round(name: str, tmp_path: Path) -> None:
    done = fuzzed(tmp_path, "--only", name, "--first", "1", "--rounds", "1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert f"{name}: rounds 1 to 1 found nothing" in done.stdout


def test_a_damaged_entry_that_is_shown_is_found_kept_and_said(tmp_path: Path) -> None:
    sabotage = """from tensord.client.reading import ring_mapping, view
view.check_span = ring_mapping.check_span = lambda header, payload: None
"""
    done = fuzzed(tmp_path, "--only", "segments", "--first", "100", "--rounds", "30", sabotage=sabotage)
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr[-4000:]
    assert "again: make fuzz ONLY=segments FIRST=" in done.stdout
    [kept] = tmp_path.iterdir()
    assert "Traceback" in kept.read_text()
