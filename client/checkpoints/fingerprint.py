"""Names a model's weights by the content of its files.

Owns: the choice of files: the traversal of a folder, the division into weights, code, settings and other files, and the
names of code in other repositories. Does not own: other causes of different outputs (engine).

Invariants: equal names mean equal weights. Links are followed, as by the loader of the model. Hidden files and compiled
Python files are left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from .loading import changed_since
from .remembered import REMEMBERED_BYTES_MIN, remembered

ALGORITHM: Final = "blake3" if find_spec("blake3") else "sha256"
"""The hash for large files: BLAKE3 if it is installed, as it is with vLLM. A name contains its algorithm, so processes
with and without BLAKE3 share nothing instead of something wrong."""
_PIECE_BYTES: Final = 16 << 20
_FORM: Final = f"2 {ALGORITHM}"
"""Version of the notes' digests. Change it whenever the same content gets another digest."""
_FILES_MAX: Final = 20_000
"""A folder with more files is not a model's, but for example a home folder."""
_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors"})
"""Suffixes of files that vLLM may load weights from."""
_DATA: Final = frozenset(
    {".npy", ".mvn", ".pkl", ".pickle", ".csv", ".yaml", ".yml", ".toml", ".ini", ".onnx", ".ckpt", ".h5", ".msgpack"}
)
"""Suffixes of other files that a model's own code may read: numbers and settings."""
_CONFIGURATION: Final = re.compile(r"(config.*|params|index)\.json$")
_NEVER_PROCESSORS: Final = frozenset({".safetensors", ".gguf", ".tensors", ".pth", ".ckpt", ".h5", ".msgpack"})
"""Suffixes of weights of any size. Files with other suffixes of _WEIGHTS are weights if they are large."""
_DOCUMENTATION: Final = re.compile(r"\.(md|rst|pdf)$|^(LICEN[CS]E|NOTICE)", re.IGNORECASE)
_LARGE_BYTES: Final = 64 << 20
_ELSEWHERE: Final = "--"  # "repository--module.Class"


def weights_fingerprint(model: str, revision: str | None = None, *, download_folder: str | None = None) -> str | None:
    """A name for a model's weights, equal in all processes that load the same weights; None if there is none.

    - For a folder, or a hub's snapshot in the local cache: a digest of its configuration, its code and, by file name,
      every byte of its weight files. Digests of large files are kept until the file changes (remembered).
    - For a file: the same of this file.

    Args:
        model: a folder, a file, or a model's id. Raises OSError if a file cannot be read.
        revision: the revision in the hub.
        download_folder: the folder of the hub's files, if not the usual one.
    """
    if Path(model).is_file():
        return files_digest([Path(model)])
    folder = model_folder(model, revision, download_folder)
    settings, weights = ([], []) if folder is None else _encoder_files(folder)
    return files_digest([*settings, *weights], folder) if weights else None


def weights_changed(model: str) -> Path | None:
    """A file of the model that has changed since its weights began to be loaded (loading); None if there is none. A
    hub's snapshots never change."""
    place = Path(model)
    if place.is_dir():
        settings, weights = _encoder_files(place)
        return changed_since(model, [*settings, *weights])
    return changed_since(model, [place]) if place.is_file() else None


def model_folder(model: str, revision: str | None = None, download_folder: str | None = None) -> Path | None:
    """The folder with a model's files on this host: the model's own folder, or its snapshot in the hub's local
    cache."""
    if Path(model).is_dir():
        return Path(model)
    # ValueError: the name is not a valid hub id, for example a missing folder.
    with suppress(ImportError, ValueError):
        from huggingface_hub import try_to_load_from_cache

        for name in ("config.json", "tokenizer_config.json"):
            found = try_to_load_from_cache(model, name, cache_dir=download_folder, revision=revision)
            if isinstance(found, str):
                return Path(found).parent
    return None


# ---- files


def files_below(folder: Path, *, deep: bool = True) -> list[Path]:
    """All files in a folder, sorted; with `deep` those in its subfolders too. Raises OSError if a folder cannot be
    read, or there are more than _FILES_MAX files."""
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()
    for place, folders, files in os.walk(folder, followlinks=True, onerror=_raise):
        about = os.stat(place)
        here = (about.st_dev, about.st_ino)
        folders[:] = [name for name in sorted(folders) if deep and here not in seen and _counts(name)]
        if here not in seen:
            found += [path for name in files if _counts(name) and (path := Path(place, name)).is_file()]
        seen.add(here)
        if len(found) > _FILES_MAX:
            raise OSError(f"{folder} has more than {_FILES_MAX} files: give the model a folder of its own")
    return sorted(found)


def _encoder_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """(settings, weights): the files that say how a model's weights are used, its code included; its weight files."""
    files = files_below(folder)
    code = _DATA | {".py"}
    settings = [path for path in files if path.suffix in code or _CONFIGURATION.search(path.name)]
    return settings, [path for path in files if path.suffix in _WEIGHTS]


def processor_files(folder: Path, *, deep: bool = True) -> list[Path]:
    """The files that a model's processor and tokenizer may read."""
    return [
        path
        for path in files_below(folder, deep=deep)
        if path.suffix not in _NEVER_PROCESSORS
        and not _DOCUMENTATION.search(path.name)
        and (path.suffix not in _WEIGHTS or path.stat().st_size < _LARGE_BYTES)
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


def _counts(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__"


def _raise(error: OSError) -> None:
    raise error


# ---- digests and versions


def files_digest(paths: Iterable[Path], folder: Path | None = None) -> str:
    """A digest of the files' contents and names, relative to `folder` if given."""
    digest = hashlib.sha256()
    for path in paths:
        if path.suffix in _WEIGHTS or path.stat().st_size >= REMEMBERED_BYTES_MIN:
            content = remembered(path, _FORM, _file_digest)
        else:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(folder) if folder else path.name}\0{content}\0".encode())
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
    """The digest of a file's bytes, as text: the algorithm, then hex. BLAKE3 hashes a piece in several threads."""
    digest: Any = hashlib.sha256()
    if ALGORITHM == "blake3":
        from blake3 import blake3

        digest = blake3(max_threads=blake3.AUTO)
    piece = memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
    return f"{ALGORITHM}:{digest.hexdigest()}"


def package_version(package: str) -> str:
    """The installed version of a package, or "none"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def vllm_version() -> str:
    """vLLM's own version. The name of its distribution differs between builds for different devices."""
    import vllm

    return str(vllm.__version__)
