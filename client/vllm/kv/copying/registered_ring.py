"""The parts of the ring that are registered with a GPU's driver, which then copies from there without a buffer.

Owns: which chunks of which mappings are registered, and their limit. Does not own: the driver's calls (client.device),
the copies, nor when they are complete.

A chunk is registered when an entry in it is loaded for the first time. The driver keeps the pages that it has
registered. If the daemon returns them to the system and takes others later, copies would read the former bytes. So
every registration of a ring ends once its count of punches differs, and the ring is left alone for REST_S: memory that
was given back under pressure is not to be taken again at once. For the same reason a chunk with missing pages is not
registered.

Invariants
- A chunk that is registered holds the bytes of the ring, for entries that were pinned before `edges`.
- A mapping lives as long as a registration in it.
- No registration ends before `settle`, which waits for all copies, has returned.
- At most `bytes_max` bytes are registered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ....reading.ring_mapping import RingMapping, mapping_under

if TYPE_CHECKING:
    from ....gpu.torch_blocks import TorchBlocks

CHUNK_BYTES: Final = 64 << 20
"""Bytes of one registration. It takes the driver about 6 ms, in which the engine's own calls of the driver may wait."""
REST_S: Final = 10.0

Array = np.ndarray[Any, Any]
_log = logging.getLogger("tensord")


@dataclass(slots=True)
class _Ring:
    """A mapping with registrations: their numbers, and the count of punches before the first of them."""

    mapping: RingMapping
    address: int
    punches: int
    chunks: set[int] = field(default_factory=set)


class RegisteredRing:
    """The registrations of one GPU. One thread uses them. `settle` waits until all copies from registered memory are
    complete."""

    def __init__(self, device: TorchBlocks, settle: Callable[[], object], bytes_max: int) -> None:
        self._device = device
        self._settle = settle
        self._bytes_max = bytes_max
        self._rings: dict[int, _Ring] = {}
        self._rest_until_s = 0.0
        self.refusal = ""
        """The driver's refusal. After one, no more of the ring is registered."""
        self.registered_bytes = 0

    def edges(self, array: Array) -> list[int] | None:
        """Registers the memory of an array over a pinned entry of the ring. The addresses within it at which one
        registration ends and the next one begins; None if it is not registered: copy through a buffer."""
        mapping = mapping_under(array)
        if mapping is None:
            return None
        self._check(mapping)
        ring = self._rings.get(id(mapping))
        if ring is None:
            # The count of punches is read before the first registration: a punch in between ends it.
            ring = _Ring(mapping, np.frombuffer(mapping, np.uint8).__array_interface__["data"][0], mapping.punches)
        at = array.__array_interface__["data"][0] - ring.address
        first, last = at // CHUNK_BYTES, (at + array.nbytes - 1) // CHUNK_BYTES
        for number in range(first, last + 1):
            if number not in ring.chunks and not self._register(ring, number):
                return None
        return [ring.address + number * CHUNK_BYTES for number in range(first + 1, last + 1)]

    def keep_only(self, mappings: Collection[RingMapping]) -> None:
        """Ends registrations in other mappings, and those whose pages are not the ring's any more."""
        kept = {id(mapping) for mapping in mappings}
        for ring in list(self._rings.values()):
            if id(ring.mapping) not in kept:
                self._end(ring)
            else:
                self._check(ring.mapping)

    def _register(self, ring: _Ring, number: int) -> bool:
        start, size_bytes = self._place(ring, number)
        if (
            ring.punches == 0
            or self.refusal
            or self.registered_bytes + size_bytes > self._bytes_max
            or time.monotonic() < self._rest_until_s
            or not ring.mapping.is_resident(start, size_bytes)
        ):
            return False
        self.refusal = self._device.register(ring.address + start, size_bytes)
        if self.refusal:
            _log.warning(
                "tensord: %d bytes of the ring cannot be registered with the GPU's driver: %s. KV blocks are copied "
                "through a page-locked buffer from now on, which takes the CPU longer",
                *(size_bytes, self.refusal),
            )
            return False
        ring.chunks.add(number)
        self._rings[id(ring.mapping)] = ring
        self.registered_bytes += size_bytes
        return True

    def _place(self, ring: _Ring, number: int) -> tuple[int, int]:
        """Where a chunk begins in its mapping, and its bytes."""
        start = number * CHUNK_BYTES
        return start, min(CHUNK_BYTES, len(ring.mapping) - start)

    def _check(self, mapping: RingMapping) -> None:
        ring = self._rings.get(id(mapping))
        if ring is not None and ring.punches != mapping.punches:
            self._end(ring)
            self._rest_until_s = time.monotonic() + REST_S

    def _end(self, ring: _Ring) -> None:
        """Ends a ring's registrations once no copy reads from them."""
        del self._rings[id(ring.mapping)]
        try:
            self._settle()
        except RuntimeError as error:
            # The GPU has failed, and copies nothing more.
            _log.warning("tensord: copies of KV blocks from the ring failed: %s", error)
        for number in ring.chunks:
            start, size_bytes = self._place(ring, number)
            self.registered_bytes -= size_bytes
            try:
                self._device.unregister(ring.address + start)
            except RuntimeError as error:
                _log.warning("tensord: memory of the ring stays registered with the GPU's driver: %s", error)
