"""The demonstration of engines on three hosts, around one redis-server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster_engines.py"


def test_engines_on_three_hosts_compute_one_system_prompt_once() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "computed in the cluster" in done.stdout
