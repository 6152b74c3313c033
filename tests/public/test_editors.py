"""A file opened at the root, as client/core/lease.py, is to an editor what it is as tensord/client/core/lease.py."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from .test_types import ROOT, checked

PARTS = ("client", "daemon", "ipc", "shm")
# Its imports lead through three of the parts and to the errors.
OPENED = "client/core/lease.py"
IMPORT = re.compile(r"^ *from (\.+)([\w.]*) import", re.MULTILINE)


def is_found(path: Path, dots: str, module: str) -> bool:
    """Whether a relative import in the file at `path` names a module that lies there."""
    folder = path.parents[len(dots) - 1]
    inside = folder / module.replace(".", "/")
    return inside.with_suffix(".py").is_file() if module and not inside.is_dir() else (inside / "__init__.py").is_file()


def test_every_relative_import_is_found_from_the_root() -> None:
    files = [path for part in PARTS for path in (ROOT / part).rglob("*.py")]
    assert len(files) > 100
    assert [
        f"{path.relative_to(ROOT)}: from {dots}{module}; write `from tensord import …`"
        for path in files
        for dots, module in IMPORT.findall(path.read_text())
        if not is_found(path, dots, module)
    ] == []


def test_pyright_says_of_a_file_at_the_root_what_it_says_of_it_in_the_package() -> None:
    both = (OPENED, f"tensord/{OPENED}")
    said = json.loads(checked(ROOT, "pyright", f"--pythonpath={sys.executable}", "--outputjson", *both).stdout)
    assert said["summary"]["filesAnalyzed"] == 2
    at_the_root, in_the_package = (
        [(each["range"], each["message"]) for each in said["generalDiagnostics"] if each["file"] == str(ROOT / path)]
        for path in both
    )
    assert at_the_root == in_the_package
    assert "reportMissingImports" not in {found.get("rule") for found in said["generalDiagnostics"]}
