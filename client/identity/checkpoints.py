"""Names a model's weights by the content of its files.

Owns: which files count, and how much of each is read. Does not own what else changes an encoder's output (engine).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

BLOCK_BYTES: Final = 64 << 10
BLOCKS: Final = 64
WHOLE_BYTES_MAX: Final = 64 << 20
"""A weight file up to this size is read whole; of a larger one BLOCKS blocks, evenly spaced, both ends included."""

_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors")


def weights_fingerprint(
    model: str, revision: str | None = None, load_format: str = "auto", *, seed: int = 0
) -> str | None:
    """A name for the weights of a model, the same in all processes that load them alike; None if there is none.

    - A folder: SHA-256 over its configuration, its code and, by file name, each weight file's size and content; of
      files over 64 MiB only 64 blocks of 64 KiB. What changes such a file between the blocks alone, leaving its size,
      is not seen: give `tensord.revision` where weights are patched like that.
    - A file: the same of this one.
    - A model of the hub: the commit of its snapshot in the local cache. Files changed in the cache are not seen.
    - Random weights (`load_format="dummy"`): the seed, and the versions of what makes numbers of it.

    Args:
        model: a folder, a file, or a model's id.
        revision: of the hub, as given to the engine.
        load_format: as given to the engine; a format changes the names of files, not what they mean.
        seed: of random weights.

    Raises:
        OSError: a file cannot be read.
    """
    if Path(model).is_file():
        return _files_digest([Path(model)])
    folder = Path(model) if Path(model).is_dir() else _snapshot(model, revision)
    if load_format == "dummy":
        config = _files_digest(_configuration(folder)) if folder is not None else ""
        return f"dummy-{seed}-torch-{package_version('torch')}-vllm-{vllm_version()}-{config}"
    if folder is None:
        return None
    if not Path(model).is_dir():
        return folder.name
    weights = sorted(path for path in folder.rglob("*") if path.suffix in _WEIGHT_SUFFIXES and path.is_file())
    return _files_digest([*_configuration(folder), *weights], folder) if weights else None


def _configuration(folder: Path) -> list[Path]:
    """The files that say how the weights are used, and how media are processed; code of the model's own among them."""
    documents = [path for path in folder.glob("*.json") if "config" in path.name or path.name.endswith("index.json")]
    return sorted([*documents, *folder.glob("*.py")])


def _snapshot(model: str, revision: str | None) -> Path | None:
    """The folder of a hub's model in the local cache, named by its commit."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:
        # No id that a hub could have, as a folder that is not there.
        return None
    return Path(found).parent if isinstance(found, str) else None


def _files_digest(paths: Iterable[Path], folder: Path | None = None) -> str:
    digest = hashlib.sha256()
    for path in paths:
        size_bytes = path.stat().st_size
        digest.update(f"{path.relative_to(folder) if folder else path.name}\0{size_bytes}\0".encode())
        with path.open("rb", buffering=0) as file:
            if size_bytes <= WHOLE_BYTES_MAX:
                while block := file.read(1 << 20):
                    digest.update(block)
            else:
                for number in range(BLOCKS):
                    file.seek((size_bytes - BLOCK_BYTES) * number // (BLOCKS - 1))
                    digest.update(file.read(BLOCK_BYTES))
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
