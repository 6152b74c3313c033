"""Tells which of vLLM's hashes are determined by an item's content.

Owns: the record of each hash that vLLM makes, and the rule that decides. Does not own: where an item is stored
(caches.py).

A hash is determined by content only if `MultiModalHasher.hash_kwargs` made it from values that it hashes completely, or
from another such hash. Any other hash may stand for different contents in different processes: a client's UUID, a UUID
that a model hashes again with an item's settings, an id in an image's EXIF data, a video's path.

Invariants: a hash without a record is not determined by content. The last record of a hash counts. Each thread has its
own records: vLLM makes and looks up the hashes of one request in one thread, so requests of other threads do not
change them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import local
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from vllm.multimodal.hasher import MultiModalHasher, _get_image_id_bytes
from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.processing.inputs import ProcessorInputs

from ..engine.hooks import hook

HASHES_MAX: Final = 65_536
"""Limit on recorded hashes in a thread. The oldest record is dropped first; its item is then not shared."""
_NAMESPACE: Final = "model_id"
_HASH: Final = "mm_hash"
_PATHS: Final = frozenset({"ov2_codec_video"})
"""Keys of a video's metadata whose value is a path: the model reads the file, but vLLM hashes only the path."""


class _Notes(local):
    def __init__(self) -> None:
        self.hashes: OrderedDict[str, None] = OrderedDict()


_notes: Final = _Notes()


def note(mm_hash: str, follows: bool) -> None:
    """Records whether `mm_hash`, as made last in this thread, is determined by an item's content (`follows`)."""
    hashes = _notes.hashes
    hashes.pop(mm_hash, None)
    if follows:
        hashes[mm_hash] = None
        if len(hashes) > HASHES_MAX:
            hashes.popitem(last=False)


def follows_from_content(mm_hash: str) -> bool:
    """Whether items with this hash have the same content in all processes."""
    return mm_hash in _notes.hashes


def note_hashes() -> None:
    """Hooks vLLM so that it records hashes in this process. Idempotent."""
    hook(MultiModalHasher, "hash_kwargs", _hash_and_note)
    hook(ProcessorInputs, "get_mm_hashes", _get_hashes_and_note)


def _hash_and_note(hash_kwargs: Callable[..., str], algorithm: Any, /, **kwargs: Any) -> str:
    mm_hash = hash_kwargs(algorithm, **kwargs)
    note(mm_hash, all(_is_content(name, value) for name, value in kwargs.items()))
    return mm_hash


def _get_hashes_and_note(
    get_mm_hashes: Callable[..., Any], inputs: ProcessorInputs, model_id: str, *args: Any, **kwargs: Any
) -> Any:
    # Tensord's cache has a name of its own for the model.
    hashes = get_mm_hashes(inputs, getattr(inputs.cache, "model_name", model_id), *args, **kwargs)
    names = inputs.mm_uuid_items or {}
    for modality, of_items in hashes.items():
        given = names.get(modality) or [None] * len(of_items)
        for index, (mm_hash, name) in enumerate(zip(of_items, given, strict=True)):
            if name is not None or _leaves_out(inputs.mm_data_items[modality], index):
                note(mm_hash, False)
    return hashes


def _is_content(name: str, value: Any) -> bool:
    """Whether an argument of `hash_kwargs` is content. A string in an item's place is its name, not its content."""
    if isinstance(value, str):
        return name == _NAMESPACE or (name == _HASH and follows_from_content(value))
    return _is_whole(value)


def _is_whole(value: Any) -> bool:
    """Whether vLLM's hash covers all parts of a value that a processor may read."""
    if value is None or isinstance(value, str | bytes | memoryview | torch.Tensor):
        return True
    if isinstance(value, Image.Image):
        # The transparent colour is not hashed, but some processors' outputs depend on it.
        return _get_image_id_bytes(value) is None and "transparency" not in value.info
    if isinstance(value, MediaWithBytes):
        if isinstance(value.media, Image.Image):
            return _get_image_id_bytes(value.media) is None
        # vLLM hashes the smaller one of frames and file. The file determines the frames, but not vice versa.
        return isinstance(value.media, np.ndarray | torch.Tensor) and value.media.nbytes >= len(value.original_bytes)
    if isinstance(value, np.ndarray | np.generic | int | float):
        # vLLM would hash the addresses of Python objects, which includes integers over 64 bits.
        return not np.asarray(value).dtype.hasobject
    if isinstance(value, list | tuple):
        return all(map(_is_whole, value))
    if isinstance(value, dict):
        return not _PATHS & value.keys() and all(map(_is_whole, value.values()))
    # vLLM pickles such a value, which may cover only a name or a path.
    return False


def _leaves_out(items: Any, index: int) -> bool:
    """Whether an item has metadata for the processor that its hash does not cover."""
    metadata = getattr(items, "metadata", None)
    if isinstance(metadata, list):
        metadata = metadata[index]
    return metadata is not None and not isinstance(items.get_item_for_hash(index), tuple)
