"""Opens or creates the lock, the ring and the index of an instance when a daemon starts.

Owns: the order in which they are opened and created, the checks of existing memory, and its size. Does not own its
contents, nor the lanes (`segments`). Everything here happens under the instance's lock.

Invariants: the number of entries never exceeds the capacity of the existing index. The superblock is written last, so a
ring and an index with a superblock are complete. Files of another user are neither opened nor removed. Memory of
another layout version is removed, with its entries; mappings that clients have of it stay valid. The daemon's epoch is
above the epochs of all confirmed slots, even if the superblock is damaged, so that no id of a span is used twice.
"""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import ExitStack
from dataclasses import dataclass, field
from mmap import PROT_READ, mmap

from msgspec.structs import replace

from ...errors import Corrupt, LayoutMismatch, NotEnoughMemory, SegmentError
from ...shm.index.index import IndexReader
from ...shm.lanes import fence
from ...shm.ring import segments
from ...shm.ring.layout import (
    ALIGN_BYTES,
    EPOCH_MAX,
    LAYOUT_VERSION,
    PAGE_BYTES,
    RING_BYTES_MAX,
    SPAN_COUNTER_BITS,
    SPAN_HEADER_BYTES,
    IndexGeometry,
    SpanHeader,
    Superblock,
    aligned,
    span_bytes,
)


@dataclass(frozen=True, slots=True)
class Opened:
    """The memory of an instance, without its lanes. The receiver owns the descriptors. `superblock`: the new one, not
    yet written. `recovered`: there was one of a former daemon. `ready_bytes`: the first bytes of the ring, which the
    former daemon had allocated. `missing`: ranges of these, (offset, bytes) of whole pages, that are not in memory.
    `notices`: for an operator. `shortage`: why the ring could not be enlarged to the configured size."""

    superblock: Superblock
    lock_fd: int
    ring_fd: int
    index_fd: int
    recovered: bool
    ready_bytes: int = 0
    missing: tuple[tuple[int, int], ...] = ()
    notices: list[str] = field(default_factory=list)
    shortage: str = ""


@dataclass(frozen=True, slots=True)
class ConfiguredSizes:
    """The sizes in the configuration. `derived`: those of "ring_bytes" and "max_entries" that are not configured."""

    ring_bytes: int
    max_entries: int
    namespaces_max: int = 1024
    derived: frozenset[str] = frozenset()

    def configured(self, name: str) -> int | None:
        """A configured size; None if it is derived."""
        return None if name in self.derived else int(getattr(self, name))


def resolved_sizes(former: Superblock, asked: ConfiguredSizes) -> tuple[Superblock, list[str]]:
    """The superblock with the sizes from now on, and notices for the operator. A derived size was computed from the
    free memory when the ring was created, and is kept: otherwise a restart alone could evict entries. A configured size
    is applied as far as possible: a ring grows in place; it shrinks by returning pages, while its segment keeps its
    length; an index cannot grow."""
    limit_bytes = aligned(asked.configured("ring_bytes") or min(former.limit_bytes, former.ring_bytes))
    wanted = asked.configured("max_entries")
    if wanted is None:
        grows = limit_bytes > former.limit_bytes
        wanted = max(former.max_entries, asked.max_entries) if grows else former.max_entries
    room = former.geometry.entries_max
    notices = []
    if wanted > room:
        notices.append(
            f"max_entries is {wanted}, but the existing index has room for {room}: {room} is used. To get a larger "
            "index, stop the daemon, drop all entries with `tensorctl purge`, and start it again"
        )
    ring_bytes = max(former.ring_bytes, limit_bytes)
    return replace(former, ring_bytes=ring_bytes, limit_bytes=limit_bytes, max_entries=min(wanted, room)), notices


def opened(instance: str, asked: ConfiguredSizes) -> Opened:
    """The instance's ring and index as a former daemon left them. Without them, new ones with nothing allocated yet.
    Raises InstanceBusy if another daemon serves the instance; LayoutMismatch if the existing memory is damaged;
    NotEnoughMemory; NoFence if the kernel has no membarrier fence, without which no memory can be reused; SegmentError
    if a file of the same name belongs to another user, or the epochs are used up."""
    if not fence.is_quick():
        fence.check()
    lock_fd = segments.claim_instance(instance)
    try:
        notices: list[str] = []
        return _existing(instance, lock_fd, asked, notices) or _created(instance, lock_fd, asked, notices)
    except BaseException:
        lock = segments.segment_name(instance, "lock")
        if segments.existing(instance) == [lock]:
            segments.remove(lock)
        os.close(lock_fd)
        raise


def _existing(instance: str, lock_fd: int, asked: ConfiguredSizes, notices: list[str]) -> Opened | None:
    """The memory of a former daemon; None if it is not complete, or has another layout version. Adds to `notices`."""
    ring_name, index_name = (segments.segment_name(instance, part) for part in ("ring", "index"))
    there = segments.existing(instance)
    # Both are opened before either is checked: opening refuses files of other users, which must not be removed later.
    with ExitStack() as closing:
        fds = []
        for name in (ring_name, index_name):
            if name in there:
                fds.append(segments.attach(name))
                closing.callback(os.close, fds[-1])
        if len(fds) < 2:
            return None
        ring_fd, index_fd = fds
        page = os.pread(index_fd, PAGE_BYTES, 0)
        if not any(page):
            # A daemon was killed while it created its memory. No client can have attached to that.
            return None
        if (version := Superblock.other_version(page)) is not None:
            notices.append(
                f"the ring of the daemon before had layout version {version}, this release reads {LAYOUT_VERSION}: it "
                "was freed with its entries, and the new ring is empty. Clients of the other release cannot use the "
                "new ring and compute for themselves: install this release for them as well"
            )
            return None
        former = _former_superblock(Superblock.unpack(page), ring_fd, index_fd)
        missing = _unused(segments.missing(ring_fd), former, ring_fd, index_fd)
        for start, size_bytes in missing:
            # Pages that were allocated and never written look like missing pages. Punching makes them missing.
            segments.punch(ring_fd, start, size_bytes)
        superblock, told = resolved_sizes(former, asked)
        notices += told
        shortage = ""
        if superblock.ring_bytes > former.ring_bytes:
            try:
                segments.check_memory(
                    superblock.ring_bytes - former.ring_bytes,
                    f"enlarging the ring from {former.ring_bytes} to {superblock.ring_bytes} bytes",
                )
                # Before the superblock is written: clients map as many bytes as the superblock says.
                os.ftruncate(ring_fd, superblock.ring_bytes)
            except (NotEnoughMemory, OSError) as error:
                shortage = segments.FILE_LIMIT if getattr(error, "errno", None) == errno.EFBIG else str(error)
                superblock = replace(superblock, ring_bytes=former.ring_bytes, limit_bytes=former.ring_bytes)
        closing.pop_all()
    return Opened(
        superblock,
        lock_fd,
        ring_fd,
        index_fd,
        recovered=True,
        ready_bytes=former.ring_bytes,
        missing=tuple(missing),
        notices=notices,
        shortage=shortage,
    )


def _unused(missing: list[tuple[int, int]], former: Superblock, ring_fd: int, index_fd: int) -> list[tuple[int, int]]:
    """The ranges without the pages of spans that were never published. These look missing because nothing was written
    to them yet, and a client of the former daemon may still write there: it was told of the span, and pins it."""
    if not missing:
        return missing
    index = IndexReader(mmap(index_fd, former.geometry.index_bytes, prot=PROT_READ), former.geometry)
    for slot in index.unpublished():
        low = slot.offset // PAGE_BYTES * PAGE_BYTES
        # A grant has no tree, and its length is that of all its bytes.
        size_bytes = span_bytes(slot.payload_bytes) if slot.tree_bytes else slot.payload_bytes
        high = -(-(slot.offset + size_bytes) // PAGE_BYTES) * PAGE_BYTES
        if not any(low < start + size_bytes and start < high for start, size_bytes in missing):
            continue
        try:
            # Changes nothing, unless the slot is damaged and names pages that are missing.
            segments.allocate(ring_fd, low, min(high, former.ring_bytes) - low)
        except (NotEnoughMemory, OSError):
            continue
        missing = [
            (start, stop - start)
            for first, size_bytes in missing
            for start, stop in ((first, min(first + size_bytes, low)), (max(first, high), first + size_bytes))
            if start < stop
        ]
    return missing


def _former_superblock(former: Superblock, ring_fd: int, index_fd: int) -> Superblock:
    """The superblock of a former daemon, with this daemon's epoch."""
    ring_bytes, index_bytes = os.fstat(ring_fd).st_size, os.fstat(index_fd).st_size
    if ring_bytes < former.ring_bytes or index_bytes != former.geometry.index_bytes:
        raise LayoutMismatch(
            f"the superblock says {former.ring_bytes} bytes of ring and {former.geometry.index_bytes} of index, but "
            f"the files have {ring_bytes} and {index_bytes}; remove them with `tensorctl purge --instance NAME`"
        )
    sizes = former.limit_bytes, former.ring_bytes
    if not 0 < former.limit_bytes <= former.ring_bytes <= RING_BYTES_MAX or any(size % ALIGN_BYTES for size in sizes):
        raise LayoutMismatch(
            f"the superblock says {former.limit_bytes} usable bytes in a ring of {former.ring_bytes}, which is "
            "impossible; remove ring and index with `tensorctl purge --instance NAME`"
        )
    last = _last_epoch(former, ring_fd, index_fd)
    if last >= EPOCH_MAX:
        raise SegmentError(
            f"epoch {last} is the last possible one; remove the memory with `tensorctl purge --instance NAME`"
        )
    # A daemon may have been killed while it enlarged the ring. No client has mapped more than the superblock says.
    os.ftruncate(ring_fd, former.ring_bytes)
    return replace(former, epoch=last + 1)


def _last_epoch(former: Superblock, ring_fd: int, index_fd: int) -> int:
    """The highest epoch of the superblock, and of confirmed slots: if the superblock is undamaged, its own. A slot that
    no header confirms is damaged, and could say EPOCH_MAX."""
    last = former.epoch
    index = IndexReader(mmap(index_fd, former.geometry.index_bytes, prot=PROT_READ), former.geometry)
    for slot in index.later_than(last):
        header = header_at(ring_fd, slot.offset)
        if header is not None and (header.key, header.span_id) == (slot.key, slot.span_id):
            return slot.span_id >> SPAN_COUNTER_BITS
    return last


def header_at(ring_fd: int, offset: int) -> SpanHeader | None:
    """The header of the span at ring offset `offset`; None if there is no valid header, or its page is missing."""
    span = os.pread(ring_fd, SPAN_HEADER_BYTES, offset)
    if len(span) < SPAN_HEADER_BYTES:
        return None
    try:
        return SpanHeader.unpack(span)
    except Corrupt:
        return None


def _created(instance: str, lock_fd: int, asked: ConfiguredSizes, notices: list[str]) -> Opened:
    ring_name, index_name, lock_name = (segments.segment_name(instance, part) for part in ("ring", "index", "lock"))
    # Lanes too: their pins belong to a ring that no longer exists, and a new lane may need the name of an old one.
    for name in segments.own(instance):
        if name != lock_name:
            segments.remove(name)
    geometry = IndexGeometry.for_entries(asked.max_entries, asked.namespaces_max)
    size_bytes = aligned(asked.ring_bytes)
    segments.check_memory(size_bytes + geometry.index_bytes, f"a ring of {asked.ring_bytes} bytes with its index")
    with ExitStack() as undoing:
        ring_fd = _created_segment(undoing, ring_name, size_bytes)
        index_fd = _created_segment(undoing, index_name, geometry.index_bytes)
        segments.allocate(index_fd, 0, geometry.index_bytes)
        undoing.pop_all()
    instance_id = secrets.randbits(63) | 1
    superblock = Superblock(instance_id, 1, size_bytes, geometry, size_bytes, asked.max_entries)
    return Opened(superblock, lock_fd, ring_fd, index_fd, recovered=False, notices=notices)


def _created_segment(undoing: ExitStack, name: str, size_bytes: int) -> int:
    fd = segments.create(name, size_bytes)
    undoing.callback(os.close, fd)
    undoing.callback(segments.remove, name)
    return fd
