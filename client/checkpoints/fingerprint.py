"""Names a model's weights by the content of its files.

Owns: the choice of files. Does not own: other causes of different outputs (engine).

Invariants: equal names mean equal weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from .folders import WEIGHTS, encoder_files
from .loading import changed_since
from .remembered import REMEMBERED_BYTES_MIN, remembered

ALGORITHM: Final = "blake3" if find_spec("blake3") else "sha256"
"""The hash for large files: BLAKE3 if it is installed, as it is with vLLM. A name contains its algorithm, so processes
with and without BLAKE3 share nothing instead of something wrong."""
_PIECE_BYTES: Final = 16 << 20
_FORM: Final = f"2 {ALGORITHM}"
"""Version of the notes' digests. Change it whenever the same content gets another digest."""


def weights_fingerprint(
    model: str,
    revision: str | None = None,
    load_format: str = "auto",
    *,
    seed: int = 0,
    download_folder: str | None = None,
) -> str | None:
    """A name for a model's weights, equal in all processes that load the same weights; None if there is none.

    - For a folder, or a hub's snapshot in the local cache: a digest of its configuration, its code and, by file name,
      every byte of its weight files. Digests of large files are kept until the file changes (remembered).
    - For a file: the same of this file.
    - For random weights (`load_format="dummy"`): the seed, and the versions of the packages that make the weights from
      it.

    Args:
        model: a folder, a file, or a model's id.
        revision: the revision in the hub.
        load_format: the engine's load format. Except for "dummy" it does not affect the name.
        seed: the seed of random weights.
        download_folder: the folder of the hub's files, if not the usual one.

    Raises:
        OSError: a file cannot be read.
    """
    if Path(model).is_file():
        return files_digest([Path(model)])
    folder = model_folder(model, revision, download_folder)
    if load_format == "dummy":
        config = files_digest(encoder_files(folder)[0], folder) if folder is not None else ""
        return f"dummy-{seed}-torch-{package_version('torch') or 'none'}-vllm-{vllm_version()}-{config}"
    if folder is None:
        return None
    settings, weights = encoder_files(folder)
    return files_digest([*settings, *weights], folder) if weights else None


def weights_changed(model: str) -> Path | None:
    """A file of the model that has changed since its weights began to be loaded (loading); None if there is none. A
    hub's snapshots never change."""
    place = Path(model)
    if place.is_dir():
        settings, weights = encoder_files(place)
        return changed_since(model, [*settings, *weights])
    return changed_since(model, [place]) if place.is_file() else None


def model_folder(model: str, revision: str | None = None, download_folder: str | None = None) -> Path | None:
    """The folder with a model's files on this host: the model's own folder, or its snapshot in the hub's local
    cache."""
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    for name in ("config.json", "tokenizer_config.json"):
        try:
            found = try_to_load_from_cache(model, name, cache_dir=download_folder, revision=revision)
        except ValueError:
            # The name is not a valid hub id, for example a missing folder.
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None


def files_digest(paths: Iterable[Path], folder: Path | None = None) -> str:
    """A digest of the files' contents and names, relative to `folder` if given."""
    digest = hashlib.sha256()
    for path in paths:
        if path.suffix in WEIGHTS or path.stat().st_size >= REMEMBERED_BYTES_MIN:
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


def package_version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def vllm_version() -> str:
    """vLLM's own version. The name of its distribution differs between builds for different devices."""
    import vllm

    return str(vllm.__version__)
