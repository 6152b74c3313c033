"""Finding or making an instance's lock, ring and index when a daemon starts.

Owns: the order in which they are opened and made, and what is refused. Does not own what stands in them, nor the lanes
(memory.py).

Invariants: everything here happens under the instance's lock. A superblock is written last, so that a ring and an index
with one are whole. Nothing of another user's is opened or removed.
"""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from ..errors import LayoutMismatch, SegmentError
from ..shm import fence, segments
from ..shm.layout import PAGE_BYTES, IndexGeometry, Superblock, aligned

EPOCH_MAX: Final = (1 << 16) - 1


@dataclass(frozen=True, slots=True)
class Opened:
    """The descriptors are the receiver's. `superblock` is what holds from now on; `recovered`: a former daemon left it.
    """

    superblock: Superblock
    lock_fd: int
    ring_fd: int
    index_fd: int
    recovered: bool


def opened(instance: str, ring_bytes: int, max_entries: int, namespaces_max: int = 1024) -> Opened:
    """The instance's ring and index as a former daemon left them, else new ones of which nothing is allocated yet.

    Memory that is found keeps its sizes, whatever is asked for now.

    Raises:
        InstanceBusy: another daemon serves the instance.
        LayoutMismatch: what is there was written by another layout version.
        NotEnoughMemory: the machine cannot hold the ring.
        NoFence: no memory could ever be reused here.
        SegmentError: a file that is not this user's stands in the way.
    """
    if not fence.works(expedited=True):
        fence.check(expedited=False)
    lock_fd = segments.claim_instance(instance)
    try:
        found = _found(instance, lock_fd)
        return found or _made(instance, lock_fd, ring_bytes, IndexGeometry.for_entries(max_entries, namespaces_max))
    except BaseException:
        lock = segments.segment_name(instance, "lock")
        if segments.existing(instance) == [lock]:
            segments.remove(lock)
        os.close(lock_fd)
        raise


def _found(instance: str, lock_fd: int) -> Opened | None:
    """What a former daemon left; None if that is not whole."""
    ring_name, index_name = (segments.segment_name(instance, part) for part in ("ring", "index"))
    there = segments.existing(instance)
    # Both, before either is judged: what is not ours must not be removed either.
    with ExitStack() as closing:
        ring_fd, index_fd = (_closed_by(closing, name) if name in there else None for name in (ring_name, index_name))
        if ring_fd is None or index_fd is None:
            return None
        former = _former(ring_fd, index_fd)
        if former is None:
            # A daemon that was killed while it made its memory: nobody can have attached.
            return None
        closing.pop_all()
        return Opened(former, lock_fd, ring_fd, index_fd, recovered=True)


def _closed_by(closing: ExitStack, name: str) -> int:
    fd = segments.attach(name)
    closing.callback(os.close, fd)
    return fd


def _former(ring_fd: int, index_fd: int) -> Superblock | None:
    """What the index says of a former daemon's memory, with the epoch that is ours now; None if it was never whole."""
    page = os.pread(index_fd, PAGE_BYTES, 0)
    if not any(page):
        return None
    former = Superblock.unpack(page)
    ring_bytes, index_bytes = os.fstat(ring_fd).st_size, os.fstat(index_fd).st_size
    if ring_bytes != former.ring_bytes or index_bytes != former.geometry.index_bytes:
        raise LayoutMismatch(
            f"the superblock says {former.ring_bytes} bytes of ring and {former.geometry.index_bytes} of index, and "
            f"{ring_bytes} and {index_bytes} are there; free them with `tensorctl purge --instance NAME`"
        )
    if former.epoch >= EPOCH_MAX:
        raise SegmentError(
            f"epoch {former.epoch} is the last one; free the memory with `tensorctl purge --instance NAME`"
        )
    return Superblock(former.instance_id, former.epoch + 1, former.ring_bytes, former.geometry)


def _made(instance: str, lock_fd: int, ring_bytes: int, geometry: IndexGeometry) -> Opened:
    """A new ring and a new index."""
    ring_name, index_name, lock_name = (segments.segment_name(instance, part) for part in ("ring", "index", "lock"))
    # Lanes too: their pins are of a ring that is gone, and a new lane could not have a stale one's name.
    for name in segments.own(instance):
        if name != lock_name:
            segments.remove(name)
    size_bytes = aligned(ring_bytes)
    segments.check_memory(size_bytes + geometry.index_bytes, f"a ring of {ring_bytes} bytes with its index")
    with ExitStack() as undoing:
        ring_fd = _undone_by(undoing, ring_name, size_bytes)
        index_fd = _undone_by(undoing, index_name, geometry.index_bytes)
        segments.allocate(index_fd, 0, geometry.index_bytes)
        undoing.pop_all()
    superblock = Superblock(secrets.randbits(63) | 1, 1, size_bytes, geometry)
    return Opened(superblock, lock_fd, ring_fd, index_fd, recovered=False)


def _undone_by(undoing: ExitStack, name: str, size_bytes: int) -> int:
    fd = segments.create(name, size_bytes)
    undoing.callback(os.close, fd)
    undoing.callback(segments.remove, name)
    return fd
