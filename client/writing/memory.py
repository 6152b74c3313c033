"""Memory that this process may write payloads into.

Owns: the writable mapping, and the pins of places in the ring. Does not own: which places were lent (arena.py), nor an
inbox's pages (inbox.py).

Invariants: no array over the mapping is kept, or returned to callers. A forked child does not share the mapping
(shm/ring/unshared.py). A place in the ring is written only under a pin that was published before the place's slot was
seen unchanged; the pin ends with its last reference.

The pages of a place are mapped by one call of the kernel when the place is lent, each page once. One by one, at their
first access, they take longer than the copy: 16 MiB 6 to 7 ms. As for a reader the kernel maps 16 at a time, writable
as the mapping is: 0.9 to 1.3 ms; as for a writer, each by itself: 2.6 to 3.8. The mapping stays writable: making only
one place writable for each copy makes a put of 16 MB 1.7 times as slow.
"""

from __future__ import annotations

import os
from typing import Final

from ...shm.index.index import SPAN, IndexReader, slot_at
from ...shm.lanes.lane import Lane
from ...shm.ring.layout import LANE_WORDS, PAGE_BYTES
from ...shm.ring.segments import prefault
from ...shm.ring.unshared import Unshared
from .wire import Granted

_NOTHING: Final = object()


class WritableMemory:
    """The memory behind `fd`, mapped for writing, in which nobody else writes, so that its places need no pin.

    `bytes` is the whole of it.
    """

    def __init__(self, fd: int) -> None:
        """Maps the memory. The caller keeps `fd`.

        Raises:
            OSError: the process has no free descriptor or no address space.
        """
        size_bytes = os.fstat(fd).st_size
        self._mapped = Unshared(fd, size_bytes)
        self.bytes = memoryview(self._mapped.memory).cast("B")
        self._is_mapped = bytearray(-(-size_bytes // PAGE_BYTES))
        """For each page 1 if `prepare` has mapped it."""

    def hold(self, granted: Granted) -> object | None:
        """Takes a place that was lent. It is the client's until the returned object is collected.

        Returns:
            None if the place is not the client's any more, or beyond the memory, or its lane is frozen.

        Raises:
            IndexError: the lane has no free word for a pin.
        """
        if granted.offset + granted.size_bytes > len(self.bytes):
            return None
        self.prepare(granted.offset, granted.size_bytes)
        return _NOTHING

    def tidy(self) -> None:
        """Frees what is over, as far as that is this process's task. For the connection's thread."""

    def prepare(self, offset: int, size_bytes: int) -> None:
        """Maps the pages of a place. The daemon has allocated them."""
        first, end = offset // PAGE_BYTES, -(-(offset + size_bytes) // PAGE_BYTES)
        if self._is_mapped.find(0, first, end) >= 0:
            prefault(self._mapped.address + first * PAGE_BYTES, (end - first) * PAGE_BYTES, write=False)
            self._is_mapped[first:end] = b"\1" * (end - first)


class RingMemory(WritableMemory):
    """The ring of a client of the daemon's own uid."""

    def __init__(self, fd: int, lane: Lane, index: IndexReader) -> None:
        super().__init__(fd)
        self._lane = lane
        self._index = index

    def hold(self, granted: Granted) -> object | None:
        if granted.offset + granted.size_bytes > len(self.bytes):
            return None
        words = self._index.words
        try:
            pin = self._lane.lend(granted.span_id)
        except IndexError:
            if self._lane.in_use < LANE_WORDS:
                # A fork has frozen the lane, and its connection ends.
                return None
            raise
        # SYNC POINT: as in a get, the pin is stored before the slot is read. The daemon changes seq before its scan.
        at = slot_at(self._index.buckets_at >> 3, granted.slot)
        if words[at] != granted.seq or words[at + SPAN] != granted.span_id:
            return None
        self.prepare(granted.offset, granted.size_bytes)
        return pin
