"""A payload on its way into memory: the tree header, then each leaf at the next multiple of 64.

Owns: the sources of a payload's bytes, and copying any range of them. Does not own: the meaning of the header
(tree.py).

Invariants: every byte of [0, payload_bytes) is written, padding as zeros, except for leaves that their owner writes.
Writing two adjacent ranges equals writing their union.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..errors import UsageError
from .copy import PIECE_BYTES

Array = np.ndarray[Any, Any]


class Leaf(NamedTuple):
    """A leaf of `bytes` bytes at `offset` from the payload's start, copied from `array`.

    `array` may have any strides. Its dtype is as wide as the leaf's own. `array` is None if the leaf's owner writes the
    leaf later. `check` raises UnsupportedLeaf if the process has freed the array's memory; None if it cannot.
    """

    offset: int
    bytes: int
    array: Array | None
    check: Callable[[], None] | None = None

    @property
    def end(self) -> int:
        return self.offset + self.bytes


class Payload:
    """A payload as it will lie in memory: `header`, then `leaves` in the order of offsets, `payload_bytes` in total.

    The leaves' arrays are read when they are written. Changes to the arrays before that change the bytes written.

    `piece_bytes`: how many bytes a writer copies by one call of `write_range`, before it takes their checksum.
    """

    piece_bytes: ClassVar[int] = PIECE_BYTES
    __slots__ = ("header", "leaves", "payload_bytes")

    def __init__(self, header: bytes, leaves: list[Leaf], payload_bytes: int) -> None:
        self.header = header
        self.leaves = leaves
        self.payload_bytes = payload_bytes

    def check(self) -> None:
        """
        Raises:
            UnsupportedLeaf: the memory of a leaf was freed.
        """
        for leaf in self.leaves:
            if leaf.check is not None:
                leaf.check()

    def write_into(self, buffer: memoryview | bytearray | Array) -> None:
        """Writes the whole payload to the first `payload_bytes` of a writable, contiguous buffer.

        Raises:
            UsageError: the buffer is too short or read-only.
            UnsupportedLeaf: the memory of a leaf was freed.
        """
        self.write_range(buffer, 0, self.payload_bytes)

    def write_range(self, to: memoryview | bytearray | Array, start: int, stop: int) -> None:
        """Writes the payload's bytes [start, stop) to the start of `to`. The range may cut leaves.

        Large leaves are copied without the GIL.

        Raises:
            UsageError: the range is not within the payload, or `to` is shorter than the range or read-only.
            UnsupportedLeaf: the memory of a leaf was freed. An unknown part of the range is written.
        """
        if not 0 <= start <= stop <= self.payload_bytes:
            raise UsageError(f"[{start}, {stop}) is not within the payload's {self.payload_bytes} bytes")
        if start == stop:
            return
        piece: Array = np.frombuffer(to, np.uint8)
        if len(piece) < stop - start or not piece.flags.writeable:
            raise UsageError(
                f"a buffer of {len(piece)} bytes (writable: {piece.flags.writeable}) was given for "
                f"{stop - start} bytes of a payload; give a writable one of at least that size"
            )
        at = min(stop, max(start, len(self.header)))
        if start < at:
            np.copyto(piece[: at - start], np.frombuffer(self.header, np.uint8)[start:at])
        for leaf in self.leaves[bisect_right(self.leaves, start, key=operator.attrgetter("end")) :]:
            if leaf.offset > at:
                until = min(stop, leaf.offset)
                piece[at - start : until - start] = 0
                at = until
            if at == stop:
                break
            until = min(stop, leaf.end)
            if leaf.array is not None and at < until:
                _copy_leaf(piece[at - start : until - start], leaf, leaf.array, at - leaf.offset, until - leaf.offset)
            at = until


def _copy_leaf(to: Array, leaf: Leaf, source: Array, start: int, stop: int) -> None:
    if leaf.check is None:
        _copy_bytes(to, source, start, stop)
        return
    # The memory may also be freed by another thread during the copy. Then what was copied is not of the leaf.
    leaf.check()
    _copy_bytes(to, source, start, stop)
    leaf.check()


def _copy_bytes(to: Array, source: Array, start: int, stop: int) -> None:
    """Copies bytes [start, stop) of `source`, counted in C order, to `to`, (n,) uint8."""
    if source.flags.c_contiguous:
        np.copyto(to, source.reshape(-1).view(np.uint8)[start:stop])
        return
    # numpy copies whole rows of any strides. The first and last row may be cut; each is copied recursively, row by row.
    row_bytes = source.nbytes // len(source)
    first, last = -(-start // row_bytes), stop // row_bytes
    if first > last:
        _copy_row(to, source, last, start - last * row_bytes, stop - last * row_bytes)
        return
    head, tail = first * row_bytes - start, last * row_bytes - start
    if head:
        _copy_row(to[:head], source, first - 1, row_bytes - head, row_bytes)
    if first < last:
        rows = source[first:last]
        np.copyto(np.ndarray(rows.shape, rows.dtype, to, head), rows)
    if tail < len(to):
        _copy_row(to[tail:], source, last, 0, len(to) - tail)


def _copy_row(to: Array, source: Array, position: int, start: int, stop: int) -> None:
    row = source[position, ...] if source.ndim > 1 else source[position : position + 1].copy()
    _copy_bytes(to, row, start, stop)
