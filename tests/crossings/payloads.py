"""Payloads that are a function of their key and its weights, so that every byte of a read can be checked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

import tensord

Words = np.ndarray[Any, np.dtype[np.uint64]]
KIB: Final = 1 << 10
ENTRY_BYTES: Final = 64 * KIB
ROW: Final = 8
_GOLDEN: Final = 0x9E3779B97F4A7C15


def namespace(revision: str, generation: int = 0) -> tensord.Namespace:
    return tensord.Namespace(
        model="crossing", revision=revision, dtype="uint64", processor="none", generation=generation
    )


def key_of(of: tensord.Namespace, name: str) -> bytes:
    return of.key("crossing", "text", name.encode())


def words(key: bytes, size_bytes: int = ENTRY_BYTES, weights: int = 0) -> Words:
    """(size_bytes / 64, 8) uint64. No word equals the word of another key, or of other weights, at that place.

    Tree headers of all sizes have the same length, so that one payload over another would be mistaken for it.
    """
    first = int.from_bytes(hashlib.sha256(key + b"%d" % weights).digest()[:8], "little")
    flat = np.arange(size_bytes // 8, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(first)
    return flat.reshape(-1, ROW)


def expect(tree: Any, key: bytes, what: str, weights: int = 0) -> None:
    for leaf in leaves(tree):
        found, expected = leaf.reshape(-1), words(key, leaf.nbytes, weights).reshape(-1)
        wrong = np.flatnonzero(found != expected)
        first = [f"{at}: {int(found[at]):#x}, expected {int(expected[at]):#x}" for at in wrong[:1]]
        assert not len(wrong), f"{what}: {len(wrong)} of {len(expected)} words are wrong, the first at {first}"


def leaves(tree: Any) -> Iterator[Words]:
    """The arrays of a payload; a device's tensors as arrays."""
    if isinstance(tree, dict):
        for child in tree.values():
            yield from leaves(child)
    elif isinstance(tree, np.ndarray):
        yield tree
    else:
        yield tree.numpy()
