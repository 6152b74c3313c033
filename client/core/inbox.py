"""The client's staging memory, from which the daemon copies into the ring.

Owns: which regions of the memfd are taken. A region is free again when the daemon has acknowledged it AND no array of
it lives, so that an array from `reserve` that is written to after its commit never reaches another key.

Invariants: two regions never overlap; a region's bytes belong to one put; nobody in this process writes the memfd of a
retired inbox: its arrays live, and what is written to them stays here.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final
from weakref import ref

import numpy as np

from ...errors import TensordError
from ...shm.allocator import SpanAllocator
from ...shm.layout import aligned
from ...shm.segments import PREFAULT_PIECE_BYTES, create_inbox, prefault
from ...shm.unshared import Unshared
from .waiting import Condition

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
# How often a waiter for room looks for collected arrays: a finalizer may not wake it, since that takes a lock.
_LOOK_EVERY_S: Final = 0.02
_log = logging.getLogger("tensord")


class _Watch(ref[Any]):
    """Stands among its inbox's `ended` once the object is collected that it looks at.

    The interpreter appends it there itself: no code of ours runs, which a signal handler's exception could cut short.
    """

    __slots__ = ("offset", "region")
    __hash__ = object.__hash__
    __eq__ = object.__eq__
    offset: int
    region: Region | None
    """Which one the object held; None if it was the region at `offset` itself."""


class Region:
    """A stretch of the inbox: `memory` is (size,) uint8 and writable."""

    __slots__ = ("__weakref__", "_end", "_holders", "inbox", "memory", "offset")

    def __init__(self, inbox: Inbox, offset: int, memory: Bytes) -> None:
        self.inbox = inbox
        self._holders = 1
        self.offset = offset
        self.memory: Bytes | None = memory
        self._end = inbox.watch(self, offset, None)

    def hand_out(self) -> Bytes:
        """The memory, for arrays that leave this library: the region now waits for the last of them, too."""
        memory = self.memory
        assert memory is not None
        self._holders += 1
        self.inbox.watch(memory, self.offset, self)
        self.memory = None
        return memory

    def let_go_with(self, holder: object) -> Callable[[], None]:
        """Has the region let go when `holder` is collected, and gives what calls that off."""
        return partial(self.inbox.watches.discard, self.inbox.watch(holder, self.offset, self))

    def bytes(self, size_bytes: int) -> Bytes:
        """Its first `size_bytes` as this process sees them, also after they were handed out."""
        return self.inbox.bytes(self.offset, size_bytes)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps the region for whoever writes it, though the daemon may need it no more before they have finished."""
        self.inbox.hold(self)
        try:
            yield
        finally:
            self.inbox.let_go(self)

    def abandon_from_finalizer(self) -> None:
        """`release` without a lock: it takes effect when the inbox is next looked at."""
        self.inbox.collected.append(self)

    def release(self) -> None:
        """The daemon needs these bytes no more."""
        self.inbox.let_go(self)


class Inbox:
    """A sealed memfd of `size_bytes`, by its `number` among its client's. Safe to use from several threads.

    `retired`: no region is taken from it any more, nor a put begun. `told`: the connection on which the daemon knows of
    it. `refusal`: why the daemon did not take it. `broken`: nobody looks any more at which regions are taken, since a
    signal handler's exception may have left that half changed.
    """

    def __init__(self, size_bytes: int, number: int = 0) -> None:
        self.size_bytes = aligned(size_bytes)
        self.number = number
        self.retired = False
        self.broken = False
        self.prefaulted = False
        self.told: object | None = None
        self.refusal: TensordError | None = None
        self.fd = create_inbox(self.size_bytes)
        self.collected: deque[Region] = deque()
        self.watches: set[_Watch] = set()
        self._ended: deque[_Watch] = deque()
        try:
            self._mapped = Unshared(self.fd, self.size_bytes)
        except OSError:
            self.close()
            raise
        self._regions = SpanAllocator(self.size_bytes)
        self._changed = Condition()
        self._streams = 0

    def prefault(self) -> None:
        """Maps all pages in; the first touch of each would cost a put 5 to 30 µs. For a background thread."""
        address = self._mapped.address
        for start in range(0, self.size_bytes, PREFAULT_PIECE_BYTES):
            if self.retired:
                # Pages of its own are made for what is written there, and no others.
                return
            prefault(address + start, min(PREFAULT_PIECE_BYTES, self.size_bytes - start), write=True)

    def take(self, size_bytes: int, deadline: float, hope: Callable[[], bool] = lambda: True) -> Region | None:
        """A region of `size_bytes`, waiting for room until `deadline` (monotonic seconds), and as long as there is
        `hope`; None if none came free, or the inbox is retired."""
        wanted = aligned(max(1, size_bytes))
        if wanted > self.size_bytes:
            return None
        with self._changed:
            try:
                while not self.retired:
                    self._sweep()
                    offset = self._regions.allocate(wanted)
                    if offset is not None:
                        # Noted before the lock is given back, so that an exception in between is caught below.
                        region = Region(self, offset, self.bytes(offset, size_bytes))
                        return region  # noqa: RET504
                    remaining = deadline - time.monotonic()
                    if remaining <= 0 or not hope():
                        return None
                    self._changed.wait(min(remaining, _LOOK_EVERY_S))
            except BaseException:
                # Before anybody else has the lock.
                self.broken = self.retired = True
                raise
        return None

    def bytes(self, offset: int, size_bytes: int) -> Bytes:
        """(size_bytes,) uint8 at `offset`."""
        # Over the mapping and not over another array: views of views keep only their last array alive.
        return np.ndarray((size_bytes,), np.uint8, self._mapped.memory, offset)

    def retire(self) -> None:
        """Gives no more regions, and keeps what is written to those it gave in this process."""
        with self._changed:
            self.retired = True
            self._make_private()
            self._changed.notify_all()

    def _make_private(self) -> None:
        try:
            self._mapped.make_private()
        except OSError as error:
            _log.error(
                "an inbox of %d bytes cannot be mapped privately (%s): the daemon may still read it, so do not write "
                "to arrays of committed reservations; let go of them",
                self.size_bytes,
                error,
            )

    def retire_if_unused(self) -> bool:
        """Retires it if it has no region; whether it has none."""
        with self._changed:
            if self.broken:
                return False
            self._sweep()
            unused = not self._streams and not self._regions.used_bytes
            self.retired |= unused
            return unused

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Keeps the inbox from being retired as unused between two regions of one put."""
        with self._changed:
            self._streams += 1
        try:
            yield
        finally:
            with self._changed:
                self._streams -= 1

    def hold(self, region: Region) -> None:
        """Somebody else needs a region that is held already."""
        with self._changed:
            assert region._holders
            region._holders += 1

    def let_go(self, region: Region) -> None:
        """One of a region's holders needs it no more."""
        with self._changed:
            try:
                self._drop(region)
            except BaseException:
                self.broken = self.retired = True
                raise
            self._changed.notify_all()

    @property
    def used_bytes(self) -> int:
        with self._changed:
            self._sweep()
            return self._regions.used_bytes

    def close(self) -> None:
        """Closes the descriptor. The mapping lives as long as arrays of it do."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def watch(self, of: object, offset: int, region: Region | None) -> _Watch:
        """Has the region let go when `of` is collected. The inbox keeps the watch: one that the cycle collector takes
        together with what it looks at says nothing."""
        watch = _Watch(of, self._ended.append)
        watch.offset, watch.region = offset, region
        self.watches.add(watch)
        return watch

    def _sweep(self) -> None:
        while self.collected:
            self._drop(self.collected.popleft())
        while self._ended:
            watch = self._ended.popleft()
            if watch not in self.watches:
                continue
            self.watches.discard(watch)
            if watch.region is not None:
                self._drop(watch.region)
            elif not self.broken:
                # Whoever had the region was ended by a signal handler's exception.
                self._regions.free(watch.offset)

    def _drop(self, region: Region) -> None:
        region._holders -= 1
        assert region._holders >= 0 or self.broken, f"the region at {region.offset} was let go once too often"
        if not region._holders:
            region.memory = None
            self.watches.discard(region._end)
            if not self.broken:
                self._regions.free(region.offset)
