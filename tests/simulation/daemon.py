"""The daemon of a simulated host: the real memory, cores, queues and copier, one action at a time.

The sockets, the threads and the clock are simulated. Copies, scans and page changes wait until the schedule runs them.
Any other action may come first.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, assert_never

from tensord.daemon.actors.lanes import LaneJobs
from tensord.daemon.actors.queues import Queues
from tensord.daemon.core.store import Store
from tensord.daemon.forms import effects, events
from tensord.daemon.forms.effects import HostHolds
from tensord.daemon.forms.events import Pressed
from tensord.daemon.memory.opening import ConfiguredSizes
from tensord.daemon.memory.segments import Segments
from tensord.daemon.store.entries import StoreMemory
from tensord.errors import TensordError
from tensord.ipc.messages import control as messages
from tensord.shm.lanes.records import AWAKE, NAPS, SLEEPS
from tensord.shm.payloads.prefix import PrefixRecord
from tensord.shm.ring import segments

from .entries import Entries
from .payloads import TAGS, number_of, version_of
from .scrubber import Scrubber
from .settings import Settings
from .wire import Wire
from .work import Work

if TYPE_CHECKING:
    from .world import World


class Daemon:
    """Recovers the memory of its predecessor, or makes new memory. Owns its segments until `kill` or `stop`."""

    def __init__(self, world: World, settings: Settings) -> None:
        self.world = world
        self.settings = settings
        chance = world.chance
        sizes = ConfiguredSizes(settings.ring_bytes, settings.index_entries, settings.namespaces_max)
        self.memory = Segments(world.instance, sizes)
        recovered = self.memory.recovered
        self.ring_bytes = ring_bytes = self.memory.superblock.limit_bytes
        memory, superblock = self.memory, self.memory.superblock
        stepped_s = chance.choice([0.0, 0.0, 90_000.0, -90_000.0])
        self.store = Store(
            StoreMemory(memory.index, memory.index_memory, superblock.geometry, memory.ring_memory, memory.ready_bytes),
            settings.policy,
            settings.store_limits(ring_bytes),
            superblock.epoch,
            seed=chance.getrandbits(128),
        )
        self.store.reports.unix_at_zero_s = 1e6 + stepped_s  # the wall clock
        self.parts = self.store.parts
        self.work = Work(world, self)
        self.copier = self.work.copier
        self.entries = Entries(memory, self.parts)
        self.scrubber = Scrubber(world, self)
        self.queues = Queues(
            memory,
            self.copier,
            submitted=self._submitted,
            is_lent=self.store.is_lent,
            ring=lambda client: self._answer(client, messages.Settled()),
            hang_up=self._damaged_queue,
        )
        self.lanes: LaneJobs = LaneJobs(
            self.memory,
            clock=lambda: world.now,
            handle=self.do,
            begin=self.work.jobs.append,
            report=lambda fenced: self.lanes.fenced(fenced),
        )
        self.wires: dict[int, Wire] = {}
        self.clients: set[int] = set()
        """Those that the core knows: also some whose connections have ended, until their records are carried out."""
        self.matched: messages.Matched | None = None
        self.answered: int | None = None
        if recovered:
            for _ in self.store.recover(world.now, memory.missing):
                pass
        ready_bytes = self.memory.ready_bytes
        while ready_bytes < self.memory.superblock.ring_bytes:
            ready_bytes = self.memory.grow(ready_bytes, prefault=False)
        self.do(events.RingGrown(ready_bytes, more=False))

    # ---- events and effects

    def do(self, event: events.Event) -> None:
        """Passes one event to the store's core and carries out its effects."""
        self._carry_out(self.store.handle(event, self.world.now))

    def remote_answered(self, event: events.Event) -> None:
        """As `do`. The daemon may follow an invalidation on another host."""
        generations = self.memory.index.generations
        before = {tag: generations.current(tag) for tag in TAGS}
        following = self.store.handle(event, self.world.now)
        for tag, known in before.items():
            if generations.current(tag) > known:
                self.world.model.sweep(0, tag, below=generations.current(tag))
        self.look_at_generations()
        self._carry_out(following)

    def _carry_out(self, following: list[effects.Effect]) -> None:
        for effect in following:
            match effect:
                case effects.Send(number, message):
                    self._answer(number, message)
                case effects.Move():
                    self.copier.copy(effect)
                case effects.Drain():
                    self.lanes.drain()
                case effects.Scan():
                    self.lanes.scan()
                case effects.Punch() | effects.Allocate():
                    self.work.pages.append(effect)
                case HostHolds():
                    pass  # the governor's
                case effects.Announce(body):
                    self._announce(body)
                case events.Received():
                    self.do(effect)
                case effects.Seek() | effects.ReadRemote() | effects.SaveRemote() | effects.RemoveRemote():
                    self.work.requests.append(effect)
                case effects.AskGenerations() | effects.RaiseGeneration() | effects.WithdrawClaim():
                    self.work.requests.append(effect)
                case effects.RemoteTurned():
                    self.world.say("remote store turned", turned=effect)
                case _:
                    assert_never(effect)

    def _answer(self, number: int, message: Any) -> None:
        if isinstance(message, messages.Matched):
            self.matched = message
        if isinstance(message, messages.PutRefused):
            self.queues.refused(number)
        self.answered = getattr(message, "id", None)
        if number in self.wires:
            self.wires[number].answer(message)

    def _announce(self, body: dict[str, Any]) -> None:
        self.world.say("announced", **body)
        if body["event"] not in ("put", "fetch"):
            self.world.model.announced(body, self.world.now)
            return
        key = bytes.fromhex(body["key"])
        row = self.entries.row_of(key)
        assert row, "a published key has no entry"
        number = number_of(key)
        self.world.fetches += body["event"] == "fetch"
        self.world.model.publish(number, version_of(number, self.entries.tree(row)), self.entries.expires(row))

    # ---- clients

    def join(self, wire: Wire, brought: int | None) -> tuple[int, list[int]]:
        """Attaches a client. `brought`: its previous lane's descriptor.

        Returns:
            The lane's place, and the descriptors of ring, index and lane.
        """
        number, uid = wire.number, 1000 + wire.number % 2
        self.wires[number] = wire
        self.clients.add(number)
        self.do(events.ClientJoined(number, uid))
        former = self.memory.lane_brought(brought) if brought is not None else None
        lane, fds = self.memory.lend_lane(number, fenced=True, former=former)
        self.queues.attached(number, uid, lane)
        return lane.place, fds

    def open_ring(self, number: int) -> int:
        """Lets a client write into the ring. Returns a descriptor of it."""
        self.queues.writes_in_place(number)
        self.do(events.WritesInPlace(number))
        return os.dup(self.memory.writable_ring_fd)

    def hear(self, wire: Wire) -> None:
        """Handles the next message of one connection, or its end."""
        self.wake()
        if not wire.up:
            if not wire.client_open:
                self.hang_up(wire)
            return
        message = wire.up.popleft()
        self.world.say("heard", client=wire.number, message=message)
        assert isinstance(message, messages.StoreRequest)
        # What the client has put before comes first.
        if not isinstance(message, messages.Doorbell):
            self.queues.after_added(wire.number, partial(self._requested, wire.number, message))

    def _requested(self, number: int, message: Any) -> None:
        if number not in self.clients:
            return
        match message:
            case messages.Clear() | messages.Invalidate():
                below = None
                if isinstance(message, messages.Invalidate):
                    below = max(message.generation + 1, self.world.model.eras[message.namespace])
                self.world.model.sweep(message.id, message.namespace, below=below)
                self.do(events.Received(number, message))
                if self.answered == message.id:
                    self.world.model.refused(message.id)
                self.look_at_generations()
            case messages.Touch():
                self.do(events.Received(number, message))
                self._touched(message)
            case _:
                self.do(events.Received(number, message))

    def _touched(self, message: messages.Touch) -> None:
        for key in message.keys:
            if row := self.parts.table.by_key.get(key):
                self.world.model.touched(number_of(key), self.entries.expires(row))

    def look_at_generations(self) -> None:
        """Records the current generations in the model."""
        for tag in TAGS:
            self.world.model.invalidated(tag, self.memory.index.generations.current(tag))

    def hang_up(self, wire: Wire) -> None:
        """Ends a connection from the daemon's side."""
        wire.close_daemon()
        del self.wires[wire.number]
        self.queues.after_added(wire.number, partial(self._left, wire.number))

    def _left(self, number: int) -> None:
        """A client has left, and what it has added is carried out."""
        self.queues.detached(number)
        self.copier.close_inbox(number)
        self.clients.discard(number)
        self.memory.orphan(number)
        self.do(events.ClientLeft(number))

    # ---- queues

    def turn(self) -> None:
        """Carries out records of each client, unless the daemon sleeps."""
        if self.memory.asleep[0] != SLEEPS:
            self.memory.asleep[0] = AWAKE
            self.queues.turn()

    def wake(self) -> None:
        """A message or a timer ends the daemon's sleep."""
        self.memory.asleep[0] = AWAKE

    def doze(self) -> None:
        """The daemon sleeps, or naps, if no record waits."""
        if not self.queues.waiting:
            self.scrubber.unsummed += self.store.take_unsummed()
            self.memory.asleep[0] = self.world.chance.choice([NAPS, SLEEPS])

    def _submitted(self, client: int, records: memoryview, errors: dict[int, TensordError]) -> int:
        last, following = self.store.submitted(client, records, self.world.now, errors)
        self._carry_out(following)
        return last

    def _damaged_queue(self, client: int, reason: str) -> None:
        raise AssertionError(f"the queue of client {client} is damaged: {reason}")

    def match(
        self, number: int, message: messages.MatchPrefix, query: PrefixRecord, tokens: Any
    ) -> messages.Matched | None:
        """The answer to a prefix query; None if the store refused it."""
        self.matched = None
        self.do(events.PrefixAsked(number, message, query, tokens))
        return self.matched

    def keep_time(self) -> None:
        """Starts the jobs on lanes that are due: log reads, counts of holders, removal of lanes without holders."""
        self.wake()
        self.lanes.keep_time(self.world.now)

    def tick(self) -> None:
        """Handles the timers that are due."""
        timer = self.store.next_timer()
        if timer is not None and timer <= self.world.now:
            self.wake()
            self.do(events.Tick())

    # ---- input from outside

    def press(self) -> None:
        """Limits the ring's resident memory at random, as the governor does."""
        chance = self.world.chance
        most = chance.choice([None, None, self.ring_bytes // 2, self.ring_bytes // 4 + 1])
        self.do(Pressed(most, refuse=chance.random() < 0.05, reason="the schedule"))

    def reload(self, settings: Settings) -> None:
        """Applies other limits, as SIGHUP does."""
        self.settings = settings
        self.do(events.LimitsChanged(settings.store_limits(self.ring_bytes)))

    # ---- ends

    def kill(self) -> None:
        """Ends the daemon as SIGKILL does: descriptors and mappings close, perhaps in the middle of a copy."""
        self.work.tear()
        self._end()

    def stop(self) -> None:
        """Ends the daemon as SIGTERM does: connections close, and requested copies are completed."""
        self.store.evict_only_for_puts()
        if self.world.chance.random() < 0.5:
            self.work.finish_copies()
        for wire in list(self.wires.values()):
            self.hang_up(wire)
        self.work.finish_copies()
        self._end()

    def _end(self) -> None:
        for wire in self.wires.values():
            wire.close_daemon()
        self.memory.close(drop=False)

    # ---- queries

    def check(self) -> None:
        """Asserts the invariants of the core, and that the memory agrees with its state."""
        self.store.check_invariants()
        status = self.store.status()
        corrupt = status["found_corrupt"]
        assert self.world.damaged or not corrupt, f"found_corrupt is {corrupt}"
        if not self.work.pages:
            # Reading a page that was given back would allocate the page again.
            blocks = os.stat(segments.SHM_FOLDER / f"tensord.{self.world.instance}.ring").st_blocks
            assert blocks * 512 == status["resident_bytes"], "the ring has pages unknown to the store"
