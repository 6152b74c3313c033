"""An inbox: memory of this client that the daemon reads. For clients that may not write into the ring, and for queries.

    ┌─ as large as the ring: places that the daemon lends, each at its offset in the ring ─┬─ one prefix query ─┐

Owns: the memory file, and giving back pages of places that are over. Does not own: which places were lent.

Invariants: nobody can resize the file. A page is given back only after the daemon has carried out all records of the
places that it has bytes of, and while no other place has bytes of it.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final
from weakref import finalize, ref

import numpy as np

from ...errors import NotEnoughMemory
from ...ipc.messages.schema import PREFIX_BYTES_MAX
from ...ipc.wire.descriptors import no_descriptor
from ...shm.ring.layout import PAGE_BYTES
from ...shm.ring.segments import ADDRESS_LIMIT, FILE_LIMIT, create_inbox, punch
from .memory import WritableMemory
from .wire import Granted

QUERY_BYTES: Final = PREFIX_BYTES_MAX


class _Place:
    """A place that is the client's while this object lives."""

    __slots__ = ("__weakref__",)


class _PlaceEnded(ref[_Place]):
    """Calls back with the end of a place. The callback is a function in C, which no signal handler cuts short."""

    __slots__ = ("end", "start")
    start: int
    end: int


class Inbox(WritableMemory):
    """One inbox. `query_at`: where a query lies, of up to QUERY_BYTES.

    Args:
        ring_bytes: the size of the ring; 0 for an inbox of queries alone.
        progress: returns the numbers of the last record that was written, and of the last that was carried out.

    Raises:
        NotEnoughMemory, ProcessLimit: it cannot be made; the message says why.
    """

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
        self._held: set[_PlaceEnded] = set()
        self._over: deque[_PlaceEnded] = deque()
        self._waiting: deque[tuple[int, _PlaceEnded]] = deque()
        """Places that are over, and up to which record the daemon has to be done with them."""

    def hold(self, granted: Granted) -> object | None:
        start, end = granted.offset, granted.offset + granted.size_bytes
        if end > self.query_at:
            return None
        place = _Place()
        ended = _PlaceEnded(place, self._over.append)
        ended.start, ended.end = start, end
        self._held.add(ended)
        self._places[start // PAGE_BYTES : -(-end // PAGE_BYTES)] += 1
        self.prepare(start, granted.size_bytes)
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
            ended = self._waiting.popleft()[1]
            self._held.discard(ended)
            self._give_back(ended.start // PAGE_BYTES, -(-ended.end // PAGE_BYTES))

    def _give_back(self, first: int, end: int) -> None:
        """Punches the pages out that no other place has bytes of."""
        self._places[first:end] -= 1
        free = first + np.flatnonzero(self._places[first:end] == 0)
        for run in np.split(free, np.flatnonzero(np.diff(free) > 1) + 1):
            if len(run):
                self._is_mapped[run[0] : run[-1] + 1] = bytes(len(run))
                punch(self.fd, int(run[0]) * PAGE_BYTES, len(run) * PAGE_BYTES)
