"""A simulated process with a real client: puts, inbox, view, lane and leases over a simulated connection.

This module stands in for client/core/link.py. It attaches, receives, and handles forks and the end of a connection.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from mmap import MAP_SHARED, PROT_READ
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from tensord.client.core import puts
from tensord.client.core.lease import Lease
from tensord.client.core.put_options import PutOptions
from tensord.client.core.puts import Put, PutSender
from tensord.client.core.ring_mapping import Handle, RingMapping, mapping_under
from tensord.client.core.ring_reader import RingReader
from tensord.client.core.view import View
from tensord.errors import DaemonUnavailable, TensordError, TimedOut
from tensord.ipc import messages
from tensord.shm.lanes import Lane
from tensord.shm.layout import LANE_WORDS
from tensord.shm.tree import encode

from .payloads import ALL, TAGS, array_of, at, before, block_of, is_block, payload, version_of
from .wire import Wire

if TYPE_CHECKING:
    from .world import World

HELD_MAX: Final = 5


@dataclass(eq=False)
class Held:
    """A held payload and the position of its bytes. `span_id` and `handle` are None for a copy."""

    number: int
    version: int
    tree: Any
    span_id: int | None
    handle: bytes | None

    @property
    def mapping(self) -> RingMapping | None:
        """The mapping of the ring that holds the payload; None for a copy."""
        return mapping_under(array_of(self.number, self.tree))

    def inherited(self) -> Held:
        """The same payload as a child of the process holds it."""
        mapping, handle = self.mapping, self.handle
        assert mapping is not None and handle is not None
        ring = RingMapping(mapping.fd, len(mapping), MAP_SHARED, PROT_READ)
        ring.begin(mapping.lane, mapping.fd, 0, mapping.index)
        ring.identity = mapping.identity
        lease = RingReader(ring, {}).borrow(handle)
        assert lease is not None, f"key {self.number}: a pinned span cannot be borrowed"
        return Held(self.number, self.version, lease.tree, self.span_id, handle)

    def check(self, world: World) -> None:
        """Asserts that the payload is unchanged and that its span still belongs to its key."""
        if self.span_id is not None and world.daemon is not None:
            assert world.daemon.holds(self.span_id, at(self.number)), f"key {self.number}: span reused under a reader"
        assert version_of(self.number, self.tree) == self.version, f"key {self.number}: a leased payload has changed"


class Process:
    """Process `number`. `wire` is its connection while the connection is usable, else None."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.view: View | None = None
        self.lane_fd = -1
        self.wire: Wire | None = None
        self.closed = False
        self._ids = count(number * 1_000_000 + 1)
        self.puts = PutSender(
            self.send, self.next_id, lambda: self.wire, self.refusal, ask=self.open_ring, view=lambda: self.view
        )
        self.eras = dict.fromkeys(TAGS, 0)
        self.held: list[Held] = []
        self.claims: dict[int, int] = {}
        self.asked: dict[int, int] = {}
        self.outcomes: list[tuple[Put, int, int]] = []
        self.reserved: list[Any] = []
        self.device: set[int] = set()
        self.orders: list[messages.Order] = []

    def refusal(self, key: bytes) -> TensordError | None:
        """Stands in for Link.refusal."""
        return None if self.view is None else self.view.refusal(key)

    def learn(self) -> None:
        """Reads the current generations."""
        if self.view is not None:
            for tag in self.eras:
                self.eras[tag] = max(self.eras[tag], self.view.current(tag))

    def next_id(self) -> int:
        return next(self._ids)

    def open_ring(self, make: Any, timeout_s: float, connected: Any) -> Future[Any]:
        """Stands in for Link.ask. Puts make no other request through it."""
        answer: Future[Any] = Future()
        daemon = self.world.daemon
        if daemon is None or self.wire is None or connected is not self.wire or not self.wire.daemon_open:
            answer.set_exception(DaemonUnavailable("the connection broke"))
        else:
            answer.set_result([os.dup(daemon.memory.writable_ring_fd)])
        return answer

    # ---- the link

    def send(
        self, *sent: messages.Message, fds: Sequence[int] = (), timeout_s: float = 0.0, connected: Any = None
    ) -> None:
        """Stands in for Link.send. Other actions may happen during the call, also to this process."""
        wire = self.wire
        if wire is None or wire is not (connected or wire) or not wire.client_open or not wire.daemon_open:
            raise DaemonUnavailable("there is no daemon")
        fate = self.world.chance.random()
        if fate < 0.005:
            raise TimedOut("the daemon does not read")
        if fate < 0.015:
            wire.close_client()
            raise DaemonUnavailable("the connection broke")
        wire.say(sent, fds)
        if not isinstance(sent[0], messages.OpenInbox | messages.CloseInbox):
            # The client opens and closes an inbox under the lock of its inbox table.
            self.world.meanwhile()

    def attach(self) -> None:
        """Connects if there is a daemon, with the existing lane of this process or with a new one."""
        daemon = self.world.daemon
        if daemon is None or self.wire is not None or self.closed:
            return
        wire = Wire(self.world.next_client())
        *shared, lane_fd = daemon.join(wire, self.lane_fd if self.lane_fd >= 0 and self.view is not None else None)
        self._take_memory(shared, lane_fd)
        self.puts.inboxes.limits = daemon.settings.client_limits(daemon.ring_bytes)
        try:
            self.puts.in_flight.send_again(lambda *sent, fds=(), connected=None: self._say_first(wire, sent, fds), wire)
        except TensordError:
            wire.close_client()
            self.puts.disconnected()
        else:
            self.wire = wire

    def _say_first(self, wire: Wire, sent: Sequence[Any], fds: Sequence[int]) -> None:
        if self.world.chance.random() < 0.02:
            raise DaemonUnavailable("the connection broke")
        wire.say(sent, fds)

    def _take_memory(self, shared: Sequence[int], lane_fd: int) -> None:
        ring_fd, index_fd = shared
        lane = small_lane(lane_fd, self.world.lane_words)
        view = self.view
        if view is not None and view.lane.lane_id == lane.lane_id and view.is_over(index_fd):
            os.close(lane_fd)
            if not view.is_whole:
                self.view = View.open(ring_fd, index_fd, view.lane)
            return
        if self.lane_fd >= 0:
            os.close(self.lane_fd)
        self.lane_fd = lane_fd
        self.view = View.open(ring_fd, index_fd, lane)

    def detach(self) -> None:
        """Ends the connection for this process."""
        wire = self.wire
        if wire is not None:
            wire.close_client()
            self.wire = None
            self.claims.clear()
            self.asked.clear()
            self.device.clear()
            self.orders.clear()
            self.puts.disconnected()

    def receive(self) -> None:
        """Handles the next message, or the end of the connection."""
        wire = self.wire
        if wire is None:
            return
        self.puts.tidy()
        if not wire.client_open or (not wire.down and not wire.daemon_open):
            self.detach()
        elif wire.down:
            message = wire.down.popleft()
            self.world.say("told", process=self.number, message=message)
            self._take(message)

    def _take(self, message: Any) -> None:
        match message:
            case messages.SpanTaken() | messages.PartCopied() | messages.Committed():
                self.puts.received(message)
            case messages.Claimed(id=request, answer="compute", token=token):
                self.claims[token] = self.asked.pop(request)
            case messages.Claimed(id=request, answer=answer) if answer != "wait":
                self.asked.pop(request)
            case messages.Error(id=int(request)):
                if self.asked.pop(request, None) is None:
                    self.puts.refused(request, message.to_error())
            case messages.Order():
                self.orders.append(message)
            case _:
                pass

    # ---- calls of the application

    def put(self, number: int, version: int, *, claim: int | None, ttl_s: float | None, way: str) -> None:
        """Puts a payload "by the inbox", whole or streamed; "produced" in a reserved array; or "in place"."""
        encoded = encode(payload(number, version))
        options = PutOptions(number % ALL, ttl_s, claim, float(number), f"agent {self.number % 2}")
        if is_block(number):
            block = block_of(number)
            options = options._replace(prefix_bytes=len(block.packed))
        if (parent := before(number)) is not None:
            options = options._replace(parent=at(parent))
        self.world.model.puts(number, version)
        if way == "produced":
            try:
                region = self.puts.reserve(encoded.payload_bytes, 0.0)
            except TensordError:
                return
            memory = region.hand_out()
            encoded.write_into(memory)
            self.world.meanwhile()
            put = self.puts.commit(
                at(number), region, encoded.payload_bytes, len(encoded.header), options, deadline=0.0
            )
            self.reserved.append((put, memory))
        else:
            with mock.patch.object(puts, "IN_PLACE_BYTES", 0 if way == "in place" else sys.maxsize):
                put = self.puts.put(at(number), encoded, options, deadline=0.0)
        self.outcomes.append((put, number, version))

    def put_many(self, versions: Mapping[int, int]) -> None:
        """Puts payloads by number and version in one call, through the inbox."""
        encoded = []
        options = PutOptions(1, None, None, 1.0, "agent 0")
        for number, version in versions.items():
            put = Put(at(number))
            self.world.model.puts(number, version)
            encoded.append((put, encode(payload(number, version)), options))
            self.outcomes.append((put, number, version))
        with mock.patch.object(puts, "IN_PLACE_BYTES", sys.maxsize):
            self.puts.put_many(encoded, deadline=0.0)

    def scribble(self) -> None:
        """Overwrites reserved arrays whose puts have ended. No reader may see these bytes."""
        for put, memory in self.reserved:
            if put.state != "sent":
                memory[:] = 0xEE
        self.reserved = self.reserved[-3:]

    def settled(self) -> None:
        """Asserts that every put reported as stored was published."""
        for put, number, version in self.outcomes:
            if put.state == "stored":
                assert version in self.world.model.stored[number], f"key {number}: reported as stored, never published"
        self.outcomes = [outcome for outcome in self.outcomes if outcome[0].state == "sent"]

    def keep(self, number: int, lease: Lease) -> int:
        """Checks a found payload and holds it. Returns its version."""
        tree = lease.tree
        version = version_of(number, tree)
        handle = lease.handle()
        named = Handle.unpack(handle) if handle is not None else None
        assert named is None or named.key == at(number), "the handle names another key"
        self.held.append(Held(number, version, tree, None if named is None else named.span_id, handle))
        while len(self.held) > HELD_MAX:
            self.let_go()
        return version

    def held_as_copy(self, lease: Lease | None) -> bool:
        """Whether a lease is a copy, as a full lane gives."""
        return lease is not None and lease.handle() is None

    def let_go(self) -> None:
        """Releases one held payload."""
        if self.held:
            held = self.held.pop(self.world.chance.randrange(len(self.held)))
            held.check(self.world)

    # ---- forks and ends

    def fork(self, number: int) -> Process:
        """Forks. The parent freezes its lanes in use, and closes its connection if it has to attach again.

        The child holds the same payloads in its own mapping. The mapping keeps the parent's lanes and thereby their
        locks.
        """
        child = Process(self.world, number)
        view = self.view
        own = {} if view is None else {id(view.lane): view.lane}
        for held in self.held:
            mapping = held.mapping
            if mapping is None:
                child.held.append(held)
            else:
                own[id(mapping.lane)] = mapping.lane
                child.held.append(held.inherited())
        for lane in own.values():
            lane.suspend()
            if lane.in_use > LANE_WORDS - self.world.lane_words:
                lane.freeze()
            lane.resume()
            del lane.free[: -self.world.lane_words]
        if view is not None and view.lane.frozen:
            self.view = None
            os.close(self.lane_fd)
            self.lane_fd = -1
            if self.wire is not None:
                self.wire.close_client()
        return child

    def close(self) -> None:
        """Stands in for Client.close: ends the connection and keeps the leases."""
        self.closed = True
        if self.wire is not None:
            self.wire.close_client()
            self.wire = None
        self.puts.in_flight.close()
        self.view = None
        if self.lane_fd >= 0:
            os.close(self.lane_fd)
            self.lane_fd = -1

    def die(self) -> None:
        """Ends the process as SIGKILL does: descriptors and mappings close, and the locks on its lanes with them."""
        if not self.closed:
            self.close()
        self.held.clear()
        self.reserved.clear()

    def check(self) -> None:
        """Asserts that every held payload is unchanged."""
        for held in self.held:
            held.check(self.world)


def small_lane(fd: int, words: int) -> Lane:
    """The lane behind `fd`, reduced to `words` pin words."""
    lane = Lane(fd)
    del lane.free[:-words]
    return lane
