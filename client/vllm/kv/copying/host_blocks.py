"""A KV cache in host memory, in the place of a GPU: each copy is complete when the call returns.

Owns: the copies. Does not own: any memory.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np

from ....gpu.interface import Mark

Array = np.ndarray[Any, Any]


class _Done:
    def wait(self, timeout_s: float | None = None) -> bool:
        return True


DONE: Final[Mark] = _Done()
"""A mark that is reached."""


class HostBlocks:
    """As TorchBlocks, and as its streams. Host memory needs no registration."""

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
