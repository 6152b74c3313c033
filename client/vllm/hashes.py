"""Which of vLLM's hashes follow from an item's content.

Owns: what is noted of each hash where vLLM makes it, and by what rule. Does not own where an item is stored
(processor.py).

A hash follows from the content only if `MultiModalHasher.hash_kwargs` made it of values that it reads whole, or of
another such hash. Any other hash may stand for different contents in different processes: a client's UUID, a UUID that
a model hashes again with an item's settings, an id in a picture's EXIF data, a video's path.

Invariants: a hash that is not noted does not follow. The last note of a hash counts. Each thread has its own notes:
vLLM makes the hashes of a request and looks them up in one thread, and another thread's request changes none of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from threading import local
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from vllm.multimodal.hasher import MultiModalHasher, _get_image_id_bytes
from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.processing.inputs import ProcessorInputs

HASHES_MAX: Final = 65_536
"""Noted in a thread. The oldest goes first; its item is then the frontend's own."""
_NAMESPACE: Final = "model_id"
_HASH: Final = "mm_hash"
_PATHS: Final = frozenset({"ov2_codec_video"})
"""Keys of a video's metadata under which its path stands: the model reads the file, vLLM hashes the path."""
_OURS: Final = "_tensord"


class _Notes(local):
    def __init__(self) -> None:
        self.hashes: OrderedDict[str, None] = OrderedDict()


_notes: Final = _Notes()


def note(mm_hash: str, follows: bool) -> None:
    """Whether `mm_hash`, as it was made last in this thread, follows from an item's content."""
    hashes = _notes.hashes
    hashes.pop(mm_hash, None)
    if follows:
        hashes[mm_hash] = None
        if len(hashes) > HASHES_MAX:
            hashes.popitem(last=False)


def follows_from_content(mm_hash: str) -> bool:
    """Whether items of this hash have one content in all processes."""
    return mm_hash in _notes.hashes


def note_hashes(name_of: Callable[[Any], str | None]) -> None:
    """Has vLLM's hashes noted in this process, once.

    Args:
        name_of: what hashes for a cache have in place of the model's name; None: the model's name.
    """
    if not hasattr(MultiModalHasher.hash_kwargs, _OURS):
        MultiModalHasher.hash_kwargs = _noting_hashes(MultiModalHasher.hash_kwargs)
    if not hasattr(ProcessorInputs.get_mm_hashes, _OURS):
        ProcessorInputs.get_mm_hashes = _noting_names(ProcessorInputs.get_mm_hashes, name_of)


def _noting_hashes(original: Callable[..., str]) -> Callable[..., str]:
    @wraps(original)
    def hash_kwargs(algorithm: Any, /, **kwargs: Any) -> str:
        mm_hash = original(algorithm, **kwargs)
        note(mm_hash, all(_is_content(name, value) for name, value in kwargs.items()))
        return mm_hash

    setattr(hash_kwargs, _OURS, True)
    return staticmethod(hash_kwargs)


def _noting_names(original: Callable[..., Any], name_of: Callable[[Any], str | None]) -> Callable[..., Any]:
    @wraps(original)
    def get_mm_hashes(self: ProcessorInputs, model_id: str, *args: Any, **kwargs: Any) -> Any:
        hashes = original(self, name_of(self.cache) or model_id, *args, **kwargs)
        names = self.mm_uuid_items or {}
        for modality, of_items in hashes.items():
            given = names.get(modality) or [None] * len(of_items)
            for index, (mm_hash, name) in enumerate(zip(of_items, given, strict=True)):
                if name is not None or _leaves_out(self.mm_data_items[modality], index):
                    note(mm_hash, False)
        return hashes

    setattr(get_mm_hashes, _OURS, True)
    return get_mm_hashes


def _is_content(name: str, value: Any) -> bool:
    """Whether an argument of `hash_kwargs` follows from the content. A string in an item's place is its name."""
    if isinstance(value, str):
        return name == _NAMESPACE or (name == _HASH and follows_from_content(value))
    return _is_whole(value)


def _is_whole(value: Any) -> bool:
    """Whether vLLM's hash covers all of a value that a processor may read."""
    if value is None or isinstance(value, str | bytes | memoryview):
        return True
    if isinstance(value, Image.Image):
        # The transparent colour is not hashed, and changes what some processors make.
        return _get_image_id_bytes(value) is None and "transparency" not in value.info
    if isinstance(value, MediaWithBytes):
        if isinstance(value.media, Image.Image):
            return _get_image_id_bytes(value.media) is None
        # Of frames and file vLLM hashes the shorter one. The frames follow from the file, not the file from the frames.
        return isinstance(value.media, np.ndarray | torch.Tensor) and value.media.nbytes >= len(value.original_bytes)
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, np.ndarray | np.generic | int | float):
        # Of Python objects, as of integers over 64 bits, the addresses would be hashed.
        return not np.asarray(value).dtype.hasobject
    if isinstance(value, list | tuple):
        return all(map(_is_whole, value))
    if isinstance(value, dict):
        return not _PATHS & value.keys() and all(map(_is_whole, value.values()))
    # Pickled, perhaps by a name or a path.
    return False


def _leaves_out(items: Any, index: int) -> bool:
    """Whether an item has metadata, which a processor reads, and its hash has not."""
    metadata = getattr(items, "metadata", None)
    if isinstance(metadata, list):
        metadata = metadata[index]
    return metadata is not None and not isinstance(items.get_item_for_hash(index), tuple)
