"""Names code that comes with a model: code that `trust_remote_code` allows a configuration, a processor or a model to
run.

Owns: the choice of files. Does not own: digests. Invariants: code that is not found on this host gets a random name, so
that its results are not shared.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from .digest import new_digest
from .fingerprint import model_folder
from .folders import files_below

_ELSEWHERE: Final = "--"  # "repository--module.Class"


def remote_code(folders: list[Path], code_revision: str | None) -> list[str]:
    """One digest for each folder with code that may run.

    Args:
        folders: the model's folder, and the tokenizer's.
        code_revision: the revision of code in another repository.

    Raises:
        OSError: a file cannot be read.
    """
    found = [_code_digest(folder) for folder in folders]
    for repository in sorted({name for folder in folders for name in _repositories(folder)}):
        elsewhere = model_folder(repository, code_revision)
        found.append(f"{repository} {_code_digest(elsewhere) if elsewhere is not None else secrets.token_hex(16)}")
    return found


def _code_digest(folder: Path) -> str:
    digest = new_digest()
    for path in [path for path in files_below(folder) if path.suffix == ".py"]:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)} ".encode())
        digest.update(content)
    taken: str = digest.hexdigest()
    return taken


def _repositories(folder: Path) -> Iterator[str]:
    """Other repositories whose classes the "auto_map" of a JSON file in the folder names."""
    for path in sorted(folder.glob("*.json")):
        try:
            document = json.loads(path.read_bytes())
        except ValueError:
            continue
        yield from _named(document.get("auto_map") if isinstance(document, dict) else None)


def _named(auto_map: Any) -> Iterator[str]:
    if isinstance(auto_map, dict):
        auto_map = list(auto_map.values())
    if isinstance(auto_map, list):
        for each in auto_map:
            yield from _named(each)
    elif isinstance(auto_map, str) and _ELSEWHERE in auto_map:
        yield auto_map.split(_ELSEWHERE)[0]
