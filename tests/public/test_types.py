"""What `py.typed` promises: a user's pyright, strict, sees the types of the public API. `make check` asks mypy.

It runs from a folder of its own, as for a user, so that it finds tensord as an installed package.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

USES = Path(__file__).with_name("typed_uses.py")
STRICT = {
    "typeCheckingMode": "strict",
    "include": [USES.name],
    "enableTypeIgnoreComments": False,
    "reportUnnecessaryTypeIgnoreComment": "error",
}
PATIENCE_S = 300.0


def checked(folder: Path, module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """What a type checker says in a folder. None of them may ask the network for a newer version."""
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=folder,
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project, whose only file uses tensord."""
    shutil.copy(USES, tmp_path)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(STRICT))
    return tmp_path


def test_pyright_strict_takes_right_uses_and_refuses_wrong_ones(project: Path) -> None:
    said = checked(project, "pyright", f"--pythonpath={sys.executable}")
    assert said.returncode == 0, said.stdout + said.stderr
