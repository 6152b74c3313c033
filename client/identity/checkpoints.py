"""Names a model's weights by the content of its files.

Owns: which files count, and how much of each is read. Does not own what else changes an encoder's output (engine).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .folders import WEIGHTS, encoder_files
from .loading import changed_since
from .remembered import REMEMBERED_BYTES_MIN, remembered
from .weight_files import FORM, weight_file_digest


def weights_fingerprint(
    model: str,
    revision: str | None = None,
    load_format: str = "auto",
    *,
    seed: int = 0,
    download_folder: str | None = None,
) -> str | None:
    """A name for the weights of a model, the same in all processes that load them alike; None if there is none.

    - A folder, or a hub's snapshot in the local cache: a digest of its configuration, its code and, by file name, its
      weight files: every byte of what an encoder may be made of, a sample of each large tensor that is the language
      model's (weight_files). What was read once is remembered until the file changes (remembered).
    - A file: the same of this one.
    - Random weights (`load_format="dummy"`): the seed, and the versions of what makes numbers of it.

    Args:
        model: a folder, a file, or a model's id.
        revision: of the hub.
        load_format: as given to the engine; a format changes the names of files, not what they mean.
        seed: of random weights.
        download_folder: where the hub's files are kept, if not in the usual place.

    Raises:
        OSError: a file cannot be read.
    """
    if Path(model).is_file():
        return files_digest([Path(model)])
    folder = model_folder(model, revision, download_folder)
    if load_format == "dummy":
        config = files_digest(encoder_files(folder)[0], folder) if folder is not None else ""
        return f"dummy-{seed}-torch-{package_version('torch')}-vllm-{vllm_version()}-{config}"
    if folder is None:
        return None
    settings, weights = encoder_files(folder)
    return files_digest([*settings, *weights], folder) if weights else None


def weights_changed(model: str) -> Path | None:
    """A file of a model's folder, or file, that has changed since its weights began to be loaded (loading). A hub's
    snapshots are never changed."""
    place = Path(model)
    if place.is_dir():
        settings, weights = encoder_files(place)
        return changed_since(model, [*settings, *weights])
    return changed_since(model, [place]) if place.is_file() else None


def model_folder(model: str, revision: str | None = None, download_folder: str | None = None) -> Path | None:
    """Where a model's files stand on this host: the folder that it is, or its snapshot in the hub's local cache."""
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
            # No id that a hub could have, as a folder that is not there.
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None


def files_digest(paths: Iterable[Path], folder: Path | None = None) -> str:
    """A digest of the files' names, below `folder` if given, and contents."""
    digest = hashlib.sha256()
    for path in paths:
        if path.suffix in WEIGHTS or path.stat().st_size >= REMEMBERED_BYTES_MIN:
            content = remembered(path, FORM, weight_file_digest)
        else:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(folder) if folder else path.name}\0{content}\0".encode())
    return digest.hexdigest()


def package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def vllm_version() -> str:
    """vLLM's own: its distribution is called otherwise where it is a build for another device."""
    import vllm

    return str(vllm.__version__)
