"""Copies between chunks and a KV cache, as a worker makes them; and those of a KV cache in host memory.

Owns: the interface, and the copies in host memory. Does not own: copies of a GPU (device_copies.py), which blocks are
copied, and what becomes of chunks (worker.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ....gpu.interface import Mark
from ....reading.ring_mapping import RingMapping

Array = np.ndarray[Any, Any]
Layer = tuple[Array, int]


class Saved(NamedTuple):
    """A chunk that is saved once the mark of `Copies.saved` is reached: private memory, and the function that gives the
    memory back."""

    chunk: Array
    give_back: Callable[[], None]


class Group(Protocol):
    """One KV cache group: the memory of its layers. `shape` is that of a chunk: blocks, and bytes of a block in all
    layers."""

    shape: tuple[int, int]

    def save(self, blocks: Sequence[int], after: Mark | None) -> Saved | None:
        """Begins to copy a whole chunk's blocks, once `after` is reached. None if there is no room for it."""
        ...

    def load(self, chunk: Array, first: int, blocks: Sequence[int], after: Mark | None) -> None:
        """Begins to copy blocks of a chunk, from its block `first` on, to these blocks of the KV cache, once `after` is
        reached. Block 0 stands for none. The chunk stays as it is until the mark of `Copies.loaded` is reached."""
        ...


class Copies:
    """The copies of one worker, which are complete when they are begun; subclasses have others. One thread, the copier,
    calls all methods but `mark`.

    `groups`: the KV cache groups.
    """

    groups: Sequence[Group]

    def mark(self) -> Mark | None:
        """A mark after the work that the step's thread has queued; None if such work is done when it is queued."""
        return None

    def loaded(self) -> Mark | None:
        """A mark after all loads begun so far; None if they are complete."""
        return None

    def saved(self) -> Mark | None:
        """A mark after all saves begun so far; None if they are complete."""
        return None

    def tidy(self, mappings: Collection[RingMapping]) -> None:
        """Called now and then. `mappings`: the rings that loads may still read."""

    def close(self) -> None:
        """Gives everything up. All copies are complete."""


class HostGroup:
    """A group in host memory. Copies are complete when the call returns.

    Args:
        layers: for each layer the KV cache, (blocks, n) uint8 with n >= the layer's bytes, and the layer's bytes.
        blocks_per_chunk: blocks in a stored chunk.
    """

    def __init__(self, layers: Sequence[Layer], blocks_per_chunk: int) -> None:
        self._layers = layers
        self.shape = (blocks_per_chunk, sum(size_bytes for _, size_bytes in layers))

    def save(self, blocks: Sequence[int], after: Mark | None) -> Saved:
        """As in Group."""
        chunk: Array = np.empty(self.shape, np.uint8)
        at = 0
        for memory, size_bytes in self._layers:
            for row, block in enumerate(blocks):
                np.copyto(chunk[row, at : at + size_bytes], memory[block, :size_bytes])
            at += size_bytes
        return Saved(chunk, _nothing)

    def load(self, chunk: Array, first: int, blocks: Sequence[int], after: Mark | None) -> None:
        """As in Group."""
        at = 0
        for memory, size_bytes in self._layers:
            for row, block in enumerate(blocks, first):
                if block:
                    np.copyto(memory[block, :size_bytes], chunk[row, at : at + size_bytes])
            at += size_bytes


class HostCopies(Copies):
    """Copies of vLLM's KV caches (CanonicalKVCaches) in host memory."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int) -> None:
        memory = [cache.tensor.numpy().view(np.uint8) for cache in kv_caches.tensors]
        self.groups = [
            HostGroup([(memory[ref.tensor_idx], ref.page_size_bytes) for ref in refs], blocks_per_chunk)
            for refs in kv_caches.group_data_refs
        ]


def _nothing() -> None:
    pass
