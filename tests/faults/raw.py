"""A client that says exactly what it is told to say, message by message: no thread, no retry, no library behind it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from mmap import MAP_SHARED, PROT_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple, Self

from tensord.errors import DaemonUnavailable
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.schema import PROTOCOL_VERSION
from tensord.ipc.wire.blocking import BlockingChannel
from tensord.shm.lanes import fence
from tensord.shm.lanes.lane import Lane
from tensord.shm.lanes.records import NO_KEY, SUBMITTED_AT, Submissions
from tensord.shm.payloads.packing import pack
from tensord.shm.ring.layout import ASLEEP_AT, LANE_PLACES, PAGE_BYTES, SPAN_HEADER_BYTES, Superblock, span_bytes
from tensord.shm.ring.segments import create_inbox

from ..daemon_process import MIB, PATIENCE_S, until


class Place(NamedTuple):
    """A place that the daemon has lent."""

    number: int
    offset: int
    size_bytes: int
    span_id: int
    slot: int
    seq: int


class RawClient:
    """Has said Hello and Attach when it is there; holds its lane, and an inbox if `inbox_bytes` are given.

    `fenced`: what it says of its registration for the fence; what is true, unless given. `writes`: it can put, in the
    ring ("in place"), or in an inbox as large as the ring ("inbox").
    """

    def __init__(
        self, socket: Path, *, inbox_bytes: int = 0, attach: bool = True, fenced: bool | None = None, writes: str = ""
    ) -> None:
        self._ids = count(1)
        self.channel = BlockingChannel.connect(socket, PATIENCE_S)
        self.fds: tuple[int, ...] = ()
        self.inbox: mmap | None = None
        self.memory: mmap | None = None
        """Where it writes payloads, at their offsets in the ring."""
        self.pins: list[object] = []
        self.refused: dict[int, messages.PutRefused] = {}
        """What the daemon has said, by record."""
        try:
            if fenced is None:
                fenced = fence.register()
            self.ask(lambda n: messages.Hello(n, PROTOCOL_VERSION, "raw", os.getpid(), fenced))
            if attach or writes:
                self.attached: messages.Attached = self.ask(lambda n: messages.Attach(n))
            if inbox_bytes:
                self.open_inbox(inbox_bytes)
            if writes:
                self._open_for_writing(writes)
        except BaseException:
            self.close()
            raise

    def ask(self, make: Any, fds: tuple[int, ...] = ()) -> Any:
        """Sends a request, and gives its answer, or raises it if it is an error."""
        # A daemon that hung up has said why before.
        with suppress(DaemonUnavailable):
            self.channel.send(make(next(self._ids)), fds=fds, timeout_s=PATIENCE_S)
        while isinstance(message := self.hear(), messages.PutRefused):
            pass
        return message

    def hear(self) -> Any:
        """The next message; descriptors that come along are kept open until `close`."""
        message, fds = self.channel.receive(PATIENCE_S)
        self.fds += fds
        if isinstance(message, messages.Error):
            raise message.to_error()
        if isinstance(message, messages.PutRefused):
            self.refused[message.number] = message
        return message

    def open_inbox(self, inbox_bytes: int = MIB) -> None:
        """Makes an inbox and tells the daemon."""
        fd = create_inbox(inbox_bytes)
        try:
            self.inbox = mmap(fd, inbox_bytes)
            self.ask(lambda n: messages.OpenInbox(n, inbox_bytes), (fd,))
        finally:
            os.close(fd)

    # ---- puts, step by step

    def _open_for_writing(self, writes: str) -> None:
        ring_fd, index_fd, lane_fd = self.fds[:3]
        index = mmap(index_fd, os.fstat(index_fd).st_size, MAP_SHARED, PROT_READ)
        geometry, words = Superblock.unpack(index[:PAGE_BYTES]).geometry, memoryview(index).cast("Q")
        settled, self._refusals = (words[at >> 3 :][:LANE_PLACES] for at in (geometry.settled_at, geometry.refusals_at))
        self.lane = Lane(lane_fd)
        self.submissions = Submissions(
            self.lane.words, SUBMITTED_AT, self.lane.queue, settled, self.attached.place, words[ASLEEP_AT >> 3 :][:1]
        )
        if writes == "in place":
            self.ask(lambda n: messages.OpenRing(n))
            self.memory = mmap(self.fds[-1], os.fstat(ring_fd).st_size)
        else:
            self.open_inbox(os.fstat(ring_fd).st_size)
            self.memory = self.inbox

    def borrow(self, *sizes: int, returned: Iterable[int] = ()) -> list[Place]:
        """Asks for places of payloads of these sizes, and pins what is lent, or raises why nothing is."""
        wanted = [span_bytes(size) for size in sizes]
        return self.lent(self.ask(lambda n: messages.AskForGrants(n, wanted, list(returned))))

    def lent(self, answer: Any) -> list[Place]:
        """The places of an answer, pinned. Raises why nothing is lent."""
        assert isinstance(answer, messages.GrantsLent)
        if answer.error is not None:
            raise answer.error.to_error()
        places = [Place(*each) for each in answer.places()]
        self.pins += [self.lane.lend(each.span_id) for each in places if each.span_id]
        return places

    def write(self, place: Place, tree: Any, share: float = 1.0) -> tuple[int, int]:
        """Writes the first `share` of a payload into a place. Returns the sizes of payload and tree header."""
        packed = pack(tree)
        whole = memoryview(bytearray(packed.payload_bytes))
        packed.write(whole, 0)
        start, size = place.offset + SPAN_HEADER_BYTES, int(share * packed.payload_bytes)
        assert self.memory is not None
        self.memory[start : start + size] = whole[:size].tobytes()
        return packed.payload_bytes, len(packed.header)

    def submit(self, key: bytes, place: Place, sizes: tuple[int, int], *, rings: bool = True) -> int:
        """Adds a record of a payload in a place, and rings if the daemon sleeps. Returns the record's number."""
        payload_bytes, tree_bytes = sizes
        fields = (key, place.offset, payload_bytes, 0, 0, NO_KEY, 0.0, 0.0, place.number, tree_bytes)
        number = self.submissions.add(*fields, 0, 0, 0, 0)
        assert number, "the queue is full"
        if rings and self.submissions.rings:
            self.channel.send(messages.Doorbell(), timeout_s=PATIENCE_S)
        return number

    def put(self, key: bytes, tree: Any) -> int:
        """Borrows a place, writes the payload and its record. Returns the record's number."""
        (place,) = self.borrow(pack(tree).payload_bytes)
        return self.submit(key, place, self.write(place, tree))

    def until_settled(self, number: int) -> messages.PutRefused | None:
        """Waits until the daemon has carried a record out. Returns its refusal; None if it was stored."""
        until(lambda: self.submissions.settled >= number, f"record {number} to be carried out")
        while len(self.refused) < self._refusals[self.attached.place]:
            self.hear()
        return self.refused.get(number)

    def close(self) -> None:
        self.channel.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
