"""The daemon's side of writing, in this process: a real ring, index, lane and queue, with a stand-in for the store.

Owns: grants out of the allocator with slots in the index, records taken from the queue and published, refusals, the
bell in both directions. The store keeps whole grants in the order in which they were lent, and evicts the oldest ones.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from mmap import mmap
from threading import Condition, Thread
from typing import Any, Self

import numpy as np

from tensord.client.reading.view import View
from tensord.client.writing.arena import Arena
from tensord.client.writing.memory import RingMemory, WritableMemory
from tensord.client.writing.outcomes import Outcomes, Put
from tensord.client.writing.put import Writer
from tensord.client.writing.wire import Granted
from tensord.errors import DaemonUnavailable, LimitReached, ObjectTooLarge, StoreFull, TensordError
from tensord.shm.index.index import IndexReader
from tensord.shm.lanes.records import AWAKE, RECORD, SLEEPS, SUBMITTED_AT, WAITS_AT, Submissions
from tensord.shm.payloads.header import DEPTH_MAX
from tensord.shm.payloads.packing import pack
from tensord.shm.ring.layout import SPAN_HEADER_BYTES, SpanHeader, span_bytes

from .memory_bench import MemoryBench, memory_file

LANE = 3


@dataclass(eq=False)
class Lent:
    """One grant: where it is, where the next record may lie, and its entries' slots."""

    granted: Granted
    next: int
    entries: dict[bytes, int] = field(default_factory=dict)
    done: bool = False

    @property
    def end(self) -> int:
        return self.granted.offset + self.granted.size_bytes


class WritingBench:
    """A client that writes, and the daemon that it writes to. Use as a context manager.

    The daemon works when it is rung, in the thread that rings, or in a thread of its own (`serve`), and without `eager`
    only when `work` is called. It lends what is asked for, at most `lent_max_bytes` at once, and takes records, unless
    `lends` and `takes` are False. `refuses`: keys whose records are refused. `inbox_bytes`: the client has another uid,
    and writes into an inbox of this size.
    """

    def __init__(self, ring_bytes: int = 4 << 20, buckets: int = 1024, inbox_bytes: int = 0) -> None:
        self.bench = MemoryBench(ring_bytes, buckets)
        self.lent_max_bytes = ring_bytes
        self.refuses: dict[bytes, TensordError] = {}
        self.records: list[tuple[Any, ...]] = []
        self.asked: list[tuple[list[int], list[int]]] = []
        self.rung = 0
        self.lends = self.takes = self.eager = True
        self._bells = 0
        self._bell = Condition()
        self._work = Condition()
        self._ended = False
        self._thread: Thread | None = None
        self._asks: deque[tuple[int, Sequence[int], Sequence[int]]] = deque()
        self.lent: dict[int, Lent] = {}
        self._old: deque[Lent] = deque()
        self._returning: list[Lent] = []
        self._numbers = 0
        self._told = 0
        self.lane = self.bench.lane()
        self.words = self.lane.words
        self.settled = memoryview(bytearray(64)).cast("Q")
        self.refusals = memoryview(bytearray(64)).cast("Q")
        self.asleep = memoryview(bytearray(8)).cast("Q")
        self.asleep[0] = SLEEPS
        self._requests = 0
        self._reader = self.bench.readers[-1].submissions()
        self.view = View.open(self.bench.ring_fd, self.bench.index_fd, self.lane)
        self._inbox_fd = memory_file(inbox_bytes) if inbox_bytes else -1
        self.memory: WritableMemory
        if inbox_bytes:
            os.posix_fallocate(self._inbox_fd, 0, inbox_bytes)
            self.memory = WritableMemory(self._inbox_fd)
            self._places = MemoryBench(inbox_bytes)
        else:
            index = IndexReader(mmap(self.bench.index_fd, self.bench.geometry.index_bytes), self.bench.geometry)
            self.memory = RingMemory(self.bench.ring_fd, self.lane, index)
            self._places = self.bench
        self.writer = self.new_writer(share_bytes=ring_bytes // 4)

    def new_writer(self, share_bytes: int) -> Writer:
        submissions = Submissions(self.words, SUBMITTED_AT, self.lane.queue, self.settled, LANE, self.asleep)
        wire: Any = self
        outcomes = Outcomes(self.words, self.settled, self.refusals, LANE, wire)
        arena = Arena(self.memory, wire, share_bytes)
        return Writer(self.memory, arena, submissions, outcomes, wire)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self.writer.end(DaemonUnavailable("the test is over"))
        if self._inbox_fd >= 0:
            os.close(self._inbox_fd)
        # Views of grants that are lent are no entries.
        self.bench.__exit__(*(error or (None,)))

    def put(self, at: bytes, tree: Any, deadline: float, *, depth_max: int = DEPTH_MAX, **options: Any) -> Put:
        """As `Client.put`."""
        put = Put(at)
        self.writer.put(put, pack(tree, depth_max), deadline, **options)
        return put

    # ---- the wire

    @property
    def bells(self) -> int:
        return self._bells

    def next_request(self) -> int:
        self._requests += 1
        return self._requests

    def ask_for_grants(
        self,
        request: int,
        sizes: Sequence[int],
        returned: Sequence[int],
        timeout_s: float = 0.0,
        *,
        ahead: bool = False,
    ) -> bool:
        self.asked.append((list(sizes), list(returned)))
        self._asks.append((request, sizes, returned))
        self._woken()
        return True

    def ring_to_wait(self) -> None:
        if self.asleep[0]:
            self.ring_bell()

    def ring_bell(self) -> None:
        self.rung += 1
        self._woken()

    def wait_for_bell(self, seen: int, timeout_s: float) -> None:
        with self._bell:
            self._bell.wait_for(lambda: self._bells != seen, timeout_s)

    # ---- the daemon

    def serve(self) -> None:
        """From now on the daemon works in a thread of its own."""
        self._thread = Thread(target=self._serve, name="stand-in")
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        if self._thread is not None:
            with self._work:
                self._ended = True
                self._work.notify_all()
            self._thread.join()
            self._thread = None

    def lose(self) -> None:
        """Ends the connection."""
        self.writer.end(DaemonUnavailable("the connection was lost"))
        self._tell()

    def work(self) -> bool:
        """Carries out what was asked and what is in the queue. Whether there was anything."""
        worked = False
        while self._asks and self.lends:
            request, sizes, returned = self._asks.popleft()
            worked = True
            self._take_records()
            there = [self.lent[number] for number in returned if number in self.lent]
            self._returning += [lent for lent in there if lent not in self._returning]
            self._finish_returned()
            if sizes:
                self._lend(request, sizes)
                self._tell()
        worked |= self._take_records()
        self._finish_returned()
        waits = self.words[WAITS_AT]
        if waits and waits != self._told and self.settled[LANE] >= waits:
            self._told = waits
            self._tell()
        return worked

    @property
    def lent_bytes(self) -> int:
        return sum(each.end - each.next for each in self.lent.values())

    def _serve(self) -> None:
        while True:
            if self.work():
                continue
            # Asleep only from here on: what is written meanwhile is seen by the second look.
            self.asleep[0] = SLEEPS
            if self.work():
                self.asleep[0] = AWAKE
                continue
            with self._work:
                self._work.wait_for(lambda: self._ended or bool(self._asks) or self._has_records(), 10)
                if self._ended:
                    return
            self.asleep[0] = AWAKE

    def _has_records(self) -> bool:
        return self.takes and bool(
            self.words[SUBMITTED_AT] != self._reader.tail or self.words[WAITS_AT] not in (0, self._told)
        )

    def _woken(self) -> None:
        if self._thread is None:
            if self.eager:
                self.work()
        else:
            with self._work:
                self._work.notify_all()

    def _tell(self) -> None:
        with self._bell:
            self._bells += 1
            self._bell.notify_all()

    def _lend(self, request: int, sizes: Sequence[int]) -> None:
        grants: list[Granted] = []
        for size_bytes in sizes:
            if self.lent_bytes + size_bytes > self.lent_max_bytes:
                break
            offset = self._room(size_bytes)
            if offset is None:
                break
            self._numbers += 1
            granted = Granted(self._numbers, offset, size_bytes)
            if self._inbox_fd < 0:
                granted = self._in_ring(granted)
            self.lent[self._numbers] = Lent(granted, offset)
            grants.append(granted)
        kind = ObjectTooLarge if sizes[0] > self._places.holes.capacity_bytes else StoreFull
        error = None if grants else kind(f"no room for {sizes[0]} bytes")
        self.writer.arena.granted(request, grants, error)

    def _in_ring(self, granted: Granted) -> Granted:
        self.bench._spans += 1
        span = self.bench.superblock.epoch << 48 | self.bench._spans
        number, offset, size_bytes = granted[:3]
        slot = self.bench.slots.take(os.urandom(32), span, 1 << 48 | offset, size_bytes - SPAN_HEADER_BYTES)
        assert slot >= 0, "the test's index is full"
        return Granted(number, offset, size_bytes, span, slot, self.bench.index.read(slot).seq.to_bytes(8, "little"))

    def _room(self, size_bytes: int) -> int | None:
        while (offset := self._places.allocate(size_bytes)) is None:
            if not self._old:
                return None
            self._evict(self._old.popleft())
        return offset

    def _evict(self, lent: Lent) -> None:
        for slot in lent.entries.values():
            self.bench.slots.unpublish(slot)
        pinned = self.bench.pins()
        assert not pinned & {self.bench.index.read(slot).span_id for slot in lent.entries.values()}
        for slot in lent.entries.values():
            self.bench.slots.release(slot)
        self._places.free(lent.granted.offset)

    def _finish_returned(self) -> None:
        """Ends the returned grants, after all records that were written before."""
        if not self._returning or not self.takes:
            return
        while self._take_records():
            pass
        for lent in self._returning:
            if lent.granted.span_id:
                self.bench.slots.release(lent.granted.slot)
            del self.lent[lent.granted.number]
            if self._inbox_fd >= 0 or not lent.entries:
                self._places.free(lent.granted.offset)
            else:
                self._old.append(lent)
        self._returning.clear()

    def _take_records(self) -> bool:
        taken = self._reader.take() if self.takes else None
        if taken is None:
            return False
        for record in RECORD.iter_unpack(taken):
            self.records.append(record)
            error = self._commit(record)
            if error is not None:
                self.refusals[LANE] += 1
                self.writer.outcomes.refused(record[0], None if error is _EXISTED else error)
                self._tell()
        self.settled[LANE] = self._reader.tail
        return True

    def _commit(self, record: tuple[Any, ...]) -> TensordError | None:
        _, key, offset, payload_bytes, checksum, _, _, cost, _, number, tree_bytes, tokens, *_ = record
        lent, size_bytes = self.lent.get(number), span_bytes(payload_bytes)
        # Threads write their records in another order than that of their places.
        if lent is None or not lent.granted.offset <= offset <= offset + size_bytes <= lent.end:
            return LimitReached(f"{size_bytes} bytes at {offset} are not within grant {number}")
        lent.next += size_bytes
        if key in self.refuses:
            return self.refuses[key]
        if self.bench.find(key) is not None:
            return _EXISTED
        to = offset if self._inbox_fd < 0 else self.bench.allocate(size_bytes)
        if to is None:
            return StoreFull("the ring is full")
        self.bench._spans += 1
        span = self.bench.superblock.epoch << 48 | self.bench._spans
        slot = self.bench.slots.take(key, span, tree_bytes << 48 | to, payload_bytes)
        if slot < 0:
            return StoreFull("the index is full")
        start = to + SPAN_HEADER_BYTES
        if self._inbox_fd < 0:
            lent.entries[key] = slot
        else:
            place = self.bench.bytes[start : start + payload_bytes].data
            os.preadv(self._inbox_fd, [place], offset + SPAN_HEADER_BYTES)
        header = SpanHeader(key, span, payload_bytes, tree_bytes, checksum, tokens, cost, 0.0, 1000)
        self.bench.bytes[to:start] = np.frombuffer(header.pack(), np.uint8)
        self.bench.slots.publish(slot)
        return None


_EXISTED = TensordError("existed")
