"""One simulated process with a client in it: the real puts, inbox, view, lane and leases over a simulated connection.

Played is client/core/link.py: attaching, receiving, and what it does when the connection ends or the process forks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
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
from tensord.shm import lanes
from tensord.shm.lanes import Lane
from tensord.shm.layout import LANE_WORDS
from tensord.shm.tree import encode

from .payloads import ALL, TAGS, array_of, at, block_of, is_block, payload, version_of
from .wire import Wire

if TYPE_CHECKING:
    from .world import World

HELD_MAX: Final = 5


@dataclass(eq=False)
class Held:
    """What a process looks at: the payload, and where its bytes are (None of a copy)."""

    number: int
    version: int
    tree: Any
    span_id: int | None
    handle: bytes | None

    @property
    def mapping(self) -> RingMapping | None:
        """The mapping of the ring in which it lies; None of a copy."""
        return mapping_under(array_of(self.number, self.tree))

    def inherited(self) -> Held:
        """The same as a child of the process has it."""
        mapping, handle = self.mapping, self.handle
        assert mapping is not None and handle is not None
        ring = RingMapping(mapping.fd, len(mapping), MAP_SHARED, PROT_READ)
        ring.begin(mapping.lane, mapping.fd, 0)
        ring.identity = mapping.identity
        lease = RingReader(ring, {}).borrow(handle)
        assert lease is not None, f"key {self.number}: what is pinned cannot be borrowed"
        return Held(self.number, self.version, lease.tree, self.span_id, handle)

    def check(self, world: World) -> None:
        """Asserts that it is what it was, and that its span was not given to another."""
        if self.span_id is not None and world.daemon is not None:
            assert world.daemon.holds(self.span_id, at(self.number)), f"key {self.number}: reused under a reader"
        assert version_of(self.number, self.tree) == self.version, f"key {self.number}: a lease has changed"


class Process:
    """Process `number`. `wire` is its connection, from the moment in which it may be used."""

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
        """As Link.refusal."""
        return None if self.view is None else self.view.refusal(key)

    def learn(self) -> None:
        """Asks for the generations as they are now."""
        if self.view is not None:
            for tag in self.eras:
                self.eras[tag] = max(self.eras[tag], self.view.current(tag))

    def next_id(self) -> int:
        return next(self._ids)

    def open_ring(self, make: Any, timeout_s: float, connected: Any) -> Future[Any]:
        """As Link.ask, of the only request that puts make."""
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
        """As Link.send; meanwhile anything may happen, to this process too."""
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
            # An inbox is opened and closed under the lock of its table.
            self.world.meanwhile()

    def attach(self) -> None:
        """A new connection, if there is a daemon: with the lane that this process has, or a new one."""
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
            self.puts.in_flight.disconnected()
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
        """The connection is over for this process."""
        wire = self.wire
        if wire is not None:
            wire.close_client()
            self.wire = None
            self.claims.clear()
            self.asked.clear()
            self.device.clear()
            self.orders.clear()
            self.puts.in_flight.disconnected()

    def receive(self) -> None:
        """The next answer, or the end of the connection."""
        wire = self.wire
        if wire is None:
            return
        self.puts.inboxes.tidy()
        if not wire.client_open or (not wire.down and not wire.daemon_open):
            self.detach()
        elif wire.down:
            message = wire.down.popleft()
            self.world.say("told", process=self.number, message=message)
            self._take(message)

    def _take(self, message: Any) -> None:
        match message:
            case messages.Placed() | messages.PartCopied() | messages.Committed():
                self.puts.in_flight.acknowledged(message)
            case messages.Claimed(id=request, answer="compute", token=token):
                self.claims[token] = self.asked.pop(request)
            case messages.Claimed(id=request, answer=answer) if answer != "wait":
                self.asked.pop(request)
            case messages.Error(id=int(request)):
                if self.asked.pop(request, None) is None:
                    self.puts.in_flight.refused(request, message.to_error())
            case messages.Order():
                self.orders.append(message)
            case _:
                pass

    # ---- what a caller does

    def put(self, number: int, version: int, *, claim: int | None, ttl_s: float | None, way: str) -> None:
        """A put "by the inbox", whole or streamed; one whose payload is "produced" there; or one "in place"."""
        encoded = encode(payload(number, version))
        options = PutOptions(number % ALL, ttl_s, claim, float(number), f"agent {self.number % 2}")
        if is_block(number):
            block = block_of(number)
            options = options._replace(prefix_bytes=len(block.packed), parent=block.record.parent)
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

    def scribble(self) -> None:
        """Writes into arrays whose put has ended: that must reach nobody."""
        for put, memory in self.reserved:
            if put.state != "sent":
                memory[:] = 0xEE
        self.reserved = self.reserved[-3:]

    def settled(self) -> None:
        """Asserts that what was answered is what has happened."""
        for put, number, version in self.outcomes:
            if put.state == "stored":
                assert version in self.world.model.stored[number], f"key {number}: stored, it was said, and is not"
        self.outcomes = [outcome for outcome in self.outcomes if outcome[0].state == "sent"]

    def keep(self, number: int, lease: Lease) -> int:
        """Checks what was found, and goes on looking at it. Its version."""
        tree = lease.tree
        version = version_of(number, tree)
        handle = lease.handle()
        named = Handle.unpack(handle) if handle is not None else None
        assert named is None or named.key == at(number), "found under another key"
        self.held.append(Held(number, version, tree, None if named is None else named.span_id, handle))
        while len(self.held) > HELD_MAX:
            self.let_go()
        return version

    def held_as_copy(self, lease: Lease | None) -> bool:
        """Whether a lease is a copy, as a full lane gives."""
        return lease is not None and lease.handle() is None

    def let_go(self) -> None:
        """One payload is looked at no more."""
        if self.held:
            held = self.held.pop(self.world.chance.randrange(len(self.held)))
            held.check(self.world)

    # ---- forks and ends

    def fork(self, number: int) -> Process:
        """The parent's lanes in use are frozen, its connection ends if it has to attach anew; the child holds the same.

        The child looks at the same bytes by a mapping of its own, which holds the parent's lanes, and so their locks.
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
        """Client.close: the connection ends, the leases stay."""
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
        """kill -9: descriptors and mappings go, and with the last of them the locks on its lanes."""
        if not self.closed:
            self.close()
        self.held.clear()
        self.reserved.clear()

    def check(self) -> None:
        """Asserts that all that it looks at is what it was."""
        for held in self.held:
            held.check(self.world)


def small_lane(fd: int, words: int) -> Lane:
    """The lane behind `fd`, of which `words` pin words are used: to make all finalizers takes longer than a seed."""
    make = lanes._releaser
    lanes._releaser = lambda state, word: _never
    try:
        lane = Lane(fd)
    finally:
        lanes._releaser = make
    del lane.free[:-words]
    for word in lane.free:
        lane.releases[word] = make(lane._state, word)
    return lane


def _never(_: object) -> None:
    raise AssertionError("a pin word that is not used was released")
