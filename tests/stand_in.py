"""A stand-in for the daemon, in threads of this process: real sockets, ring, index, lanes and queues; a simple store.

Owns: attachments, grants, records, refusals, claims, and the answers to a few requests. It evicts nothing: a full ring
refuses. A test says what it lends, takes, answers and refuses.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from mmap import MAP_SHARED, PROT_READ, mmap
from pathlib import Path
from typing import Any, Self

import numpy as np

import tensord
from tensord.errors import DaemonUnavailable, LimitReached, ObjectTooLarge, StoreFull, TensordError, TimedOut
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.schema import PROTOCOL_VERSION, ClientLimits, ErrorBody
from tensord.ipc.wire.blocking import BlockingChannel
from tensord.ipc.wire.connection import Connection
from tensord.shm.lanes.reader import LaneReader
from tensord.shm.lanes.records import RECORD, SLEEPS, SubmissionReader
from tensord.shm.payloads.copy import checksum_of
from tensord.shm.payloads.prefix import PrefixRecord
from tensord.shm.ring.layout import ASLEEP_AT, LANE_PLACES, SPAN_HEADER_BYTES, SpanHeader, span_bytes

from .memory_bench import MemoryBench, lane_file, lent, opened_anew


@dataclass(eq=False)
class Attachment:
    """One connection."""

    channel: BlockingChannel
    place: int = -1
    lane_fd: int = -1
    reader: LaneReader | None = None
    queue: SubmissionReader | None = None
    in_place: bool = False
    inbox: mmap | None = None
    grants: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """By number: offset, bytes, slot (-1: none)."""
    used: set[int] = field(default_factory=set)
    """Grants with records in them."""
    returning: list[int] = field(default_factory=list)
    waiting: list[messages.AskForGrants] = field(default_factory=list)
    rung: int = 0


class StandIn:
    """Use in a `with`. `uses_ring`: whether clients may write into the ring."""

    def __init__(self, ring_bytes: int = 64 << 20, *, uses_ring: bool = True, **limits: Any) -> None:
        self.bench = MemoryBench(ring_bytes, 1024)
        self.limits = ClientLimits(**limits)
        self.uses_ring = uses_ring
        self.takes = self.lends = self.answers = True
        self.refuses: dict[bytes, TensordError] = {}
        self.records: list[tuple[Any, ...]] = []
        self.agents: list[str] = []
        self.queries: list[PrefixRecord] = []
        self.attachments: list[Attachment] = []
        self.claims: dict[bytes, int] = {}
        self.claimed: dict[bytes, list[tuple[Attachment, int]]] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="tensord-"))
        self.socket = self.folder / "control.sock"
        self._lock = threading.RLock()
        self._numbers = 0
        self._lanes: dict[int, int] = {}
        memory, geometry = memoryview(self.bench._index_map), self.bench.geometry
        self.settled = memory[geometry.settled_at : geometry.settled_at + 8 * LANE_PLACES].cast("Q")
        self.refusals = memory[geometry.refusals_at : geometry.refusals_at + 8 * LANE_PLACES].cast("Q")
        memory[ASLEEP_AT : ASLEEP_AT + 8].cast("Q")[0] = SLEEPS
        self._listener: socket.socket | None = None
        self.listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.deaf()
        self.hang_up()
        shutil.rmtree(self.folder)

    def client(self, **options: Any) -> tensord.Client:
        client = tensord.Client(self.socket, timeout_s=options.pop("timeout_s", 30.0), **options)
        assert client.wait_connected(30)
        return client

    # ---- what happens to a daemon

    def listen(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.socket))
        self._listener.listen()
        threading.Thread(target=self._accept, args=(self._listener,), name="stand-in", daemon=True).start()

    def deaf(self) -> None:
        """Takes no new connections until `listen`."""
        assert self._listener is not None
        # A close alone does not wake the thread that accepts.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.socket.unlink()

    def hang_up(self) -> None:
        """Ends all connections, as at its end."""
        with self._lock:
            for each in self.attachments[:]:
                each.channel.close()
            self.attachments.clear()

    def work(self) -> None:
        """Does what it has left lying, after `takes` or `lends` were set again."""
        with self._lock:
            for each in self.attachments:
                self._take(each)
                self._return(each, [])
                waiting, each.waiting = each.waiting, []
                for request in waiting:
                    self._lend(each, request)

    # ---- its threads

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connected, _ = listener.accept()
                channel = BlockingChannel(connected, Connection.control_server(self.limits), "a client")
                each = Attachment(channel)
                with self._lock:
                    self.attachments.append(each)
                threading.Thread(target=self._serve, args=(each,), name="stand-in", daemon=True).start()

    def _serve(self, each: Attachment) -> None:
        with suppress(TensordError, OSError):
            while True:
                try:
                    message, fds = each.channel.receive(0.5)
                except TimedOut:
                    continue
                while not self.answers:
                    time.sleep(0.002)
                with self._lock:
                    try:
                        self._handle(each, message, fds)
                    finally:
                        for fd in fds:
                            os.close(fd)
        with self._lock:
            if each in self.attachments:
                self._take(each)
                self.attachments.remove(each)
        each.channel.close()

    def _say(self, each: Attachment, message: messages.Message, fds: tuple[int, ...] = ()) -> None:
        each.channel.send(message, fds=fds, timeout_s=5.0)

    def _handle(self, each: Attachment, message: Any, fds: tuple[int, ...]) -> None:
        self._take(each)
        match message:
            case messages.Hello():
                limits = self.limits
                self._say(each, messages.Welcome(message.id, PROTOCOL_VERSION, "0", "stand-in", 1, limits))
            case messages.Attach():
                self._attach(each, message, fds)
            case messages.OpenRing():
                if self.uses_ring:
                    each.in_place = True
                    self._say(each, messages.WritableRing(message.id), (self.bench.ring_fd,))
                else:
                    self._say(each, messages.Error.of(LimitReached("write_in_place is off"), message.id))
            case messages.OpenInbox():
                each.inbox = mmap(fds[0], message.inbox_bytes, MAP_SHARED, PROT_READ)
                self._say(each, messages.Done(message.id))
            case messages.AskForGrants():
                self._return(each, message.returned)
                if self.lends:
                    self._lend(each, message)
                else:
                    each.waiting.append(message)
            case messages.ReturnGrants():
                self._return(each, message.grants)
            case messages.NameAgent():
                self.agents.append(message.agent)
            case messages.RequestClaim():
                self._claim(each, message)
            case messages.Abandon():
                for key in [key for key, token in self.claims.items() if token == message.token]:
                    del self.claims[key]
            case messages.Evict():
                there = [key for key in message.keys if self.bench.find(key) is not None]
                for key in there:
                    self.bench.evict(key)
                self._say(each, messages.Counted(message.id, len(there)))
            case messages.MatchPrefix():
                assert each.inbox is not None
                packed = each.inbox[message.inbox_offset : message.inbox_offset + message.query_bytes]
                self.queries.append(PrefixRecord.unpack(memoryview(packed)))
                self._say(each, messages.Matched(message.id, 0, []))
            case messages.Touch():
                self._say(each, messages.Counted(message.id, 0))
            case messages.Renew() | messages.Doorbell():
                pass
            case _:
                number = getattr(message, "id", None)
                self._say(each, messages.Error.of(LimitReached("a stand-in"), number))

    def _attach(self, each: Attachment, request: messages.Attach, fds: tuple[int, ...]) -> None:
        back = os.fstat(fds[0]).st_ino if fds else 0
        place = self._lanes.get(back, -1)
        if place >= 0 and all(other.place != place for other in self.attachments):
            each.place = place
            each.lane_fd = opened_anew(fds[0])
        else:
            each.place = len(self._lanes) + 1
            each.lane_fd = lane_file(each.place)
            self._lanes[os.fstat(each.lane_fd).st_ino] = each.place
        each.reader = LaneReader(each.lane_fd, each.place)
        self.bench.readers.append(each.reader)
        each.queue = each.reader.submissions()
        self.settled[each.place], self.refusals[each.place] = each.queue.tail, 0
        fd = lent(each.lane_fd)
        sizes = self.bench.superblock.ring_bytes, self.bench.geometry.index_bytes
        self._say(
            each,
            messages.Attached(request.id, each.place, each.place, *sizes),
            (self.bench.ring_fd, self.bench.index_fd, fd),
        )
        os.close(fd)

    def _lend(self, each: Attachment, request: messages.AskForGrants) -> None:
        grants: list[Any] = []
        for size_bytes in request.sizes:
            offset = self.bench.allocate(size_bytes)
            if offset is None:
                break
            self._numbers += 1
            slot, span, seq = -1, 0, bytes(8)
            if each.in_place:
                self.bench._spans += 1
                span = 1 << 48 | self.bench._spans
                while slot < 0:
                    slot = self.bench.slots.take(os.urandom(32), span, 1 << 48 | offset, size_bytes - SPAN_HEADER_BYTES)
                seq = self.bench.index.read(slot).seq.to_bytes(8, "little")
            each.grants[self._numbers] = offset, size_bytes, slot
            grants.append((self._numbers, offset, size_bytes, span.to_bytes(8, "little"), max(slot, 0), seq))
        error = None
        if not grants:
            larger = request.sizes[0] > self.bench.superblock.ring_bytes
            error = ErrorBody.of((ObjectTooLarge if larger else StoreFull)(f"no room for {request.sizes[0]} bytes"))
        self._say(each, messages.GrantsLent(request.id, grants, error))

    def _return(self, each: Attachment, numbers: list[int]) -> None:
        """Takes grants back, after the records of what was written there."""
        each.returning += numbers
        while each.returning and self.takes:
            number = each.returning.pop()
            offset, size_bytes, slot = each.grants.pop(number, (0, 0, -1))
            if slot >= 0:
                self.bench.slots.release(slot)
            if size_bytes and number not in each.used:
                self.bench.free(offset)

    def _take(self, each: Attachment) -> None:
        if each.queue is None or not self.takes:
            return
        while (taken := each.queue.take()) is not None:
            for record in RECORD.iter_unpack(taken):
                error = self._commit(each, record)
                if error is not None:
                    self.refusals[each.place] += 1
                    body = None if error is _EXISTED else ErrorBody.of(error)
                    with suppress(DaemonUnavailable):
                        self._say(each, messages.PutRefused(record[0], body))
            self.settled[each.place] = each.queue.tail
        waits = each.queue.waits_for()
        if each.rung < waits <= self.settled[each.place]:
            each.rung = waits
            with suppress(DaemonUnavailable):
                self._say(each, messages.Settled())

    def _commit(self, each: Attachment, record: tuple[Any, ...]) -> TensordError | None:
        self.records.append(record)
        each.used.add(record[9])
        _, key, offset, payload_bytes, checksum, _, _, cost, _, number, tree_bytes, tokens, prefix, *_ = record
        low, size_bytes, _ = each.grants.get(number, (0, 0, -1))
        if not low <= offset <= offset + span_bytes(payload_bytes) <= low + size_bytes:
            return LimitReached(f"the bytes at {offset} are not within grant {number}")
        if key in self.refuses:
            return self.refuses[key]
        if self.bench.find(key) is not None:
            return _EXISTED
        self.bench._spans += 1
        span, start = 1 << 48 | self.bench._spans, offset + SPAN_HEADER_BYTES
        slot = self.bench.slots.take(key, span, tree_bytes << 48 | offset, payload_bytes)
        if slot < 0:
            return StoreFull("the index is full")
        there = self.bench.bytes[start : start + payload_bytes]
        if not each.in_place:
            assert each.inbox is not None
            there[:] = np.frombuffer(each.inbox, np.uint8, payload_bytes, start)
        if not checksum:
            checksum = checksum_of(there)
        header = SpanHeader(
            key, span, payload_bytes, tree_bytes, checksum, tokens, 100.0, 0.0, 1000, prefix_bytes=prefix, cost_ms=cost
        )
        self.bench.bytes[offset:start] = np.frombuffer(header.pack(), np.uint8)
        self.bench.slots.publish(slot)
        self.claims.pop(key, None)
        for waiting, request in self.claimed.pop(key, []):
            self._say(waiting, messages.Claimed(request, "hit"))
        return None

    def _claim(self, each: Attachment, request: messages.RequestClaim) -> None:
        if self.bench.find(request.key) is not None:
            self._say(each, messages.Claimed(request.id, "hit"))
        elif request.key in self.claims:
            self.claimed.setdefault(request.key, []).append((each, request.id))
            self._say(each, messages.Claimed(request.id, "wait"))
        else:
            self._numbers += 1
            self.claims[request.key] = self._numbers
            self._say(each, messages.Claimed(request.id, "compute", self._numbers, 10.0))


_EXISTED = TensordError("existed")
