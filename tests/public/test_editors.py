"""A file opened at the root, as client/reading/lease.py, is to an editor what it is below tensord/."""

from __future__ import annotations

import re
from pathlib import Path

from .test_types import ROOT

PARTS = ("client", "daemon", "ipc", "shm")
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
