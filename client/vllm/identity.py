"""What names an encoder's output: the weights' fingerprint, the engine's namespace, the digest of what is encoded.

Owns: which of a model's properties make its outputs differ. Invariant: where something cannot be told apart, there is
no name, and nothing is shared; two different things never get the same name but by the limits that stand at
`weights_fingerprint`.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from ...errors import UnsupportedLeaf
from ..namespace import Namespace
from .settings import Settings

BLOCK_BYTES: Final = 64 << 10
BLOCKS: Final = 64
WHOLE_BYTES_MAX: Final = 64 << 20
"""A weight file up to this size is read whole; of a larger one BLOCKS blocks, evenly spaced, both ends included."""

_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors")
_DIGESTS_MAX: Final = 4096
DIGEST_ATTRIBUTE: Final = "tensord_content_digest"
"""Where an item that the processor cache has read carries its `content_digest`, taken when it was stored."""


# ---- weights


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
        return f"dummy-{seed}-torch-{_version('torch')}-vllm-{_vllm_version()}-{config}"
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


class Adapters:
    """Fingerprints of LoRA adapters, remembered for as long as their files look the same. For one thread."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, str | None]] = {}

    def name(self, lora_request: Any) -> str | None:
        """The adapter's name and fingerprint; None if its files are not in a folder here.

        Raises:
            OSError: a file of it cannot be read.
        """
        path = Path(lora_request.lora_path)
        if not path.is_dir():
            return None
        looks = sorted((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in path.iterdir() if f.is_file())
        known = self._known.get(str(path))
        if known is None or known[0] != looks:
            known = self._known[str(path)] = (looks, weights_fingerprint(str(path)))
        return None if known[1] is None else f"{lora_request.lora_name}:{known[1]}"


# ---- the namespace


def namespace_of(vllm_config: Any, settings: Settings) -> Namespace | None:
    """The namespace of an engine's encoder outputs; None if its weights have no name.

    Raises:
        OSError: a file of the model cannot be read.
    """
    model = vllm_config.model_config
    load = getattr(vllm_config.load_config, "load_format", "auto")
    revision = settings.revision or weights_fingerprint(model.model, model.revision, str(load), seed=model.seed or 0)
    if revision is None:
        return None
    # The content of a folder is named by its fingerprint, wherever it lies.
    called = "+".join(model.architectures) if Path(model.model).is_dir() else model.model
    # What was made of the configuration is what counts, wherever it came from: files, overrides, functions.
    config = _config_digest(model.hf_config)
    multimodal = getattr(model, "multimodal_config", None)
    processor = {
        "transformers": _version("transformers"),
        "vllm": _vllm_version(),
        "processor_kwargs": getattr(multimodal, "mm_processor_kwargs", None),
        "pruning": getattr(multimodal, "video_pruning_rate", None),
    }
    weights = {
        "quantization": getattr(model, "quantization", None),
        "config": config,
        "attention": getattr(multimodal, "mm_encoder_attn_dtype", None),
        "scales": getattr(multimodal, "mm_encoder_fp8_scale_path", None),
    }
    return Namespace(
        model=called,
        revision=_described(revision, weights),
        dtype=dtype_name(model.dtype),
        processor=_described("vllm", processor),
        tenant=settings.tenant,
    )


def with_adapter(namespace: Namespace, adapter: str) -> Namespace:
    """The namespace of the same encoder with an adapter."""
    return replace(namespace, lora=adapter)


def dtype_name(dtype: Any) -> str:
    """A torch dtype's name, as numpy's dtypes have it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _config_digest(config: Any) -> str:
    """SHA-256 over a configuration, but for where it was read from."""

    def placeless(given: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in given.items() if name != "_name_or_path"}

    resolved = json.loads(config.to_json_string(use_diff=False), object_hook=placeless)
    return hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()


def _described(name: str, properties: Mapping[str, object]) -> str:
    return " ".join([name, *(f"{key}={value!r}" for key, value in properties.items() if value is not None)])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _vllm_version() -> str:
    """vLLM's own: its distribution is called otherwise where it is a build for another device."""
    import vllm

    return str(vllm.__version__)


# ---- content


def content_digest(item: Mapping[str, Any]) -> bytes:
    """SHA-256 over a processed item (a MultiModalKwargsItem): fields in the order of their names, each with the dtypes,
    shapes and bytes of its tensors, in the order in which they are nested.

    Returns:
        32 bytes.

    Raises:
        UnsupportedLeaf: a leaf that is no tensor, array, number, string or None; or there is no tensor at all, as in
            the handles that stand in for an item in another process's memory.
    """
    import numpy as np
    import torch

    digest = hashlib.sha256()
    tensors = 0

    def add(value: Any, field: str) -> None:
        nonlocal tensors
        if isinstance(value, torch.Tensor):
            plain = value.detach().cpu().contiguous().resolve_conj().resolve_neg()
            digest.update(f"t{dtype_name(plain.dtype)}{list(plain.shape)}\0".encode())
            digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
            tensors += 1
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            digest.update(f"a{value.dtype.str}{list(value.shape)}\0".encode())
            digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            tensors += 1
        elif isinstance(value, list | tuple):
            digest.update(f"l{len(value)}\0".encode())
            for part in value:
                add(part, field)
        elif value is None or isinstance(value, bool | int | float | str):
            digest.update(f"p{type(value).__name__}{value!r}\0".encode())
        else:
            raise UnsupportedLeaf(f"{field} has a {type(value).__qualname__}, by which nothing can be named")

    for name in sorted(item):
        digest.update(f"f{name}\0".encode())
        add(item[name].data, name)
    if not tensors:
        raise UnsupportedLeaf(f"the item has no tensor among {sorted(item)}: it stands for one that is elsewhere")
    return digest.digest()


class Digests:
    """Digests of items, remembered for as long as the item lives. For one thread."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], bytes]] = {}

    def of(self, item: Any) -> bytes:
        """`content_digest` of it, taken once: here, or where the processor cache stored it.

        Raises:
            UnsupportedLeaf: it has none.
        """
        known = self._known.get(id(item))
        if known is not None and known[0]() is item:
            return known[1]
        digest = getattr(item, DIGEST_ATTRIBUTE, None) or content_digest(item)
        if len(self._known) >= _DIGESTS_MAX:
            self._known = {number: entry for number, entry in self._known.items() if entry[0]() is not None}
            if len(self._known) >= _DIGESTS_MAX:
                self._known.clear()
        self._known[id(item)] = (weakref.ref(item), digest)
        return digest
