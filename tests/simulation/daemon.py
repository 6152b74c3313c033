"""The daemon of a simulated host: the real memory, cores, queues and copier, one action at a time.

The sockets, the threads and the clock are simulated. Copies, scans and page changes wait until the schedule runs them.
Any other action may come first.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, assert_never

import xxhash

from tensord.client.reading.lease import lease_over
from tensord.daemon.actors.lanes import LaneJobs
from tensord.daemon.actors.queues import Queues
from tensord.daemon.core import effects, events
from tensord.daemon.core.host_memory import HostHolds, Pressed
from tensord.daemon.core.parts import StoreMemory
from tensord.daemon.core.store import Store
from tensord.daemon.governor.forms import events as governor_events
from tensord.daemon.governor.governor import Governor
from tensord.daemon.memory.copier import Copier, CopyJob, InboxCopied, InboxCopy
from tensord.daemon.memory.segments import Segments
from tensord.daemon.remote_stores.threads import RemoteThreads, Request
from tensord.daemon.store.table import FREE
from tensord.errors import NotEnoughMemory, TensordError
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.modes import HOST_GAUGE, Tier
from tensord.shm.lanes.records import AWAKE, NAPS, SLEEPS
from tensord.shm.payloads.prefix import PrefixRecord
from tensord.shm.payloads.recipe import recipe
from tensord.shm.ring import segments
from tensord.shm.ring.layout import SPAN_HEADER_BYTES

from .payloads import TAGS, number_of, version_of
from .settings import Settings
from .wire import Wire

if TYPE_CHECKING:
    from .world import World

GPU = "gpu"
FAR_FUTURE_S = 1e12
"""The Unix time at 0 for the remote store, so that no entry's time is over by the machine's clock."""
_MIB = 1 << 20


class ScheduledCopier(Copier):
    """A copier without a thread: the schedule runs the turns of its copies."""

    def __init__(self, ring: Any) -> None:
        super().__init__(ring, 32, lambda _: None)
        self.copies: deque[CopyJob] = deque()
        self.moves: deque[CopyJob] = deque()

    def copy(self, part: InboxCopy | effects.Move) -> None:
        queue = self.moves if isinstance(part, effects.Move) else self.copies
        queue.append(CopyJob(part, xxhash.xxh3_64()))

    def turn(self, job: CopyJob) -> InboxCopied | events.Moved | None:
        """One turn of a copy; None if it goes on."""
        return self._outcome(job)


class Daemon:
    """Recovers the memory of its predecessor, or makes new memory. Owns its segments until `kill` or `stop`."""

    def __init__(self, world: World, settings: Settings) -> None:
        self.world = world
        self.settings = settings
        chance = world.chance
        self.memory = Segments.open(
            world.instance, settings.ring_bytes, settings.index_entries, settings.namespaces_max
        )
        recovered = self.memory.recovered
        self.ring_bytes = ring_bytes = self.memory.superblock.limit_bytes
        memory, superblock = self.memory, self.memory.superblock
        self.store = Store(
            StoreMemory(memory.index, memory.index_memory, superblock.geometry, memory.ring_memory, memory.ready_bytes),
            settings.policy,
            settings.store_limits(ring_bytes),
            superblock.epoch,
            1e6 + chance.choice([0.0, 0.0, 90_000.0, -90_000.0]),  # the wall clock was stepped
            seed=chance.getrandbits(128),
        )
        self.parts = self.store.parts
        self.governor = Governor(settings.governor_limits())
        self.copier = ScheduledCopier(memory.ring)
        self.queues = Queues(
            memory,
            self.copier,
            submitted=self._submitted,
            is_lent=self.store.is_lent,
            ring=lambda client: self._answer(client, messages.Settled()),
            hang_up=self._damaged_queue,
        )
        self.jobs: deque[Iterator[None]] = deque()
        self.lanes = LaneJobs(
            self.memory,
            clock=lambda: world.now,
            handle=self.do,
            begin=self.jobs.append,
            report=lambda fenced: self.lanes.fenced(fenced),
        )
        # Its threads are never started: the schedule carries its requests out.
        self.remote = RemoteThreads(
            world.remote,
            self.memory.ring,
            self.copier.check,
            self.remote_answered,
            1.0,
            clock=lambda: world.now,
            unix_at_zero=lambda: FAR_FUTURE_S,
        )
        self.requests: deque[Request] = deque()
        """Requests of the remote store that are under way."""
        self.wires: dict[int, Wire] = {}
        self.clients: set[int] = set()
        """Those that the core knows: also some whose connections have ended, until their records are carried out."""
        self.pages: deque[effects.Punch | effects.Allocate] = deque()
        self.unsummed: list[int] = []
        """Slots of entries without a checksum."""
        self.scrubbed: tuple[int, int, int] | None = None
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
                    self.pages.append(effect)
                case HostHolds():
                    self.govern(effect)
                case effects.Announce(body):
                    self._announce(body)
                case effects.Again(number, message, counted):
                    self.do(events.Received(number, message, counted))
                case effects.Seek() | effects.SeekRun() | effects.ReadRemote():
                    self.requests.append(effect)
                case effects.SaveRemote() | effects.RemoveRemote():
                    self.requests.append(effect)
                case effects.AskGenerations() | effects.RaiseGeneration() | effects.WithdrawClaim():
                    self.requests.append(effect)
                case effects.RemoteTurned():
                    self.world.say("remote store turned", turned=effect)
                case _:
                    assert_never(effect)

    def govern(self, event: governor_events.Event) -> None:
        """Passes one event to the governor's core and carries out its effects."""
        for effect in self.governor.handle(event, self.world.now):
            match effect:
                case effects.Send(number, message):
                    self._answer(number, message)
                case Pressed() if self.settings.governed:
                    self.do(effect)

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
        row = self.row_of(key)
        assert row, "a published key has no entry"
        number = number_of(key)
        self.world.fetches += body["event"] == "fetch"
        self.world.model.publish(number, version_of(number, self.tree(row)), self.expires(row))

    def row_of(self, key: bytes) -> int:
        """The row of an entry, published or hidden; 0 if there is none."""
        return self.parts.table.by_key.get(key) or self.parts.spans.hidden.get(key, 0)

    def expires(self, row: int) -> float:
        """The end of an entry's time to live."""
        return self.parts.details.expires(row) or math.inf

    def tree(self, row: int) -> Any:
        """The payload of an entry as it stands in the ring."""
        table = self.parts.table
        start = table.offsets[row] + SPAN_HEADER_BYTES
        header = self.memory.ring[start : start + self.parts.details.tree_bytes(row)].tobytes()
        return lease_over(self.memory.ring, start, table.payloads[row], recipe(header)).tree

    # ---- clients

    def join(self, wire: Wire, brought: int | None) -> tuple[int, list[int]]:
        """Attaches a client. `brought`: its previous lane's descriptor.

        Returns:
            The lane's place, and the descriptors of ring, index and lane.
        """
        number, uid = wire.number, 1000 + wire.number % 2
        self.wires[number] = wire
        self.clients.add(number)
        self.do(events.ClientJoined(number, uid, "simulated"))
        self.govern(governor_events.GovernorClientJoined(number, "simulated", number))
        if brought is not None and not self.memory.has_lane_for(brought):
            brought = None
        lane, fds = self.memory.lend_lane(number, fenced=True, brought=brought)
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
        if isinstance(message, messages.StoreRequest):
            # What the client has put before comes first.
            if not isinstance(message, messages.Doorbell):
                self.queues.after_added(wire.number, partial(self._requested, wire.number, message))
        else:
            self.govern(governor_events.GovernorReceived(wire.number, message))

    def _requested(self, number: int, message: Any) -> None:
        if number not in self.clients:
            return
        match message:
            case messages.Clear() | messages.Invalidate() | messages.EvictPrefixes():
                sequences = isinstance(message, messages.EvictPrefixes)
                below = None
                if isinstance(message, messages.Invalidate):
                    below = max(message.generation + 1, self.world.model.eras[message.namespace])
                self.world.model.sweep(message.id, message.namespace, sequences=sequences, below=below)
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
                self.world.model.touched(number_of(key), self.expires(row))

    def look_at_generations(self) -> None:
        """Records the current generations in the model."""
        for tag in TAGS:
            self.world.model.invalidated(tag, self.memory.index.generations.current(tag))

    def hang_up(self, wire: Wire) -> None:
        """Ends a connection from the daemon's side."""
        wire.close_daemon()
        del self.wires[wire.number]
        self.govern(governor_events.GovernorClientLeft(wire.number))
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
            self.unsummed += self.store.take_unsummed()
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

    # ---- deferred work

    def copy(self) -> None:
        """Runs one turn of a random client's copy out of its inbox. The turn may complete the copy or fail."""
        copies = self.copier.copies
        if not copies:
            return
        job = self.world.chance.choice(copies)
        copied = self.copier.turn(job)
        self.world.say("copied", client=job.client, copied_bytes=job.copied_bytes, done=copied is not None)
        if copied is not None:
            assert isinstance(copied, InboxCopied)
            copies.remove(job)
            self.queues.copied(copied)

    def ask_remote(self) -> None:
        """The remote store answers one of its requests."""
        if self.requests:
            request = self.world.chance.choice(self.requests)
            self.requests.remove(request)
            self.world.say("remote", request=request)
            self.remote._carry_out(request, math.inf)

    def move(self) -> None:
        """Runs one turn of moving a span to another place."""
        moves = self.copier.moves
        if not moves:
            return
        job = self.world.chance.choice(moves)
        moved = self.copier.turn(job)
        if moved is not None:
            assert isinstance(moved, events.Moved) and moved.error is None, moved
            self.world.say("moved", span=moved.number)
            moves.remove(job)
            self.do(moved)

    def move_pages(self, *, short: bool | None = None) -> None:
        """Carries out the oldest page change. An allocation fails now and then for lack of memory."""
        if not self.pages:
            return
        effect = self.pages.popleft()
        self.world.say("pages", effect=effect)
        if isinstance(effect, effects.Punch):
            self.memory.punch(effect.offset, effect.size_bytes)
            self.do(events.Punched(effect.offset))
        elif self.world.chance.random() < 0.2 if short is None else short:
            self.do(events.Allocated(effect.offset, NotEnoughMemory("no memory is available")))
        else:
            self.memory.allocate(effect.offset, effect.size_bytes, prefault=False)
            self.do(events.Allocated(effect.offset))

    def work(self) -> None:
        """Runs one slice of a job: a scan, a count of holders, or a read of the lanes' logs."""
        if not self.jobs:
            return
        job = self.jobs.popleft()
        for _ in job:
            self.jobs.append(job)
            return

    def scrub(self) -> None:
        """Looks at an entry of a former daemon, or at one without a checksum. Records the result a step later, if the
        slot still holds the same span."""
        index = self.memory.index
        if self.scrubbed is not None:
            number, span_id, checksum = self.scrubbed
            self.scrubbed = None
            slot = index.read(number)
            if slot.published and slot.span_id == span_id:
                self.memory.write_checksum(slot.offset, checksum)
                index.mark(number, unverified=False)
            return
        due = [slot for slot in index.slots() if slot.published and slot.unverified]
        if self.unsummed:
            unsummed = index.read(self.unsummed.pop())
            due += [unsummed] if unsummed.published else []
        if due:
            slot = self.world.chance.choice(due)
            sound, checksum = self.memory.summed(slot)
            if not sound:
                assert self.world.damaged, "an entry differs from the stored one"
                self.do(events.FoundCorrupt(slot.span_id))
                return
            self.scrubbed = slot.number, slot.span_id, checksum

    def take_checksums(self) -> None:
        """Gives every entry a checksum, as a daemon does that has been idle for long enough."""
        for slot in self.memory.index.slots():
            if slot.published:
                sound, checksum = self.memory.summed(slot)
                assert sound, "an entry differs from the stored one"
                self.memory.write_checksum(slot.offset, checksum)

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
        timer = self.governor.next_timer()
        if timer is not None and timer <= self.world.now:
            self.govern(governor_events.GovernorTick())

    # ---- input from outside

    def sample(self) -> None:
        """Reads all gauges. Some readings are missing, late or stale."""
        chance, now = self.world.chance, self.world.now
        samples = []
        for gauge, tier in ((HOST_GAUGE, Tier.HOST), (GPU, Tier.DEVICE)):
            share = chance.choice([0.3, 0.5, 0.5, 0.6, 0.6, 0.75, 0.8, 0.87, 0.94, 0.98])
            if chance.random() < 0.9:
                began_at = now - chance.choice([0.0, 0.0, 1.0])
                used = int(share * 1000 * _MIB)
                stale = chance.random() < 0.1
                samples.append(governor_events.Sample(gauge, tier, used, 1000 * _MIB, "simulated", began_at, stale))
        self.govern(governor_events.Sampled(tuple(samples)))

    def press(self) -> None:
        """Limits the ring's resident memory at random, unless the governor limits it."""
        if not self.settings.governed:
            chance = self.world.chance
            most = chance.choice([None, None, self.ring_bytes // 2, self.ring_bytes // 4 + 1])
            idle_s = chance.choice([None, None, None, 5.0])
            self.do(Pressed(most, idle_s, refuse=chance.random() < 0.05, reason="the schedule"))

    def reload(self, settings: Settings) -> None:
        """Applies other limits, as SIGHUP does."""
        self.settings = settings
        self.do(events.LimitsChanged(settings.store_limits(self.ring_bytes)))
        self.govern(governor_events.GovernorLimitsChanged(settings.governor_limits()))

    # ---- ends

    def kill(self) -> None:
        """Ends the daemon as SIGKILL does: descriptors and mappings close, perhaps in the middle of a copy."""
        ring = self.memory.ring
        for job in [*self.copier.copies, *self.copier.moves]:
            if self.world.chance.random() < 0.5:
                continue
            match job.part:
                case InboxCopy() as copy:
                    ring[copy.offset : copy.offset + copy.payload_bytes // 2] = 0xEE
                case effects.Move() as move:
                    ring[move.to_offset : move.to_offset + move.size_bytes // 2] = 0xEE
        for request in self.requests:
            if isinstance(request, effects.ReadRemote):
                # A read of the remote store has come so far. It begins with the object's header.
                ring[request.ring_offset :][: SPAN_HEADER_BYTES + request.found.payload_bytes // 2] = 0xEE
        self._end()

    def stop(self) -> None:
        """Ends the daemon as SIGTERM does: connections close, and requested copies are completed."""
        self.store.evict_only_for_puts()
        if self.world.chance.random() < 0.5:
            self.finish_copies()
        for wire in list(self.wires.values()):
            self.hang_up(wire)
        self.finish_copies()
        self._end()

    def finish_copies(self) -> None:
        """Completes all requested copies and moves, and carries out all records."""
        while self.copier.copies or self.copier.moves or self.queues.turn():
            self.copy()
            self.move()
        for request in [each for each in self.requests if isinstance(each, effects.ReadRemote)]:
            self.requests.remove(request)
            self.remote._carry_out(request, math.inf)

    def _end(self) -> None:
        for wire in self.wires.values():
            wire.close_daemon()
        self.memory.close(drop=False)

    # ---- queries

    def visible(self) -> set[int]:
        """The keys that readers find."""
        return {number_of(slot.key) for slot in self.memory.index.slots() if slot.published}

    def sound(self) -> set[int]:
        """Those of them that are not damaged, as far as is known. Before its first read, a damaged header may lack the
        parent."""
        damaged = self.world.damaged
        return {
            number_of(slot.key)
            for slot in self.memory.index.slots()
            if slot.published and not (damaged and slot.unverified)
        }

    def waiting(self) -> set[bytes]:
        """Keys of the slots that are unpublished but not yet free. A damaged slot may hold an unknown key."""
        return {slot.key for slot in self.memory.index.slots() if not slot.published}

    def ends_at(self) -> dict[int, float]:
        """The end of each entry's time to live."""
        return {number_of(key): self.expires(row) for key, row in self.parts.table.by_key.items()}

    def hidden(self) -> set[int]:
        """The keys of the entries that wait for a scan's decision."""
        return {number_of(key) for key in self.parts.spans.hidden}

    def check(self) -> None:
        """Asserts the invariants of every core, and that the memory agrees with the cores' state."""
        self.store.check_invariants()
        self.governor.check_invariants()
        status = self.store.status()
        corrupt = status["found_corrupt"]
        assert self.world.damaged or not corrupt, f"found_corrupt is {corrupt}"
        if not self.pages:
            # Reading a page that was given back would allocate the page again.
            blocks = os.stat(segments.SHM_FOLDER / f"tensord.{self.world.instance}.ring").st_blocks
            assert blocks * 512 == status["resident_bytes"], "the ring has pages unknown to the store"

    @property
    def busy(self) -> bool:
        """Whether work is in progress that ends without new input."""
        status = self.store.status()
        under_way = any(status[name] for name in ("claims_held", "sweeps", "retired_bytes"))
        # The store is asked for generations for ever.
        for_ever = (effects.AskGenerations, effects.RaiseGeneration)
        asked = [each for each in self.requests if not isinstance(each, for_ever)]
        queued = self.copier.copies or self.copier.moves or self.pages or asked
        return under_way or bool(queued or self.parts.spans.scanning or self.queues.waiting)

    def holds(self, span_id: int, key: bytes) -> bool:
        """Whether a span is still allocated to `key`."""
        table, slots = self.parts.table, self.parts.slots
        row = table.row_of(span_id)
        if row and table.states[row] != FREE:
            return slots.key(table.slots[row]) == key
        # As the spans of a former daemon that no entry has.
        waiting = self.parts.grants.revoked.get(span_id)
        return waiting is not None and slots.key(waiting.slot) == key
