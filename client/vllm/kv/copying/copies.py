"""Copies between chunks and a worker's KV cache, by address.

    load:  registered ring, or a host's ───────────┐ batch of copies, on the stream for loads
           ring ─(CPU)→ page-locked buffer ────────┴→ KV cache
    store: KV cache ── batch, on the stream for stores ─→ place, which the background thread puts

Owns: the streams, the registrations of the ring, the buffers for loads, and the lists of addresses. Does not own: which
blocks are copied, when a load's pins end, and puts (worker.py).

Invariants
- Copies begin only after the work that the step's thread had queued when it submitted the job.
- Memory that a copy reads or writes stays until the copy's mark is reached.
- No copy crosses the edge of a registration.

Tests with engines run this module on host memory, others on a stand-in card; benchmarks/gpu_check.py runs it on a card.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ....gpu.interface import Mark
from ....reading.ring_mapping import RingMapping
from .host_memory import HostBlocks, StorePlaces
from .registered_ring import RegisteredRing

if TYPE_CHECKING:
    from ....gpu.torch_blocks import TorchBlocks

LOAD_BYTES: Final = 16 << 20
"""Bytes of each buffer for loads, unless one block is larger."""
LOADS: Final = 3
"""Buffers for loads: one is filled while the others are read."""
SOURCE, TARGET, BYTES = range(3)

Array = np.ndarray[Any, Any]


class Group:
    """The layers of one KV cache group of vLLM's KV caches (CanonicalKVCaches).

    `shape` is that of a chunk: blocks, and bytes of a block in all layers.
    """

    def __init__(self, kv_caches: Any, refs: Sequence[Any], blocks_per_chunk: int) -> None:
        tensors = [kv_caches.tensors[ref.tensor_idx].tensor for ref in refs]
        self._addresses = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
        self._strides = np.array([tensor.stride(0) * tensor.element_size() for tensor in tensors], np.int64)
        self._sizes = np.array([ref.page_size_bytes for ref in refs], np.int64)
        self._offsets = np.cumsum(self._sizes) - self._sizes
        self.shape = (blocks_per_chunk, int(self._sizes.sum()))

    def copies(self, host: int, rows: Array, blocks: Sequence[int]) -> Array:
        """The copies of rows of `blocks` from host memory, where the blocks lie at `host`, to the KV cache, (3, n)
        int64: sources, targets, bytes."""
        numbers = np.asarray(blocks, np.int64)[rows, None]
        in_host = host + rows[:, None] * self.shape[1] + self._offsets
        in_cache = self._addresses + numbers * self._strides
        return np.stack([each.reshape(-1) for each in np.broadcast_arrays(in_host, in_cache, self._sizes)])


class Copies:
    """The copies of one worker. One thread, the copier, calls all methods but `mark`.

    Args:
        device: where the KV cache is.
        registered_bytes_max: the most bytes of the ring to register with a GPU's driver.
    """

    def __init__(
        self,
        device: TorchBlocks | HostBlocks,
        kv_caches: Any,
        blocks_per_chunk: int,
        *,
        registered_bytes_max: int,
    ) -> None:
        self._device = device
        self._kv_caches = kv_caches
        """Keeps the KV cache's memory."""
        self._up, self._down = device.stream(to_host=False), device.stream(to_host=True)
        self.groups = [Group(kv_caches, refs, blocks_per_chunk) for refs in kv_caches.group_data_refs]
        self.ring: RegisteredRing | None = None
        if not isinstance(device, HostBlocks):
            self.ring = RegisteredRing(device, lambda: self._up.mark().wait(), registered_bytes_max)
        self._buffer_bytes = max([LOAD_BYTES, *(group.shape[1] for group in self.groups)])
        self._buffers: deque[tuple[Mark, Array]] = deque()
        """The buffers for loads, each with the mark of the last copy from it. The oldest copy is the first."""
        self.places = StorePlaces(device)

    def mark(self) -> Mark:
        """A mark after the work that the step's thread has queued."""
        return self._device.mark()

    def loaded(self) -> Mark:
        """A mark after all loads begun so far."""
        return self._up.mark()

    def saved(self) -> Mark:
        """A mark after all saves begun so far."""
        return self._down.mark()

    def save(self, group: Group, chunk: Array, blocks: Sequence[int], after: Mark) -> None:
        """Begins to copy a whole chunk's blocks into the memory of a place, once `after` is reached. The place is not
        given back before the mark of `saved` is reached, also after an error."""
        copies = group.copies(_address(chunk), np.arange(len(blocks)), blocks)
        self._down.copy(copies[[TARGET, SOURCE, BYTES]], after)

    def load(self, group: Group, chunk: Array, first: int, blocks: Sequence[int], after: Mark) -> None:
        """Begins to copy blocks of a chunk, from its block `first` on, to these blocks of the KV cache, once `after` is
        reached. Block 0 stands for none. The chunk stays as it is until the mark of `loaded` is reached."""
        wanted = chunk[first : first + len(blocks)]
        edges: Sequence[int] | None = () if self.ring is None else self.ring.edges(wanted)
        if edges is not None:
            copies = group.copies(_address(wanted), np.flatnonzero(blocks), blocks)
            self._up.copy(_split(copies, edges), after)
            return
        step = self._buffer_bytes // group.shape[1]
        for start in range(0, len(blocks), step):
            part = blocks[start : start + step]
            source = wanted[start : start + step].reshape(-1)
            buffer = self._free_buffer()
            np.copyto(buffer[: len(source)], source)
            try:
                self._up.copy(group.copies(_address(buffer), np.flatnonzero(part), part), after)
            finally:
                self._buffers.append((self._up.mark(), buffer))

    def _free_buffer(self) -> Array:
        """A buffer that no copy reads. Waits for the oldest copy if all of them are read."""
        if len(self._buffers) < LOADS:
            return self._device.page_locked(self._buffer_bytes)
        mark, buffer = self._buffers.popleft()
        mark.wait()
        return buffer

    def tidy(self, mappings: Collection[RingMapping]) -> None:
        """Ends registrations of other rings than these, and of pages that the daemon has returned to the system."""
        if self.ring is not None:
            self.ring.keep_only(mappings)


def _split(copies: Array, edges: Sequence[int]) -> Array:
    """The copies with each copy whose source crosses an edge cut in two there."""
    for edge in edges:
        before = edge - copies[SOURCE]
        crossing = np.flatnonzero((before > 0) & (before < copies[BYTES]))
        if len(crossing):
            rest = copies[:, crossing].copy()
            done = before[crossing]
            rest[SOURCE] += done
            rest[TARGET] += done
            rest[BYTES] -= done
            copies[BYTES, crossing] = done
            copies = np.concatenate([copies, rest], axis=1)
    return copies


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
