"""The payload under which a processor's output is stored: the tree, and the hash of its item.

Owns: the key, the format, and the memory of a read tree's leaves. Does not own: references (loans.py).
Invariants: a receiver gets a tree only under the hash under which it was stored. It checks the hash, since a reference
comes from another process. A page of a copy-on-write view is the ring's until this process writes to it; then the page
is a private copy. Each lease gets a new mapping, so that no written page outlives its entry.
"""

from __future__ import annotations

from mmap import ALLOCATIONGRANULARITY, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap
from typing import Any, Final, Literal

import numpy as np

from ....errors import UsageError, shown
from ...arguments.namespace import Namespace
from ...gpu.interface import mapped
from ...reading.lease import ArrayLease, Lease
from ...reading.ring_mapping import mapping_under

Array = np.ndarray[Any, Any]
Hash = str | bytes
Copy = bool | Literal["on_write"]

_HASH: Final = "hash"
_TREE: Final = "tree"
_KIND: Final = "processor"


def item_key(namespace: Namespace, hash: Hash) -> bytes:
    return namespace.key(_KIND, "", _hash_bytes(hash))


def item_payload(hash: Hash, tree: Any) -> dict[str, Any]:
    return {_HASH: np.frombuffer(_hash_bytes(hash), np.uint8), _TREE: tree}


def stored_tree(lease: Lease | None, copy: Copy = False) -> Any:
    """The tree of a lease's entry, its leaves as they were put; None without a lease, or in another format."""
    return None if lease is None else _payload(lease, copy).get(_TREE)


def checked_tree(hash: Hash, lease: Lease, copy: Copy) -> Any:
    """The tree of a lease's entry, its leaves as they were put. Raises UsageError if it was not stored under `hash`."""
    payload = _payload(lease, copy)
    named = payload.get(_HASH)
    if payload.keys() != {_HASH, _TREE} or not isinstance(named, np.ndarray) or named.tobytes() != _hash_bytes(hash):
        raise UsageError(
            f"the entry referred to as {hash!r} was not stored under that hash; send this item's own reference"
        )
    return payload[_TREE]


def check_hash(hash: object) -> Hash:
    if not isinstance(hash, str | bytes):
        raise UsageError(f"a hash is {shown(hash)}; it must be text or bytes")
    return hash


def _hash_bytes(hash: Hash) -> bytes:
    return hash.encode("utf-8", "surrogatepass") if isinstance(hash, str) else hash


def _payload(lease: Lease, copy: Copy) -> dict[str, Any]:
    """The payload of a lease's entry, its leaves as they were put; empty if it is not in this module's format."""
    if isinstance(lease, ArrayLease):
        return {}
    root = _private_view(lease._root) if copy == "on_write" else lease._root
    payload = lease._recipe.value(root, copy=copy is True)
    if not isinstance(payload, dict):
        return {}
    if copy is True:
        # The recipe copies torch's leaves only.
        owned: dict[str, Any] = mapped(payload, lambda leaf, _: leaf.copy() if isinstance(leaf, np.ndarray) else leaf)
        return owned
    return payload


class _PrivateMap(mmap):
    """The pages around one payload. `root` is the root of its lease."""

    root: Array


def _private_view(root: Array) -> Array:
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
