"""docs/configuration.md says what the settings say now, and docs/api.md names every public name."""

from __future__ import annotations

import re
import subprocess
import sys

import tensord

from ..daemon_process import PATIENCE_S
from .pages import ROOT


def test_the_page_of_settings_is_current() -> None:
    program = [sys.executable, "docs/generate.py", "-"]
    written = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout
    assert (ROOT / "docs" / "configuration.md").read_text() == written, "run `python docs/generate.py`"


def test_the_site_has_a_page_for_every_public_name() -> None:
    rows = [line for line in (ROOT / "docs" / "api.md").read_text().splitlines() if line.startswith("|")]
    named = re.findall(r"`(\w+)`", "".join(rows))
    assert sorted(named) == sorted({*tensord.__all__, "errors"} - {"__version__", "TensordError"})
