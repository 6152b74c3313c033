"""A simulated process with a real client: puts, grants, view, lane and leases over a simulated connection.

This module stands in for client/link/link.py. It attaches, receives, and handles forks and the end of a connection.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from mmap import MAP_SHARED, PROT_READ
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

from tensord.client.arguments.put_options import PutOptions
from tensord.client.reading.lease import Lease, Recipes, RingReader
from tensord.client.reading.ring_mapping import Handle, RingMapping, mapping_under
from tensord.client.reading.view import View
from tensord.client.writing.outcomes import Put
from tensord.client.writing.put import PutPayload, Reservation
from tensord.client.writing.puts import Puts
from tensord.errors import DaemonUnavailable, LimitReached, ObjectTooLarge, TensordError, TimedOut
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.schema import ClientLimits
from tensord.shm.lanes.lane import VIEW_WORDS, Lane
from tensord.shm.payloads.packing import pack

from .payloads import ALL, TAGS, array_of, at, before, block_of, is_block, payload, to_fill, version_of
from .wire import Wire

if TYPE_CHECKING:
    from tensord.client.link.link import Link

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
        lease = RingReader(ring, Recipes()).borrow(handle)
        assert lease is not None, f"key {self.number}: a pinned span cannot be borrowed"
        return Held(self.number, self.version, lease.tree, self.span_id, handle)

    def check(self, world: World) -> None:
        """Asserts that the payload is unchanged and that its span still belongs to its key."""
        if self.span_id is not None and world.daemon is not None:
            assert world.daemon.entries.holds(self.span_id, at(self.number)), (
                f"key {self.number}: span reused under a reader"
            )
        assert version_of(self.number, self.tree) == self.version, f"key {self.number}: a leased payload has changed"


class Channel:
    """The client's end of a connection, as `ipc.wire.blocking.BlockingChannel`."""

    def __init__(self, process: Process, wire: Wire) -> None:
        self._process, self.wire = process, wire

    @property
    def closed(self) -> bool:
        return not self.wire.client_open

    def send(self, *sent: messages.Message, timeout_s: float = 0.0) -> None:
        """Sends messages. Other actions may happen during the call, also to this process."""
        self._process.send_on(self.wire, sent)


class Process:
    """Process `number`. `wire` is its connection while the connection is usable, else None. `has_inbox`: the daemon
    does not let it write into the ring."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.has_inbox = world.chance.random() < 0.35
        self.view: View | None = None
        self.lane_fd = -1
        self.wire: Wire | None = None
        self.connection: Channel | None = None
        self.closed = False
        self.path = "simulated"
        self.limits = ClientLimits()
        self._ids = count(number * 1_000_000 + 1)
        # What `Puts` uses of a link.
        self.attachment = SimpleNamespace(wait_renewed=lambda timeout_s: None)
        self.silence = SimpleNamespace(patience_s=0.25)
        self.answers = SimpleNamespace(wait=lambda answer, timeout_s: answer.result(0))
        self.puts = Puts(cast("Link", self))
        self.eras = dict.fromkeys(TAGS, 0)
        self.held: list[Held] = []
        self.claims: dict[int, int] = {}
        self.asked: dict[int, int] = {}
        self.outcomes: list[tuple[Put, int, int]] = []

    def learn(self) -> None:
        """Reads the current generations."""
        if self.view is not None:
            for tag in self.eras:
                self.eras[tag] = max(self.eras[tag], self.view.current(tag))

    def next_id(self) -> int:
        return next(self._ids)

    # ---- the link

    def start(self) -> None:
        """Does nothing: the schedule attaches."""

    @property
    def connected(self) -> bool:
        return self.connection is not None

    def unavailable(self) -> TensordError:
        return DaemonUnavailable("there is no daemon")

    def ask(
        self, make: Callable[[int], Any], timeout_s: float, *, connected: Any = None, fds: Sequence[int] = ()
    ) -> Future[Any]:
        """Stands in for Link.ask. Puts ask for the ring, and for an inbox. Both are answered at once."""
        answer: Future[Any] = Future()
        daemon, wire, asked = self.world.daemon, self.wire, make(self.next_id())
        if daemon is None or wire is None or connected is not self.connection or wire.number not in daemon.wires:
            answer.set_exception(DaemonUnavailable("the connection broke"))
        elif isinstance(asked, messages.OpenInbox):
            daemon.copier.open_inbox(wire.number, fds[0], asked.inbox_bytes)
            answer.set_result(messages.Done(asked.id))
        elif self.has_inbox:
            answer.set_exception(LimitReached("write_in_place is off"))
        else:
            answer.set_result([daemon.open_ring(wire.number)])
        return answer

    def send(self, *sent: messages.Message) -> None:
        """Sends messages of the application."""
        if self.wire is None:
            raise DaemonUnavailable("there is no daemon")
        self.send_on(self.wire, sent)

    def send_on(self, wire: Wire, sent: Sequence[messages.Message]) -> None:
        """Sends messages. Other actions may happen during the call, also to this process."""
        if not wire.client_open or not wire.daemon_open:
            raise DaemonUnavailable("there is no daemon")
        fate = self.world.chance.random()
        if fate < 0.005:
            raise TimedOut("the daemon does not read")
        if fate < 0.015:
            wire.close_client()
            raise DaemonUnavailable("the connection broke")
        wire.say(sent)
        self.world.meanwhile()

    def attach(self) -> None:
        """Connects if there is a daemon, with the existing lane of this process or with a new one."""
        daemon = self.world.daemon
        if daemon is None or self.wire is not None or self.closed:
            return
        wire = Wire(self.world.next_client())
        back = self.lane_fd if self.lane_fd >= 0 and self.view is not None else None
        place, (*shared, lane_fd) = daemon.join(wire, back)
        view = self._take_memory(shared, lane_fd)
        self.limits = daemon.settings.client_limits(daemon.ring_bytes)
        self.wire, self.connection = wire, Channel(self, wire)
        self.puts.attached(cast(Any, self.connection), view, place)

    def _take_memory(self, shared: Sequence[int], lane_fd: int) -> View:
        ring_fd, index_fd = shared
        lane = Lane(lane_fd)
        del lane.free[: -self.world.lane_words]
        view = self.view
        if view is not None and view.lane.lane_id == lane.lane_id and view.is_over(index_fd):
            os.close(lane_fd)
            if not view.is_whole:
                self.view = view = View.open(ring_fd, index_fd, view.lane)
            return view
        if self.lane_fd >= 0:
            os.close(self.lane_fd)
        self.lane_fd = lane_fd
        self.view = view = View.open(ring_fd, index_fd, lane)
        return view

    def detach(self) -> None:
        """Ends the connection for this process."""
        wire = self.wire
        if wire is not None:
            wire.close_client()
            self.wire = self.connection = None
            self.claims.clear()
            self.asked.clear()
            self.puts.ended()

    def receive(self) -> None:
        """Handles the next message, or the end of the connection."""
        wire = self.wire
        if wire is None:
            return
        if not wire.client_open or (not wire.down and not wire.daemon_open):
            self.detach()
        elif wire.down:
            message = wire.down.popleft()
            self.world.say("told", process=self.number, message=message)
            self._take(message)

    def _take(self, message: Any) -> None:
        match message:
            case messages.GrantsLent() | messages.PutRefused() | messages.Settled() | messages.PlacesWanted():
                self.puts.received(message)
            case messages.Claimed(id=request, answer="compute", token=token):
                self.claims[token] = self.asked.pop(request)
            case messages.Claimed(id=request, answer=answer) if answer != "wait":
                self.asked.pop(request)
            case messages.Error(id=int(request)):
                if self.asked.pop(request, None) is None:
                    self.puts.refused(request, message.to_error())
            case _:
                pass

    def rest(self) -> None:
        """What the connection's thread does about once a second. Now and then the daemon seems not to answer."""
        if self.world.chance.random() < 0.8:
            self.puts.rest()
        elif self.connected:
            self.puts.silent(TimedOut("the daemon does not answer") if self.puts.writer is not None else None)

    # ---- calls of the application

    def put(self, number: int, version: int, *, claim: int | None, ttl_s: float | None, way: str) -> None:
        """Puts a payload: "put" copies a tree, "produced" writes it into a reserved array."""
        tree = payload(number, version)
        options = PutOptions(number % ALL, ttl_s, claim, float(number), f"agent {self.number % 2}")
        if is_block(number):
            block = block_of(number)
            options = options._replace(prefix_bytes=len(block.packed))
        if (parent := before(number)) is not None:
            options = options._replace(parent=at(parent))
        self.world.model.puts(number, version)
        put, deadline = Put(at(number)), self.world.now + self.world.chance.choice([0.0, 0.1, 1.0])

        def commit(key: bytes, filled: PutPayload, given: PutOptions, wait: bool, timeout_s: float | None) -> Put:
            self.puts.put(put, filled, options, deadline)
            return put

        if way == "produced":
            try:
                reserved = Reservation(to_fill(tree), 32, self.limits.object_bytes_max, commit)
            except ObjectTooLarge:
                return
            array_of(number, reserved.tree)[:] = array_of(number, tree)
            if is_block(number):
                reserved.tree["prefix"][:] = tree["prefix"]
            tree = reserved.tree
            self.world.meanwhile()
            self.outcomes.append((put, number, version))
            reserved.commit(at(number))
        else:
            self.outcomes.append((put, number, version))
            self.puts.put(put, pack(tree), options, deadline)
        # The caller's again. No reader may see these bytes.
        array_of(number, tree)[:] = 0xEE

    def put_many(self, versions: Mapping[int, int]) -> None:
        """Puts payloads by number and version in one call."""
        options, deadline = PutOptions(1, None, None, 1.0, "agent 0"), self.world.now + 0.1
        for number, version in versions.items():
            put = Put(at(number))
            self.world.model.puts(number, version)
            self.outcomes.append((put, number, version))
            self.puts.put(put, pack(payload(number, version)), options, deadline)

    def wait(self, most_s: float) -> None:
        """Waits for one of its puts. Asserts that the wait ends, and says what became of the put."""
        sent = [put for put, _, _ in self.outcomes if put.state == "sent"]
        if sent:
            put, until = self.world.chance.choice(sent), self.world.now + most_s
            try:
                assert put.wait(most_s).state != "sent"
            except TimedOut:
                assert self.world.now >= until

    def wait_for_own(self, number: int) -> None:
        """Waits for its own put of a key, as a get does that misses. Asserts that it is carried out afterwards."""
        sent = [put for put, other, _ in self.outcomes if other == number and put.state == "sent"]
        if self.puts.wait_for_own(at(number)) and sent:
            assert sent[-1].outcomes is None or sent[-1].number <= sent[-1].outcomes.settled

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
            if lane.in_use_by_views > VIEW_WORDS - self.world.lane_words:
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
            self.wire = self.connection = None
        self.puts.ended(DaemonUnavailable("the client was closed"))
        self.view = None
        if self.lane_fd >= 0:
            os.close(self.lane_fd)
            self.lane_fd = -1

    def die(self) -> None:
        """Ends the process as SIGKILL does: descriptors and mappings close, and the locks on its lanes with them."""
        if not self.closed:
            self.close()
        # It refers to this object, and keeps the ring and the lane mapped.
        del self.puts
        self.held.clear()
        self.outcomes.clear()

    def check(self) -> None:
        """Asserts that every held payload is unchanged."""
        for held in self.held:
            held.check(self.world)
