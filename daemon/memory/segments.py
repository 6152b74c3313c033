"""The daemon's access to the shared memory of its instance: the ring, the index and all lanes.

Owns: creating, finding and removing the segments; the allocation of the ring's pages; the descriptors given to clients;
the fence before the lanes are read. Does not own what they pin (`actors.lanes`), nor the entries (the core).

Invariants: bytes whose pages may be punched out are read through the descriptor, since a read through the mapping would
allocate the page again. A lane is scanned until no process holds it, and then removed. The id of a lane, and the fence
that reaches its process, come from the lane's name alone: its client may write anything into its memory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from dataclasses import dataclass
from mmap import mmap
from typing import Any, Final

import numpy as np

from ...errors import NameTaken, NotEnoughMemory, SegmentError
from ...shm.index.index import IndexWriter, Slot
from ...shm.lanes.fence import check, fence, is_quick
from ...shm.lanes.reader import LaneReader, lane_name, read_lane_name
from ...shm.lanes.records import SubmissionReader
from ...shm.payloads.copy import PIECE_BYTES, checksum_of_pieces
from ...shm.ring import segments
from ...shm.ring.layout import (
    ASLEEP_AT,
    LANE_BYTES,
    LANE_COUNTER_BITS,
    LANE_PLACES,
    PAGE_BYTES,
    SPAN_CHECKSUM_AT,
    SPAN_HEADER_BYTES,
    count_punch,
    pack_lane_header,
)
from ..process.logs import logger
from .opening import ConfiguredSizes, header_at, opened

Array = np.ndarray[Any, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_LANE_NAMES_TRIED: Final = 64
_FOREIGN_NAMED: Final = 16
_NO_LANE_REMEDY: Final = (
    ": new clients are refused; remount /dev/shm with a larger size=, remove unused files from it, or let the daemon "
    "return memory with `tensorctl limit SIZE`"
)
_log = logger("store")


@dataclass(slots=True)
class HeldLane:
    """A lane and its holder. `client`: None once the client's connection has ended. `fenced`: the client's process
    registered for the expedited fence. `uid`: that of the client that last got the lane; None for a lane of a former
    daemon whose name has no uid."""

    reader: LaneReader
    name: str
    file: os.stat_result
    fenced: bool
    client: int | None
    place: int
    queue: SubmissionReader
    uid: int | None = None


class Segments:
    """The ring, the index and the lanes of one instance, as a former daemon left them; without them, new ones with
    nothing allocated yet."""

    def __init__(self, instance: str, asked: ConfiguredSizes) -> None:
        """Raises the errors of `opened`."""
        found = opened(instance, asked)
        self.instance = instance
        self.superblock = superblock = found.superblock
        self.recovered = found.recovered
        self.missing = found.missing
        self.ready_bytes = found.ready_bytes
        self.shortage = found.shortage
        self.notices = found.notices
        self._lock_fd = found.lock_fd
        self._ring_fd = found.ring_fd
        try:
            self._ring_map = mmap(found.ring_fd, superblock.ring_bytes)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise segments.ring_not_mapped(superblock.ring_bytes) from None
            raise
        self._index_map = mmap(found.index_fd, superblock.geometry.index_bytes)
        os.close(found.index_fd)
        ring_name, index_name = (segments.segment_name(instance, part) for part in ("ring", "index"))
        self._shared_ring_fd = segments.attach(ring_name, read_only=True)
        self._shared_index_fd = segments.attach(index_name, read_only=True)
        self.writable_ring_fd = segments.attach(ring_name)
        """The ring for clients that write in place: a file description of its own."""
        self.index_memory = words = memoryview(self._index_map)
        geometry = superblock.geometry
        self.settled = words[geometry.settled_at : geometry.settled_at + 8 * LANE_PLACES].cast("Q")
        """By the lane's place: the number of the last record that was carried out."""
        self.refusals = words[geometry.refusals_at : geometry.refusals_at + 8 * LANE_PLACES].cast("Q")
        """By the lane's place: how many refusals were sent since it was attached."""
        self.asleep = words[ASLEEP_AT : ASLEEP_AT + 8].cast("Q")
        self._places = list(range(LANE_PLACES - 1, -1, -1))
        self._lanes: dict[str, HeldLane] = {}
        self._lanes_made, self._lacks_lanes = 0, False
        self._has_quick_fence, self._has_slow_fence = is_quick(), False
        self.ring: Bytes = np.frombuffer(self._ring_map, np.uint8)
        self.ring_memory = memoryview(self._ring_map)
        new = not found.recovered
        self.index = IndexWriter.create(geometry, self._index_map) if new else IndexWriter(self._index_map, geometry)
        # After the index: one with a superblock is complete.
        packed = superblock.pack()
        self._index_map[: len(packed)] = packed
        if not new:
            self._find_lanes()
        # The daemon before may have been killed between a punch and its count, and `opened` may have punched.
        count_punch(self._index_map)

    def grow(self, start: int, *, prefault: bool, huge_pages: bool = False) -> int:
        """Allocates the piece of the ring that begins at `start`, and returns its end: the ring may be used up to
        there. Slow: call it in a thread. Raises NotEnoughMemory if /dev/shm has no room for it."""
        size_bytes = min(segments.PREFAULT_PIECE_BYTES, self.superblock.ring_bytes - start)
        self.allocate(start, size_bytes, prefault=prefault, huge_pages=huge_pages)
        return start + size_bytes

    def allocate(self, start: int, size_bytes: int, *, prefault: bool, huge_pages: bool = False) -> None:
        """Allocates pages of the ring, so that they may be written. Slow: call it in a thread. Raises NotEnoughMemory
        if /dev/shm has no room for them."""
        segments.allocate(self._ring_fd, start, size_bytes)
        # madvise(2) takes whole pages, and the ring may have ended within a page.
        within = start % PAGE_BYTES
        address = segments.address_of(self._ring_map) + start - within
        if huge_pages:
            segments.advise_huge(address, size_bytes + within)
        if prefault:
            segments.prefault(address, size_bytes + within, write=True)

    def punch(self, start: int, size_bytes: int) -> None:
        """Returns pages of the ring to the kernel. Slow: call it in a thread. None may be read until `allocate`."""
        segments.punch(self._ring_fd, start, size_bytes)
        # SYNC POINT: after the pages are gone, and before the core may place a span in new ones. A client that
        # registered the former pages with a GPU's driver then finds another count when it reads the span.
        count_punch(self._index_map)

    def write_checksum(self, offset: int, checksum: int) -> None:
        """Writes the checksum of a payload into the header of its span, at `offset`: one word, so that a
        reader sees 0 or the checksum."""
        self.ring[offset + SPAN_CHECKSUM_AT :][:8].view(np.uint64)[0] = checksum

    def summed(self, slot: Slot) -> tuple[bool, int]:
        """Whether a span's payload matches its checksum, which it does if nobody has taken one; and its checksum.
        Meaningless if the span was reused meanwhile. Slow: call it in a thread."""
        start, fd = slot.offset + SPAN_HEADER_BYTES, self._ring_fd
        end = start + slot.payload_bytes
        header = header_at(fd, slot.offset)
        pieces = (os.pread(fd, min(PIECE_BYTES, end - at), at) for at in range(start, end, PIECE_BYTES))
        checksum = checksum_of_pieces(pieces)
        return header is not None and header.checksum in (0, checksum), checksum

    def lend_lane(
        self, client: int, *, fenced: bool, former: HeldLane | None, uid: int | None = None
    ) -> tuple[HeldLane, list[int]]:
        """A lane for `client`: its former lane, from `lane_brought`, or a new one; and the descriptors (ring, index,
        lane) to send. The caller closes the last one, which has the lock that shows that the client lives. Raises
        NotEnoughMemory, which is logged once, until there is memory again."""
        try:
            lane = former or self._new_lane(uid, fenced=fenced)
        except NotEnoughMemory as error:
            self._lanes_fit(error)
            raise
        if former is None:
            self._lanes_fit(None)
        fd = self._locked(lane)
        lane.client, lane.uid = client, uid
        lane.queue = lane.reader.submissions()
        self.settled[lane.place], self.refusals[lane.place] = lane.queue.tail, 0
        return lane, [self._shared_ring_fd, self._shared_index_fd, fd]

    def lane_brought(self, fd: int) -> HeldLane | None:
        """The lane behind a descriptor from a client, if it is one of ours, has no client, and can be locked. The
        caller still owns `fd`."""
        status = os.fstat(fd)
        for lane in self._lanes.values():
            if os.path.samestat(lane.file, status) and lane.client is None:
                try:
                    os.close(self._locked(lane))
                except BlockingIOError:
                    return None
                return lane
        return None

    def lane_problem(self) -> str | None:
        """Why there is no memory for the next client's lane; None if there is. Reads files of /proc and /sys."""
        try:
            segments.check_memory(LANE_BYTES, "the lane of the next client", _NO_LANE_REMEDY)
        except NotEnoughMemory as error:
            return str(error)
        self._lanes_fit(None)
        return None

    def orphan(self, client: int) -> None:
        """Notes that the client's connection has ended. Its lane is scanned until no process holds it."""
        for lane in self._lanes.values():
            if lane.client == client:
                lane.client = None

    def forget_abandoned(self) -> None:
        gone = [name for name, lane in self._lanes.items() if lane.client is None and lane.reader.abandoned()]
        for name in gone:
            lane = self._lanes.pop(name)
            self._places.append(lane.place)
            segments.remove(lane.name)
            lane.reader.close()

    @property
    def fence_is_quick(self) -> bool:
        """True if every lane's process registered for the expedited fence. Otherwise `fence` takes 8 to 16 ms."""
        return all(lane.fenced for lane in self._lanes.values())

    def fence(self) -> None:
        """A memory fence in all client processes, to be made after unpublishing and before reading the lanes. After it,
        a scan of the lanes sees every pin that was stored before it; a reader that stores its pin later finds the
        slot's seq changed, and does not use the entry. Raises OSError if the kernel refuses it."""
        if self._lanes:
            fence(expedited=self.fence_is_quick)

    def fence_quickly(self) -> None:
        """A memory fence in all client processes that registered for the quick one."""
        if self._lanes and self._has_quick_fence:
            fence(expedited=True)

    @property
    def readers(self) -> list[LaneReader]:
        """The readers of all lanes. `forget_abandoned` closes some of them."""
        return [lane.reader for lane in self._lanes.values()]

    @property
    def lanes(self) -> list[HeldLane]:
        return list(self._lanes.values())

    def close(self, *, drop: bool) -> None:
        """Releases the memory. `drop` removes the segments; otherwise the next daemon finds everything as it is."""
        if drop:
            lock = segments.segment_name(self.instance, "lock")
            # The lock last: until then no other daemon can create segments of this instance.
            for name in sorted(segments.own(self.instance), key=lambda name: name == lock):
                segments.remove(name)
        for lane in self._lanes.values():
            lane.reader.close()
        shared = (self._shared_ring_fd, self._shared_index_fd, self.writable_ring_fd)
        for fd in (self._ring_fd, *shared, self._lock_fd):
            os.close(fd)

    def _lanes_fit(self, error: NotEnoughMemory | None) -> None:
        """Logs the start and the end of a lack of memory for lanes, once each."""
        if error is not None and not self._lacks_lanes:
            _log.error("new clients are refused: no memory for a lane", why=str(error))
        elif error is None and self._lacks_lanes:
            _log.info("new clients are accepted again: there is memory for a lane")
        self._lacks_lanes = error is not None

    def _new_lane(self, uid: int | None, *, fenced: bool) -> HeldLane:
        self._check_fence(fenced=fenced)
        lane_id, name, fd = self._lane_file(uid, fenced=fenced)
        try:
            segments.allocate(fd, 0, LANE_BYTES)
            os.pwrite(fd, pack_lane_header(lane_id), 0)
            return self._hold(name, segments.attach(name, read_only=True), lane_id, uid, fenced=fenced)
        except BaseException:
            segments.remove(name)
            raise
        finally:
            os.close(fd)

    def _lane_file(self, uid: int | None, *, fenced: bool) -> tuple[int, str, int]:
        """(id, name, descriptor) of a new segment for a lane, under an unused name."""
        for _ in range(_LANE_NAMES_TRIED):
            self._lanes_made += 1
            lane_id = self.superblock.epoch << LANE_COUNTER_BITS | self._lanes_made
            name = lane_name(self.instance, lane_id, uid=uid, fenced=fenced)
            try:
                return lane_id, name, segments.create(name, LANE_BYTES)
            except NameTaken as error:
                # Another user's file has this name, and may have the next names too. Continue at a random number.
                self._lanes_made = secrets.randbits(LANE_COUNTER_BITS - 1)
                taken = error
        raise taken

    def _hold(self, name: str, fd: int, lane_id: int, uid: int | None, *, fenced: bool) -> HeldLane:
        reader, place = LaneReader(fd, lane_id), self._places.pop()
        fenced = fenced and self._has_quick_fence
        lane = HeldLane(reader, name, os.fstat(fd), fenced, None, place, reader.submissions(), uid)
        self._lanes[name] = lane
        return lane

    def _check_fence(self, *, fenced: bool) -> None:
        """Raises NoFence if the process of a lane did not register for the expedited fence, and the slow one does not
        work here."""
        if not (fenced and self._has_quick_fence) and not self._has_slow_fence:
            check()
            self._has_slow_fence = True

    def _locked(self, lane: HeldLane) -> int:
        """A descriptor of the lane with a shared lock, which the process that gets it holds. Raises BlockingIOError if
        a client has an exclusive lock on the lane."""
        fd = segments.attach(lane.name)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _find_lanes(self) -> None:
        foreign: list[str] = []
        for name in segments.existing(self.instance):
            if not name.startswith(segments.segment_name(self.instance, "lane.")):
                continue
            said = read_lane_name(self.instance, name)
            try:
                if said is None:
                    raise SegmentError(f"{name} in {segments.SHM_FOLDER} is not the name of a lane: remove the file")
                lane_id, uid, fenced = said
                fd = segments.attach(name, read_only=True)
            except SegmentError as error:
                foreign.append(str(error))
                continue
            self._check_fence(fenced=fenced)
            self._hold(name, fd, lane_id, uid, fenced=fenced)
        self.notices += foreign[:_FOREIGN_NAMED]
        if len(foreign) > _FOREIGN_NAMED:
            self.notices.append(f"and {len(foreign) - _FOREIGN_NAMED} more files like these")
