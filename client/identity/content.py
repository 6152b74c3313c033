"""Names the input of an encoder: the digest of a processed item.

Owns: the digest. Does not own: the names of models and settings.

Invariants: items that differ in a field, a dtype, a shape or a byte have different digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from ...errors import UnsupportedLeaf
from ...shm.payloads.tensors import bytes_of

DIGEST_ATTRIBUTE: Final = "tensord_content_digest"
"""The attribute in which an item carries its `content_digest`, computed at its first use, or when the processor cache
stored it."""


def dtype_name(dtype: Any) -> str:
    """A torch dtype's name in numpy's form: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def content_digest(item: Mapping[str, Any]) -> bytes:
    """SHA-256 over a processed item (a MultiModalKwargsItem), 32 bytes: its fields in the order of their names, each
    with the dtypes, shapes and bytes of its tensors in nested order.

    Raises:
        UnsupportedLeaf: a leaf is not a tensor, array, number, string or None, or a tensor whose memory was freed; or
            the item has no tensor, like the handles that stand for an item in another process's memory.
    """
    import numpy as np
    import torch

    digest = hashlib.sha256()
    tensors = 0

    def add(value: Any, field: str) -> None:
        nonlocal tensors
        if isinstance(value, torch.Tensor):
            digest.update(f"t{dtype_name(value.dtype)}{list(value.shape)}\0".encode())
            digest.update(bytes_of(value, field).data)
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
            raise UnsupportedLeaf(f"{field} has a {type(value).__qualname__}, which cannot be part of a name")

    for name in sorted(item):
        digest.update(f"f{name}\0".encode())
        add(item[name].data, name)
    if not tensors:
        raise UnsupportedLeaf(f"the item has no tensor among {sorted(item)}: it refers to an item in another process")
    return digest.digest()


def digest_of_item(item: Any) -> bytes:
    """`content_digest` of the item, computed once."""
    digest: bytes | None = getattr(item, DIGEST_ATTRIBUTE, None)
    if digest is None:
        digest = content_digest(item)
        setattr(item, DIGEST_ATTRIBUTE, digest)
    return digest
