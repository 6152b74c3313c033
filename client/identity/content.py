"""Names what an encoder is given: the digest of a processed item.

Invariant: items that differ in a field, a dtype, a shape or a byte have different digests.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from typing import Any, Final

from ...errors import UnsupportedLeaf

_DIGESTS_MAX: Final = 4096
DIGEST_ATTRIBUTE: Final = "tensord_content_digest"
"""Where an item that the processor cache has read carries its `content_digest`, taken when it was stored."""


def dtype_name(dtype: Any) -> str:
    """A torch dtype's name, as numpy's dtypes have it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


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
