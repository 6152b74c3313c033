"""An inbox: the client's staging memory, from which the daemon copies payloads into the ring.

Owns: which regions of the memfd are in use. Does not own: when an inbox is created or closed (inboxes.py).
Invariants: two regions never overlap. A region's bytes belong to one put. A region is free only when the daemon has
acknowledged it and no array over it lives, so that a late write to an array from `reserve` never reaches another key.
This process does not write the memfd of a retired inbox: its arrays stay valid, but writes to them go to private pages.
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
from ...shm.inbox import create_inbox
from ...shm.layout import aligned
from ...shm.segments import PREFAULT_PIECE_BYTES, prefault
from ...shm.unshared import Unshared
from .waiting import Condition

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
# How often a thread that waits for room checks for collected arrays. A finalizer cannot wake it, because that takes a
# lock.
_LOOK_EVERY_S: Final = 0.02
_log = logging.getLogger("tensord")


class _Watch(ref[Any]):
    """A weak reference that the interpreter appends to its inbox's `_ended` once the referent is collected.

    The callback is `deque.append` itself. So no Python code runs that a signal handler's exception could interrupt.
    """

    __slots__ = ("offset", "region")
    __hash__ = object.__hash__
    __eq__ = object.__eq__
    offset: int
    region: Region | None
    """The region that the referent held; None if the referent is the region at `offset` itself."""


class Region:
    """A range of the inbox. `memory` is uint8 of shape (size,) and writable."""

    __slots__ = ("__weakref__", "_end", "_holders", "inbox", "memory", "offset")

    def __init__(self, inbox: Inbox, offset: int, memory: Bytes) -> None:
        self.inbox = inbox
        self._holders = 1
        self.offset = offset
        self.memory: Bytes | None = memory
        self._end = inbox.watch(self, offset, None)

    def hand_out(self) -> Bytes:
        """Returns the memory for arrays that leave this library. The region stays in use until the last of them is
        collected.
        """
        memory = self.memory
        assert memory is not None
        self._holders += 1
        self.inbox.watch(memory, self.offset, self)
        self.memory = None
        return memory

    def let_go_with(self, holder: object) -> Callable[[], None]:
        """Releases one hold of the region when `holder` is collected. Returns a function that cancels this."""
        return partial(self.inbox.watches.discard, self.inbox.watch(holder, self.offset, self))

    def bytes(self, size_bytes: int) -> Bytes:
        """The first `size_bytes` as this process sees them, also after `hand_out`."""
        return self.inbox.bytes(self.offset, size_bytes)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps the region in use while the block writes it, even if the daemon acknowledges it before the end."""
        self.inbox.hold(self)
        try:
            yield
        finally:
            self.inbox.let_go(self)

    def abandon_from_finalizer(self) -> None:
        """`release` without a lock. It takes effect at the inbox's next operation."""
        self.inbox.collected.append(self)

    def release(self) -> None:
        """Releases one hold: the daemon, or the owner, needs these bytes no more."""
        self.inbox.let_go(self)


class Inbox:
    """A sealed memfd of `size_bytes`; `number` identifies it among its client's inboxes. Thread-safe.

    `retired`: no region is taken from it and no put begins in it any more. `announced_on`: the connection on which the
    daemon knows it. `refusal`: the error with which the daemon refused it. `broken`: the accounts of regions are not
    used any more, because a signal handler's exception may have left them half changed.
    """

    def __init__(self, size_bytes: int, number: int = 0) -> None:
        self.size_bytes = aligned(size_bytes)
        self.number = number
        self.retired = False
        self.broken = False
        self.prefaulted = False
        self.announced_on: object | None = None
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
        """Faults all pages in. A page fault during a put would cost 5 to 30 µs. For a background thread."""
        address = self._mapped.address
        for start in range(0, self.size_bytes, PREFAULT_PIECE_BYTES):
            if self.retired:
                # The mapping is private now: prefaulting would copy every page.
                return
            prefault(address + start, min(PREFAULT_PIECE_BYTES, self.size_bytes - start), write=True)

    def take(self, size_bytes: int, deadline: float, hope: Callable[[], bool] = lambda: True) -> Region | None:
        """Returns a region of `size_bytes`. Waits for room until `deadline` (monotonic seconds), while `hope()` is
        true.

        None if no room came free, the inbox is too small, or it is retired.
        """
        wanted = aligned(max(1, size_bytes))
        if wanted > self.size_bytes:
            return None
        with self._changed:
            try:
                while not self.retired:
                    self._sweep()
                    offset = self._regions.allocate(wanted)
                    if offset is not None:
                        # Bound to a name before the lock is released, so that an exception in between is caught below.
                        region = Region(self, offset, self.bytes(offset, size_bytes))
                        return region  # noqa: RET504
                    remaining = deadline - time.monotonic()
                    if remaining <= 0 or not hope():
                        return None
                    self._changed.wait(min(remaining, _LOOK_EVERY_S))
            except BaseException:
                # Before another thread gets the lock.
                self.broken = self.retired = True
                raise
        return None

    def bytes(self, offset: int, size_bytes: int) -> Bytes:
        """The bytes at `offset`, as uint8 of shape (size_bytes,)."""
        # Made over the mapping, not over another array: numpy collapses nested views, so views of this array would keep
        # only that other array alive.
        return np.ndarray((size_bytes,), np.uint8, self._mapped.memory, offset)

    def retire(self) -> None:
        """Gives no more regions. Further writes to its arrays stay in this process."""
        with self._changed:
            self.retired = True
            self._make_private()
            self._changed.notify_all()

    def _make_private(self) -> None:
        try:
            self._mapped.make_private()
        except OSError as error:
            _log.error(
                "an inbox of %d bytes cannot be mapped privately (%s): the daemon may still read it; do not write to "
                "arrays of committed reservations, and delete them",
                self.size_bytes,
                error,
            )

    def retire_if_unused(self) -> bool:
        """Retires the inbox if no region is in use. Returns whether none is."""
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
        """Adds a holder to a region that is in use."""
        with self._changed:
            assert region._holders
            region._holders += 1

    def let_go(self, region: Region) -> None:
        """Removes a holder of a region. The last one frees it."""
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
        """Closes the descriptor. The mapping lives as long as arrays over it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def watch(self, referent: object, offset: int, region: Region | None) -> _Watch:
        """Releases the region when `referent` is collected. The inbox keeps the watch, because a weak reference that is
        collected together with its referent calls no callback.
        """
        watch = _Watch(referent, self._ended.append)
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
                # A signal handler's exception ended the call that held the region.
                self._regions.free(watch.offset)

    def _drop(self, region: Region) -> None:
        region._holders -= 1
        assert region._holders >= 0 or self.broken, f"the region at {region.offset} was let go once too often"
        if not region._holders:
            region.memory = None
            self.watches.discard(region._end)
            if not self.broken:
                self._regions.free(region.offset)
