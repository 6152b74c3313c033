"""docs/configuration.md and docs/api.md say what the settings and the docstrings say now."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ..daemon_process import PATIENCE_S
from .pages import ROOT


@pytest.mark.parametrize("page", ["configuration", "api"])
def test_a_generated_page_is_current(page: str) -> None:
    program = [sys.executable, "docs/generate.py", page]
    written = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout
    assert (ROOT / "docs" / f"{page}.md").read_text() == written, "run `python docs/generate.py`"
