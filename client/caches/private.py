"""Views of a leased payload on which a process may write for itself, without a copy of what it does not write on.

Owns: the private mapping. A page of it is the ring's until somebody writes on it, and then this process's own, so an
in-place operation neither ends the process nor reaches anybody else. Does not own the pin: the mapping keeps the root
of its lease, and is made anew for each lease, so that no page of it outlives the entry that it shows.
"""

from __future__ import annotations

from mmap import ALLOCATIONGRANULARITY, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap
from typing import Any

import numpy as np

from ..core.ring_mapping import mapping_under

Array = np.ndarray[Any, Any]


class _PrivateMap(mmap):
    """The pages around one payload; `root` is the lease's."""

    root: Array


def private_view(root: Array) -> Array:
    """A writable array, (payload_bytes,) uint8, with the bytes of a lease's root; it keeps the root alive.

    It costs a mapping and a descriptor for as long as it lives. Where the process has none left, or the lease is a copy
    anyway, it is a copy.
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
