"""The files in a model's folder that determine the outputs of its encoder and its processor.

Owns: the traversal of a folder, the division into weights, code, settings and other files, and the names of code in
other repositories. Does not own: digests.

Invariants: links are followed, as by the loader of the model. Hidden files and compiled Python files are left out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

FILES_MAX: Final = 20_000
"""A folder with more files is not a model's, but for example a home folder."""
WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors"})
"""Suffixes of files that vLLM may load weights from."""
DATA: Final = frozenset(
    {".npy", ".mvn", ".pkl", ".pickle", ".csv", ".yaml", ".yml", ".toml", ".ini", ".onnx", ".ckpt", ".h5", ".msgpack"}
)
"""Suffixes of other files that a model's own code may read: numbers and settings."""
_CONFIGURATION: Final = re.compile(r"config|params\.json|index\.json")
_NEVER_PROCESSORS: Final = frozenset({".safetensors", ".gguf", ".tensors", ".pth", ".ckpt", ".h5", ".msgpack"})
"""Suffixes of weights of any size. Files with other suffixes of WEIGHTS are weights if they are large."""
_DOCUMENTATION: Final = re.compile(r"\.(md|rst|pdf)$|^(LICEN[CS]E|NOTICE)", re.IGNORECASE)
_LARGE_BYTES: Final = 64 << 20
_ELSEWHERE: Final = "--"  # "repository--module.Class"


def files_below(folder: Path, *, deep: bool = True) -> list[Path]:
    """All files in a folder, sorted; with `deep` those in its subfolders too.

    Raises:
        OSError: a folder cannot be read, or there are more than FILES_MAX files.
    """
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()
    for place, folders, files in os.walk(folder, followlinks=True, onerror=_raise):
        about = os.stat(place)
        here = (about.st_dev, about.st_ino)
        folders[:] = [name for name in sorted(folders) if deep and here not in seen and _counts(name)]
        if here not in seen:
            found += [path for name in files if _counts(name) and (path := Path(place, name)).is_file()]
        seen.add(here)
        if len(found) > FILES_MAX:
            raise OSError(f"{folder} has more than {FILES_MAX} files: give the model a folder of its own")
    return sorted(found)


def encoder_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """(settings, weights): the files that say how a model's weights are used, its code included; its weight files."""
    files = files_below(folder)
    weights = [path for path in files if path.suffix in WEIGHTS]
    return [path for path in files if _is_setting(path)], weights


def processor_files(folder: Path, *, deep: bool = True) -> list[Path]:
    """The files that a model's processor and tokenizer may read."""
    return [
        path
        for path in files_below(folder, deep=deep)
        if path.suffix not in _NEVER_PROCESSORS
        and not _DOCUMENTATION.search(path.name)
        and (path.suffix not in WEIGHTS or path.stat().st_size < _LARGE_BYTES)
    ]


def other_repositories(folders: Iterable[Path]) -> list[str]:
    """Other repositories whose classes the "auto_map" of a JSON file in the folders names, sorted."""
    found: set[str] = set()
    for path in (path for folder in folders for path in folder.glob("*.json")):
        with suppress(ValueError):
            document = json.loads(path.read_bytes())
            found.update(_named(document.get("auto_map") if isinstance(document, dict) else None))
    return sorted(found)


def _named(auto_map: Any) -> Iterator[str]:
    if isinstance(auto_map, dict | list):
        for each in auto_map.values() if isinstance(auto_map, dict) else auto_map:
            yield from _named(each)
    elif isinstance(auto_map, str) and _ELSEWHERE in auto_map:
        yield auto_map.split(_ELSEWHERE)[0]


def _is_setting(path: Path) -> bool:
    if path.suffix == ".json":
        return _CONFIGURATION.search(path.name) is not None
    return path.suffix == ".py" or path.suffix in DATA


def _counts(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__"


def _raise(error: OSError) -> None:
    raise error
