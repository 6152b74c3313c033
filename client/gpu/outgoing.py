"""Payloads of tensors on a device, which are copied from the device straight to their place.

    Device.outgoing(tree, mark) ─→ payload_of ─→ a put (client/writing) writes it to its place

Owns: the payload whose leaves are read from the device. Does not own: the copies (the device), nor the place.

Invariants: the bytes are those that `pack` has of a copy on the host. No copy of a whole leaf is made on the host,
unless the device itself has made one. A leaf that cannot be read raises a TensordError, so that the put ends without
a record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from ...errors import TensordError, UnsupportedLeaf, without_frames
from ...shm.payloads.packing import Packed, pack_spec
from ...shm.payloads.specs import Spec
from ...shm.ring.layout import aligned
from .interface import mapped

__all__ = ["Outgoing", "OutgoingPayload", "payload_of"]

Array = np.ndarray[Any, Any]
Read = Callable[[Array, int, int], object]
"""`read(to, start, stop)` copies the bytes [start, stop) of a leaf, in C order, to `to`, (stop - start,) uint8 of the
host. Returns once they are there."""

PIECE_BYTES: Final = 16 << 20
"""NVIDIA's driver copies 16 MiB at 12 GB/s from an H200 to memory that is not pinned, and 1 MiB at 5 GB/s."""


class Outgoing(NamedTuple):
    """A leaf that lies on a device. `spec`: its shape and dtype, as for `Client.reserve`."""

    spec: Spec
    read: Read


def payload_of(tree: Any, device_name: str, *, depth_max: int) -> OutgoingPayload:
    """The payload of a tree with `Outgoing` leaves.

    Raises: as `pack`.
    """
    reads: list[Read] = []

    def described(leaf: Any, place: str) -> Any:
        if isinstance(leaf, Spec):
            raise UnsupportedLeaf(f"{place} is a Spec, which only reserve takes; pass an array")
        if not isinstance(leaf, Outgoing):
            return leaf
        reads.append(leaf.read)
        return leaf.spec

    return OutgoingPayload(pack_spec(mapped(tree, described), depth_max), reads, device_name)


class OutgoingPayload:
    """`failure`: why a copy failed, or None."""

    def __init__(self, packed: Packed, reads: list[Read], device_name: str) -> None:
        """`reads`: of the leaves that lie on the device, in order."""
        self.header = packed.header
        self.payload_bytes = packed.payload_bytes
        self.failure: Exception | None = None
        self._packed = packed
        self._reads = reads
        self._device_name = device_name

    def write(self, memory: memoryview, start: int) -> None:
        """As `Packed.write`.

        Raises:
            TensordError: the device failed. An unknown part is written.
        """
        self._packed.write(memory, start)
        reads = iter(self._reads)
        at = start + len(self.header)
        for size_bytes, _, _, array, _ in self._packed.sources:
            at = aligned(at)
            if array is None:
                self._read(next(reads), np.ndarray((size_bytes,), np.uint8, memory, at))
            at += size_bytes

    def _read(self, read: Read, to: Array) -> None:
        try:
            for start in range(0, len(to), PIECE_BYTES):
                stop = min(start + PIECE_BYTES, len(to))
                read(to[start:stop], start, stop)
        except TensordError:
            raise
        except Exception as error:
            self.failure = without_frames(error)
            raise TensordError(f"a copy from {self._device_name} failed: {error}; the entry is not stored") from None
