"""Page-locked host memory for copies of KV blocks: buffers for loads, and one place for each chunk to be stored.

Owns: this memory and its limits. Does not own: what is copied.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ....gpu.interface import Mark
from .host_blocks import HostBlocks

if TYPE_CHECKING:
    from ....gpu.torch_blocks import TorchBlocks

LOAD_BYTES: Final = 16 << 20
"""Bytes of each buffer for loads, unless one block is larger."""
LOADS: Final = 3
"""Buffers for loads: one is filled while the others are read."""
SLAB_BYTES: Final = 32 << 20
"""Bytes that are page-locked at a time, unless one chunk is larger. A power of two: torch rounds up to one."""

Array = np.ndarray[Any, Any]


class LoadBuffers:
    """Buffers that a stream reads. One thread uses them.

    Invariants: a buffer is written again only after the mark of its last copy is reached.
    """

    def __init__(self, device: TorchBlocks | HostBlocks, block_bytes: int) -> None:
        """`block_bytes`: the least bytes of a buffer."""
        self._device = device
        self.size_bytes = max(LOAD_BYTES, block_bytes)
        self._in_use: deque[tuple[Mark, Array]] = deque()

    def filled(self, source: Array) -> Array:
        """A buffer with the bytes of `source`, (n,) uint8. Waits for the oldest copy if all buffers are in use. Call
        `reading` once its copies are queued."""
        if len(self._in_use) < LOADS:
            buffer = self._device.page_locked(self.size_bytes)
        else:
            mark, buffer = self._in_use.popleft()
            mark.wait()
        np.copyto(buffer[: len(source)], source)
        return buffer

    def reading(self, buffer: Array, mark: Mark) -> None:
        """Keeps a buffer until the mark is reached."""
        self._in_use.append((mark, buffer))


class StorePlace(NamedTuple):
    """Private memory of one chunk, (blocks, bytes of a block) uint8, and the function that gives it back."""

    chunk: Array
    give_back: Callable[[], None]


class StorePlaces:
    """Places for chunks that wait to be put. Thread-safe.

    Args:
        bytes_max: the most bytes of memory for places.
        keeps: whether memory is kept for other chunks, because it is dear to make.
    """

    def __init__(self, device: TorchBlocks | HostBlocks, bytes_max: int, *, keeps: bool) -> None:
        self._device = device
        self._bytes_max = bytes_max
        self._slab_bytes = SLAB_BYTES if keeps else 0
        self._lock = threading.Lock()
        self._free: dict[int, list[Array]] = {}
        self._free_bytes = 0
        self.taken_bytes = 0

    def take(self, shape: tuple[int, int]) -> StorePlace | None:
        """A place for a chunk of this shape. None if all are taken."""
        size_bytes = shape[0] * shape[1]
        with self._lock:
            free = self._free.setdefault(size_bytes, [])
            if not free:
                slab_bytes = max(self._slab_bytes, size_bytes)
                if self.taken_bytes + self._free_bytes + slab_bytes > self._bytes_max:
                    return None
                slab = self._device.page_locked(slab_bytes)
                self._free_bytes += slab_bytes
                count = slab_bytes // size_bytes
                free += [slab[at * size_bytes : (at + 1) * size_bytes] for at in range(count)]
            memory = free.pop()
            self._free_bytes -= size_bytes
            self.taken_bytes += size_bytes

        def give_back() -> None:
            with self._lock:
                self.taken_bytes -= size_bytes
                if self._slab_bytes:
                    self._free_bytes += size_bytes
                    free.append(memory)

        return StorePlace(memory.reshape(shape), give_back)
