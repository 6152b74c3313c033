"""Payloads of tensors on a device, which are copied from the device straight to their place.

    Device.outgoing(tree, mark) ─→ payload_of ─→ puts.py writes ranges of it: into a span of the ring, or into the inbox

Owns: the payload whose ranges are read from the device. Does not own: the copies (the device), the order of a put's
messages (client/core).

Invariants: the bytes are those of `encode(device.to_host(tree, mark))`. No copy of a whole leaf is made on the host,
unless the device itself has made one. A range that cannot be read raises a TensordError, so that the put ends without
being committed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...errors import TensordError, UnsupportedLeaf, without_frames
from ...shm.payload import Leaf, Payload
from ...shm.tree import Spec, encode_spec
from .interface import mapped

__all__ = ["Outgoing", "OutgoingPayload", "payload_of"]

Array = np.ndarray[Any, Any]
Read = Callable[[Array, int, int], object]
"""`read(to, start, stop)` copies the bytes [start, stop) of a leaf, in C order, to `to`, (stop - start,) uint8 of the
host. Returns once they are there."""


class Outgoing(NamedTuple):
    """A leaf that lies on a device. `spec`: its shape and dtype, as for `Client.reserve`."""

    spec: Spec
    read: Read


def payload_of(tree: Any, device_name: str, *, depth_max: int) -> OutgoingPayload:
    """The payload of a tree with `Outgoing` leaves.

    Raises: as `encode`.
    """
    reads: list[Read] = []

    def described(leaf: Any, place: str) -> Any:
        if isinstance(leaf, Spec):
            raise UnsupportedLeaf(f"{place} is a Spec, which only reserve takes; pass an array")
        if not isinstance(leaf, Outgoing):
            return leaf
        reads.append(leaf.read)
        return leaf.spec

    payload = encode_spec(mapped(tree, described), depth_max=depth_max)
    leaves = [leaf for leaf in payload.leaves if leaf.array is None]
    return OutgoingPayload(payload, list(zip(leaves, reads, strict=True)), device_name)


class OutgoingPayload(Payload):
    """`parts`: the leaves that lie on the device, in the order of offsets. `failure`: why a copy failed, or None."""

    # NVIDIA's driver copies 16 MiB at 12 GB/s from an H200 to memory that is not pinned, and 1 MiB at 5 GB/s.
    piece_bytes = 16 << 20
    __slots__ = ("_device_name", "_parts", "failure")

    def __init__(self, described: Payload, parts: list[tuple[Leaf, Read]], device_name: str) -> None:
        super().__init__(described.header, described.leaves, described.payload_bytes)
        self._parts = parts
        self._device_name = device_name
        self.failure: Exception | None = None

    def write_range(self, to: memoryview | bytearray | Array, start: int, stop: int) -> None:
        """As `Payload.write_range`.

        Raises:
            TensordError: the device failed. An unknown part of the range is written.
        """
        super().write_range(to, start, stop)
        if start == stop:
            return
        piece: Array = np.frombuffer(to, np.uint8)
        for leaf, read in self._parts[bisect_right(self._parts, start, key=_end_of) :]:
            first, last = max(start, leaf.offset), min(stop, leaf.end)
            if leaf.offset >= stop:
                return
            if first < last:
                self._read(read, piece[first - start : last - start], first - leaf.offset, last - leaf.offset)

    def _read(self, read: Read, to: Array, start: int, stop: int) -> None:
        try:
            read(to, start, stop)
        except TensordError:
            raise
        except Exception as error:
            self.failure = without_frames(error)
            raise TensordError(f"a copy from {self._device_name} failed: {error}; the entry is not stored") from None


def _end_of(part: tuple[Leaf, Read]) -> int:
    return part[0].end
