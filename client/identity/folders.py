"""Which files of a model's folder decide what its encoder and its processor make.

Owns: the walk over a folder, and which files are weights, code, settings, or neither.

Invariant: a link is followed as whoever loads the model follows it. Hidden files, and Python's compiled ones, are none.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

FILES_MAX: Final = 20_000
"""A folder with more is no model's: a home folder, say."""
WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors"})
"""Suffixes of files that vLLM may load weights from."""
DATA: Final = frozenset(
    {".npy", ".mvn", ".pkl", ".pickle", ".csv", ".yaml", ".yml", ".toml", ".ini", ".onnx", ".ckpt", ".h5", ".msgpack"}
)
"""Suffixes of what else a model's own code may read: numbers and settings."""
_CONFIGURATION: Final = re.compile(r"config|params\.json|index\.json")
_NEVER_PROCESSORS: Final = frozenset({".safetensors", ".gguf", ".tensors", ".pth", ".ckpt", ".h5", ".msgpack"})
"""Weights, whatever their size; others are weights if they are large."""
_TOLD: Final = re.compile(r"\.(md|rst|pdf)$|^(LICEN[CS]E|NOTICE)", re.IGNORECASE)
_LARGE_BYTES: Final = 64 << 20


def files_below(folder: Path, *, deep: bool = True) -> list[Path]:
    """All its files, in the order of their names; of its folders as well if `deep`.

    Raises:
        OSError: a folder cannot be read, or has more than FILES_MAX files.
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
    """What says how a model's weights are used, its own code among it; and its weights."""
    files = files_below(folder)
    weights = [path for path in files if path.suffix in WEIGHTS]
    return [path for path in files if _is_setting(path)], weights


def processor_files(folder: Path, *, deep: bool = True) -> list[Path]:
    """What a model's processor and tokenizer may read."""
    return [
        path
        for path in files_below(folder, deep=deep)
        if path.suffix not in _NEVER_PROCESSORS
        and not _TOLD.search(path.name)
        and (path.suffix not in WEIGHTS or path.stat().st_size < _LARGE_BYTES)
    ]


def _is_setting(path: Path) -> bool:
    if path.suffix == ".json":
        return _CONFIGURATION.search(path.name) is not None
    return path.suffix == ".py" or path.suffix in DATA


def _counts(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__"


def _raise(error: OSError) -> None:
    raise error
