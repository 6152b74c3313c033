"""Memory that this process may write payloads into: the ring, or an inbox, memory of its own that the daemon reads.

    ┌─ as large as the ring: places that the daemon lends, each at its offset in the ring ─┬─ one prefix query ─┐

An inbox is for clients that may not write into the ring, and for queries.

Owns: the writable mapping, the pins of places in the ring, an inbox's file, and giving back pages of places that are
over. Does not own: which places were lent (arena.py).

Invariants: no array over the mapping is kept, or returned to callers. A forked child does not share the mapping
(shm/ring/unshared.py). A place in the ring is written only under a pin that was published before the place's slot was
seen unchanged; the pin ends with its last reference. Nobody can resize an inbox. A page of it is given back only after
the daemon has carried out all records of the places that it has bytes of, and while no other place has bytes of it.

The pages of a place are mapped by one call of the kernel when the place is lent, each page once, as for a reader, so
that the kernel maps 16 at a time: 16 MiB take 0.9 to 1.3 ms; one by one, at their first access, 6 to 7. Making only one
place writable for each copy would make a put of 16 MB 1.7 times as slow.
"""

from __future__ import annotations

import errno
import os
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final
from weakref import finalize, ref

import numpy as np

from ...errors import NotEnoughMemory
from ...ipc.messages.schema import PREFIX_BYTES_MAX
from ...ipc.wire.descriptors import no_descriptor
from ...shm.index.index import SPAN, IndexReader, slot_at
from ...shm.lanes.lane import Lane
from ...shm.ring.layout import LANE_WORDS, PAGE_BYTES
from ...shm.ring.segments import ADDRESS_LIMIT, FILE_LIMIT, address_of, create_inbox, prefault, punch
from ...shm.ring.unshared import unshared
from .wire import Granted

QUERY_BYTES: Final = PREFIX_BYTES_MAX


class WritableMemory:
    """The memory behind `fd`, mapped for writing. `bytes` is the whole of it."""

    def __init__(self, fd: int) -> None:
        """Maps the memory. The caller keeps `fd`."""
        size_bytes = os.fstat(fd).st_size
        memory = unshared(fd, size_bytes)
        self.bytes = memoryview(memory)
        self._address = address_of(memory)
        self._is_mapped = bytearray(-(-size_bytes // PAGE_BYTES))
        """For each page 1 if `prepare` has mapped it."""

    @abstractmethod
    def hold(self, granted: Granted) -> object | None:
        """Takes a place that was lent. It is the client's until the returned object is collected. None if the place is
        not the client's any more, or beyond the memory, or its lane is frozen. Raises IndexError without a free word
        of the lane for a pin."""

    def tidy(self) -> None:
        """Frees what is over, as far as that is this process's task. For the connection's thread."""

    def prepare(self, offset: int, size_bytes: int) -> tuple[int, int]:
        """Maps the pages of a place, which the daemon has allocated. Returns the first one and that after the last."""
        first, end = offset // PAGE_BYTES, -(-(offset + size_bytes) // PAGE_BYTES)
        if self._is_mapped.find(0, first, end) >= 0:
            prefault(self._address + first * PAGE_BYTES, (end - first) * PAGE_BYTES, write=False)
            self._is_mapped[first:end] = b"\1" * (end - first)
        return first, end


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


class _Place:
    """A place that is the client's while this object lives."""

    __slots__ = ("__weakref__",)


class Inbox(WritableMemory):
    """One inbox. `query_at`: where a query lies, of up to QUERY_BYTES. `ring_bytes`: the size of the ring; 0 for an
    inbox of queries alone. `progress` returns the numbers of the last record written, and of the last carried out."""

    def __init__(self, ring_bytes: int, progress: Callable[[], tuple[int, int]] = lambda: (0, 0)) -> None:
        self.size_bytes = ring_bytes + QUERY_BYTES
        self.query_at = ring_bytes
        try:
            self.fd = create_inbox(self.size_bytes)
            self.close = finalize(self, os.close, self.fd)
            super().__init__(self.fd)
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise no_descriptor() from None
            why = {errno.EFBIG: FILE_LIMIT, errno.ENOMEM: ADDRESS_LIMIT}.get(error.errno or 0, error)
            raise NotEnoughMemory(f"no inbox of {self.size_bytes} bytes can be made: {why}") from error
        self._progress = progress
        self._places = np.zeros(ring_bytes // PAGE_BYTES + 1, np.uint16)
        """For each page how many places have bytes of it."""
        self._held: dict[ref[_Place], tuple[int, int]] = {}
        """The first page of each place, and the page after its last one."""
        self._over: deque[ref[_Place]] = deque()
        """A function in C appends them, which no signal handler cuts short."""
        self._waiting: deque[tuple[int, ref[_Place]]] = deque()
        """Places that are over, and up to which record the daemon has to be done with them."""

    def hold(self, granted: Granted) -> object | None:
        if granted.offset + granted.size_bytes > self.query_at:
            return None
        place = _Place()
        first, end = self.prepare(granted.offset, granted.size_bytes)
        self._held[ref(place, self._over.append)] = first, end
        self._places[first:end] += 1
        return place

    def tidy(self) -> None:
        with suppress(IndexError):
            while True:
                ended = self._over.popleft()
                # After the place was over: its record is written by then. A number from before may be settled already,
                # and the daemon would read pages that are gone.
                self._waiting.append((self._progress()[0], ended))
        settled = self._progress()[1]
        while self._waiting and self._waiting[0][0] <= settled:
            first, end = self._held.pop(self._waiting.popleft()[1])
            self._give_back(first, end)

    def _give_back(self, first: int, end: int) -> None:
        """Punches the pages out that no other place has bytes of."""
        self._places[first:end] -= 1
        free = first + np.flatnonzero(self._places[first:end] == 0)
        for run in np.split(free, np.flatnonzero(np.diff(free) > 1) + 1):
            if len(run):
                self._is_mapped[run[0] : run[-1] + 1] = bytes(len(run))
                punch(self.fd, int(run[0]) * PAGE_BYTES, len(run) * PAGE_BYTES)
