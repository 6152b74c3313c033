"""Host memory for copies of KV blocks: one place for each chunk to be stored, and a KV cache that lies in host memory.

Owns: the places and their limit; copies within host memory. Does not own: what is copied.
"""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ....gpu.interface import Mark

if TYPE_CHECKING:
    from ....gpu.torch_blocks import TorchBlocks

STORE_BYTES_MAX: Final = 512 << 20
"""Bytes of all places at most."""
SLAB_BYTES: Final = 32 << 20
"""Bytes that are page-locked at a time, unless one chunk is larger. A power of two: torch rounds up to one."""

Array = np.ndarray[Any, Any]


class _Done:
    def wait(self, timeout_s: float | None = None) -> bool:
        return True


DONE: Final[Mark] = _Done()
"""A mark that is reached."""


class HostBlocks:
    """A KV cache in host memory: as TorchBlocks, and as its streams. Each copy is complete when the call returns."""

    def mark(self) -> Mark:
        return DONE

    def stream(self, *, to_host: bool) -> HostBlocks:
        return self

    def copy(self, copies: Array, after: Mark | None = None) -> None:
        """Copies at once. `copies`: (3, n) int64, the addresses of the sources and of the targets, and the bytes."""
        for source, target, size_bytes in copies.T.tolist():
            ctypes.memmove(target, source, size_bytes)

    def page_locked(self, size_bytes: int) -> Array:
        """New memory, (size_bytes,) uint8."""
        return np.empty(size_bytes, np.uint8)


class StorePlaces:
    """Places for chunks that wait to be put. Thread-safe. Page-locked memory is dear to make: it is taken in slabs, and
    kept."""

    def __init__(self, device: TorchBlocks | HostBlocks) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._free: dict[int, list[Array]] = {}
        self._slabs_bytes = 0
        self.taken_bytes = 0

    def take(self, shape: tuple[int, int]) -> Array | None:
        """A place for a chunk, in its shape (blocks, bytes of a block) as uint8. None if all are taken."""
        size_bytes = shape[0] * shape[1]
        with self._lock:
            free = self._free.setdefault(size_bytes, [])
            if not free:
                slab_bytes = max(SLAB_BYTES, size_bytes)
                if self._slabs_bytes + slab_bytes > STORE_BYTES_MAX:
                    return None
                slab = self._device.page_locked(slab_bytes)
                self._slabs_bytes += slab_bytes
                count = slab_bytes // size_bytes
                free += [slab[at * size_bytes : (at + 1) * size_bytes] for at in range(count)]
            self.taken_bytes += size_bytes
            return free.pop().reshape(shape)

    def give_back(self, place: Array) -> None:
        """Ends the use of a place."""
        with self._lock:
            self.taken_bytes -= place.nbytes
            self._free[place.nbytes].append(place.reshape(-1))
