"""A payload on its way into memory: the tree header, then each leaf at the next multiple of 64.

Owns: the sources of a payload's bytes, and writing them: one copy of each leaf. Does not own: the header (packing.py),
nor the memory.

Invariants: `write` writes each byte of the payload, padding as zeros, except for leaves that their owner writes, and no
byte outside of it, whatever happens to the caller's arrays meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from .dtypes import DType
from .plain_tensors import Watch

Array = np.ndarray[Any, Any]
ndarray = np.ndarray

Source: TypeAlias = tuple[int, Sequence[int], DType, Array | None, Watch | None]
"""A leaf: its bytes, the shape and dtype of its copy, where it is copied from, and the watch over that memory. Without
an array, its owner writes the leaf."""

_ZEROS: Final = [bytes(gap) for gap in range(64)]


class Packed(NamedTuple):
    """A payload before it is written: `header`, then `sources` in order, `payload_bytes` in total. The sources are read
    when they are written."""

    header: bytes
    sources: Sequence[Source]
    payload_bytes: int

    def write(self, memory: memoryview, start: int) -> None:
        """Writes a payload to byte `start`, a multiple of 64, of writable memory of bytes. Copies larger leaves without
        the GIL.

        Raises:
            UnsupportedLeaf: the process freed the memory of a leaf meanwhile.
            ValueError: an array got another shape meanwhile.
        """
        header, sources, _ = self
        at = start + len(header)
        memory[start:at] = header
        for size_bytes, shape, dtype, array, watch in sources:
            if gap := -at & 63:
                memory[at : at + gap] = _ZEROS[gap]
                at += gap
            if watch is None:
                if array is not None:
                    ndarray(shape, dtype, memory, at)[...] = array
            else:
                pointer, address, gone = watch
                if pointer() != address:
                    gone()
                ndarray(shape, dtype, memory, at)[...] = array
                # Another thread may have freed the memory during the copy. Then what was copied is not of the leaf.
                if pointer() != address:
                    gone()
            at += size_bytes


class Whole:
    """A payload that stands somewhere as a whole: `memory`, (payload_bytes,) uint8, begins with its header."""

    __slots__ = ("_memory", "header", "payload_bytes")

    def __init__(self, header: bytes, memory: Array) -> None:
        self.header, self.payload_bytes, self._memory = header, len(memory), memory

    def write(self, memory: memoryview, start: int) -> None:
        """As `Packed.write`."""
        ndarray((self.payload_bytes,), np.uint8, memory, start)[...] = self._memory


write: Final = Packed.write
