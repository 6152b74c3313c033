"""The rings that a worker maps: the one that its client is attached to, and for KEPT_S those before, which steps in
progress may still name.

Owns: these mappings. Does not own: who knows of them.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from ...reading.lease import Lease, RingReader
from ...reading.ring_mapping import RingMapping
from ...reading.view import View

KEPT_S: Final = 60.0


class MappedRings:
    """The mapped rings, by identity. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rings: dict[bytes, tuple[RingReader, float]] = {}
        """With the time at which each was seen last."""
        self.present = b""
        """The identity of the ring that was seen last; b"" before the first."""

    def look(self, view: View | None) -> None:
        """Maps the ring of the client's view, and unmaps old ones. Does not wait."""
        if view is None:
            return
        ring, now_s = view.ring, time.monotonic()
        with self._lock:
            known, _ = self._rings.get(ring.identity, (ring, 0.0))
            self._rings[ring.identity] = (ring if len(known) < len(ring) else known), now_s
            for identity in [each for each, (_, seen_s) in self._rings.items() if now_s - seen_s > KEPT_S]:
                del self._rings[identity]
            self.present = ring.identity

    @property
    def mappings(self) -> list[RingMapping]:
        with self._lock:
            return [ring.mapping for ring, _ in self._rings.values()]

    def borrow(self, handle: bytes) -> Lease | None:
        """The entry of a handle, without a pin; None if its ring is not mapped, or the entry is not there."""
        ring, _ = self._rings.get(handle[:16], (None, 0.0))
        return ring.borrow(handle) if ring is not None else None

    def clear(self) -> None:
        with self._lock:
            self._rings.clear()
