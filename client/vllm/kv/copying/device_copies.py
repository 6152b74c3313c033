"""Copies between chunks and a KV cache in a GPU's memory.

    load:  registered ring ────────────────────────┐ batch of copies, on the stream for loads
           ring ─(CPU)→ page-locked buffer ────────┴→ KV cache
    store: KV cache ── batch, on the stream for stores ─→ page-locked place, which the background thread puts

Owns: the streams, the registrations of the ring, the page-locked memory, and the lists of addresses. Does not own:
which blocks are copied, when a load's pins end, and puts (worker.py).

Invariants
- Copies begin only after the work that the step's thread had queued when it submitted the job.
- Memory that a copy reads or writes stays until the copy's mark is reached.
- No copy crosses the edge of a registration.

Tests run this module on a stand-in; benchmarks/gpu_check.py runs it on a card.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ....gpu.interface import Mark
from ....reading.ring_mapping import RingMapping
from .copies import Copies, Saved
from .registered_ring import CHUNK_BYTES, RegisteredRing
from .staging import LoadBuffers, StorePlaces

if TYPE_CHECKING:
    from ....gpu.torch_blocks import TorchBlocks, TorchBlockStream

Array = np.ndarray[Any, Any]
SOURCE, TARGET, BYTES = range(3)


class DeviceCopies(Copies):
    """Copies of vLLM's KV caches (CanonicalKVCaches) in the memory of one GPU.

    Args:
        registered_bytes_max: the most bytes of the ring to register with the driver.
        store_bytes_max: the most bytes of page-locked memory for chunks that wait to be put.
    """

    def __init__(
        self,
        device: TorchBlocks,
        kv_caches: Any,
        blocks_per_chunk: int,
        *,
        registered_bytes_max: int,
        store_bytes_max: int,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._device = device
        self._kv_caches = kv_caches
        """Keeps the KV cache's memory."""
        self._up, self._down = device.stream(to_host=False), device.stream(to_host=True)
        self._ring = RegisteredRing(
            device, lambda: self._up.mark().wait(), registered_bytes_max, chunk_bytes=chunk_bytes
        )
        layers = [_layers(kv_caches, refs) for refs in kv_caches.group_data_refs]
        self._buffers = LoadBuffers(device, max((int(each[BYTES].sum()) for each in layers), default=0))
        self._places = StorePlaces(device, store_bytes_max)
        self.groups = [
            DeviceGroup(each, blocks_per_chunk, self._up, self._down, self._ring, self._buffers, self._places)
            for each in layers
        ]

    def mark(self) -> Mark:
        """As in Copies."""
        return self._device.mark()

    def loaded(self) -> Mark:
        """As in Copies."""
        return self._up.mark()

    def saved(self) -> Mark:
        """As in Copies."""
        return self._down.mark()

    def tidy(self, mappings: Collection[RingMapping]) -> None:
        """As in Copies: ends registrations of former rings, and of pages that the daemon has returned to the system."""
        self._ring.keep_only(mappings)

    def close(self) -> None:
        """As in Copies. The driver forgets the ring's memory before it is unmapped."""
        self._ring.close()

    @property
    def registered_bytes(self) -> int:
        """Bytes of the ring that are registered now."""
        return self._ring.registered_bytes

    @property
    def refusal(self) -> str:
        """Why the driver refused the last registration that it refused; "" if it refused none."""
        return self._ring.refusal


class DeviceGroup:
    """A group in a GPU's memory."""

    def __init__(
        self,
        layers: Array,
        blocks_per_chunk: int,
        up: TorchBlockStream,
        down: TorchBlockStream,
        ring: RegisteredRing,
        buffers: LoadBuffers,
        places: StorePlaces,
    ) -> None:
        """`layers`: as of `_layers`."""
        self._addresses, self._strides, self._sizes = layers
        self._offsets = np.cumsum(self._sizes) - self._sizes
        self._block_bytes = int(self._sizes.sum())
        self.shape = (blocks_per_chunk, self._block_bytes)
        self._up = up
        self._down = down
        self._ring = ring
        self._buffers = buffers
        self._places = places

    def save(self, blocks: Sequence[int], after: Mark | None) -> Saved | None:
        """As in Group."""
        taken = self._places.take(self.shape[0] * self.shape[1])
        if taken is None:
            return None
        place, give_back = taken
        host, card, sizes = self._copies(_address(place), blocks)
        # After an error some copies may be queued, and write to the place: it is not given back.
        self._down.copy(np.stack([card, host, sizes]), after)
        return Saved(place.reshape(self.shape), give_back)

    def load(self, chunk: Array, first: int, blocks: Sequence[int], after: Mark | None) -> None:
        """As in Group."""
        wanted = chunk[first : first + len(blocks)]
        edges = self._ring.edges(wanted)
        if edges is not None:
            self._up.copy(_split(np.stack(self._copies(_address(wanted), blocks)), edges), after)
            return
        step = self._buffers.size_bytes // self._block_bytes
        for start in range(0, len(blocks), step):
            buffer = self._buffers.filled(wanted[start : start + step].reshape(-1))
            try:
                self._up.copy(np.stack(self._copies(_address(buffer), blocks[start : start + step])), after)
            finally:
                self._buffers.reading(buffer, self._up.mark())

    def _copies(self, host: int, blocks: Sequence[int]) -> tuple[Array, Array, Array]:
        """The copies of blocks without block 0: addresses in host memory, where the blocks lie at `host`, in the KV
        cache, and bytes, each (n,) int64."""
        rows = np.flatnonzero(np.asarray(blocks, np.int64))
        numbers = np.asarray(blocks, np.int64)[rows, None]
        in_host = host + rows[:, None] * self._block_bytes + self._offsets
        on_card = self._addresses + numbers * self._strides
        sizes = np.broadcast_to(self._sizes, on_card.shape)
        return in_host.reshape(-1), on_card.reshape(-1), sizes.reshape(-1)


def _layers(kv_caches: Any, refs: Sequence[Any]) -> Array:
    """For each layer of a group the address of block 0, the bytes from a block to the next, and the bytes to copy, as
    (3, n) int64."""
    tensors = [kv_caches.tensors[ref.tensor_idx].tensor for ref in refs]
    return np.array(
        [
            [tensor.data_ptr() for tensor in tensors],
            [tensor.stride(0) * tensor.element_size() for tensor in tensors],
            [ref.page_size_bytes for ref in refs],
        ],
        np.int64,
    )


def _split(copies: Array, edges: Array) -> Array:
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
