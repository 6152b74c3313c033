"""Page-locked host memory for copies of KV blocks: buffers for loads, and one place for each chunk to be stored.

Owns: this memory and its limits. Does not own: what is copied.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ....gpu.interface import Mark

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

    def __init__(self, device: TorchBlocks, block_bytes: int) -> None:
        """`block_bytes`: the least bytes of a buffer."""
        self._device = device
        self.size_bytes = max(LOAD_BYTES, block_bytes)
        self._made = 0
        self._free: list[Array] = []
        self._in_use: deque[tuple[Mark, Array]] = deque()

    def filled(self, source: Array) -> Array:
        """A buffer with the bytes of `source`, (n,) uint8. Waits for the oldest copy if all buffers are in use. Call
        `reading` once its copies are queued."""
        if not self._free and self._made < LOADS:
            self._made += 1
            self._free.append(self._device.page_locked(self.size_bytes))
        if not self._free:
            mark, buffer = self._in_use.popleft()
            mark.wait()
            self._free.append(buffer)
        buffer = self._free.pop()
        np.copyto(buffer[: len(source)], source)
        return buffer

    def reading(self, buffer: Array, mark: Mark) -> None:
        """Keeps a buffer until the mark is reached."""
        self._in_use.append((mark, buffer))


class StorePlaces:
    """Places for chunks that wait to be put. Thread-safe.

    Args:
        bytes_max: the most bytes that are page-locked.
    """

    def __init__(self, device: TorchBlocks, bytes_max: int) -> None:
        self._device = device
        self._bytes_max = bytes_max
        self._made_bytes = 0
        self._lock = threading.Lock()
        self._free: dict[int, list[Array]] = {}

    def take(self, size_bytes: int) -> tuple[Array, Callable[[], None]] | None:
        """A place, (size_bytes,) uint8, and the function that gives it back. None if all are taken."""
        with self._lock:
            free = self._free.setdefault(size_bytes, [])
            if not free:
                slab_bytes = max(SLAB_BYTES, size_bytes)
                if self._made_bytes + slab_bytes > self._bytes_max:
                    return None
                slab = self._device.page_locked(slab_bytes)
                self._made_bytes += slab_bytes
                count = slab_bytes // size_bytes
                free += [slab[at * size_bytes : (at + 1) * size_bytes] for at in range(count)]
            place = free.pop()

        def give_back() -> None:
            with self._lock:
                free.append(place)

        return place, give_back
