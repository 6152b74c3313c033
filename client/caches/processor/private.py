"""Copy-on-write views of a leased payload.

Owns: the private mapping. A page of it is the ring's until this process writes to it; then the page is a private copy.
So an in-place operation neither ends the process nor changes the shared payload. Does not own: the pin.
Invariants: a mapping keeps the root of its lease. Each lease gets a new mapping, so that no written page outlives its
entry.
"""

from __future__ import annotations

from mmap import ALLOCATIONGRANULARITY, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap
from typing import Any

import numpy as np

from ...reading.ring_mapping import mapping_under

Array = np.ndarray[Any, Any]


class _PrivateMap(mmap):
    """The pages around one payload. `root` is the root of its lease."""

    root: Array


def private_view(root: Array) -> Array:
    """A writable uint8 array of shape (payload_bytes,) with the bytes of a lease's root, which it keeps alive.

    Costs a mapping and a descriptor for its lifetime. If the process has none left, or the lease is a copy, the result
    is a copy.
    """
    mapping = mapping_under(root)
    if mapping is None:
        return root.copy()
    begins: int = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
    at = root.__array_interface__["data"][0] - begins
    page_at = at - at % ALLOCATIONGRANULARITY
    try:
        pages = _PrivateMap(mapping.fd, at - page_at + len(root), MAP_PRIVATE, PROT_READ | PROT_WRITE, offset=page_at)
    except OSError:
        return root.copy()
    pages.root = root
    return np.ndarray((len(root),), np.uint8, pages, at - page_at)
