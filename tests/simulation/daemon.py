"""The daemon of a simulated host: the real memory, cores and copier, one action at a time.

The sockets, the threads and the clock are simulated. Copies, scans and page changes wait in queues until the schedule
runs them. Any other action may come first.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, assert_never

from tensord.client.core.lease import lease_over
from tensord.daemon.actors.lanes import LaneJobs
from tensord.daemon.actors.remote import RemoteThreads, Request
from tensord.daemon.copier import Copier, CopyJob
from tensord.daemon.core import effects, events
from tensord.daemon.claims.claims import NOBODY
from tensord.daemon.core.entries import SpanEntry
from tensord.daemon.core.governor import events as governor_events
from tensord.daemon.core.governor.governor import Governor
from tensord.daemon.core.host_memory import HostHolds, Pressed
from tensord.daemon.core.store import Store
from tensord.daemon.policy.registry import by_name
from tensord.daemon.segments import Segments
from tensord.errors import NotEnoughMemory, TensordError
from tensord.ipc import messages
from tensord.ipc.modes import HOST_GAUGE, Tier
from tensord.shm import segments
from tensord.shm.allocator import SpanAllocator
from tensord.shm.layout import SPAN_HEADER_BYTES
from tensord.shm.prefix import PrefixRecord
from tensord.shm.recipe import recipe

from .payloads import TAGS, number_of, version_of
from .settings import Settings
from .wire import Wire

if TYPE_CHECKING:
    from .world import World

GPU = "gpu"
FAR_FUTURE_S = 1e12
"""The Unix time at 0 for the remote store, so that no entry's time is over by the machine's clock."""
_MIB = 1 << 20


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
        self.store = Store(
            self.memory.index,
            SpanAllocator(self.memory.ready_bytes),
            by_name(settings.policy),
            settings.store_limits(ring_bytes),
            self.memory.superblock.epoch,
            1e6 + chance.choice([0.0, 0.0, 90_000.0, -90_000.0]),  # the wall clock was stepped
            read=self.memory.read,
            seed=chance.getrandbits(128),
        )
        self.governor = Governor(settings.governor_limits())
        self.copier = Copier(self.memory.ring, 32, lambda _: None)
        self.jobs: deque[Iterator[None]] = deque()
        self.lanes = LaneJobs(
            self.memory,
            clock=lambda: world.now,
            handle=self.do,
            begin=self.jobs.append,
            hit_took=lambda took_s: None,
            report=lambda fenced: self.lanes.fenced(fenced),
        )
        # Its threads are never started: the schedule carries its requests out.
        self.remote = RemoteThreads(
            world.remote,
            self.memory.ring,
            self.copier.finish,
            self.remote_answered,
            1.0,
            clock=lambda: world.now,
            unix_at_zero=lambda: FAR_FUTURE_S,
        )
        self.requests: deque[Request] = deque()
        """Requests of the remote store that are under way."""
        self.wires: dict[int, Wire] = {}
        self.copies: deque[CopyJob] = deque()
        self.moves: deque[CopyJob] = deque()
        self.pages: deque[effects.Punch | effects.Allocate] = deque()
        self.scrubbed: tuple[int, int] | None = None
        self.matched: messages.Matched | None = None
        self.answered: int | None = None
        if recovered:
            self.store.recover(self.memory.found(), world.now, self.memory.missing)
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
                case effects.Copy() if effect.client == NOBODY:
                    self.requests.append(effect)
                case effects.Copy() | effects.Seal():
                    self.copies.append(CopyJob(effect))
                case effects.Move():
                    self.moves.append(CopyJob(effect))
                case effects.WriteExpiry(offset, expires_s):
                    self.memory.write_expiry(offset, expires_s)
                case effects.Drain():
                    self.lanes.drain()
                case effects.Scan():
                    self.lanes.scan()
                case effects.Punch() | effects.Allocate():
                    self.pages.append(effect)
                case HostHolds():
                    self.govern(effect)
                case effects.Forget(number):
                    self.copier.close_inbox(number)
                case effects.Discard(number, put_id):
                    self.copier.discard(number, put_id)
                case effects.Announce(body):
                    self._announce(body)
                case effects.Again(number, message, counted):
                    self.do(events.Received(number, message, counted))
                case effects.Seek() | effects.SeekRun() | effects.SaveRemote() | effects.RemoveRemote():
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
        self.answered = getattr(message, "id", None)
        self.wires[number].answer(message)

    def _announce(self, body: dict[str, Any]) -> None:
        self.world.say("announced", **body)
        if body["event"] not in ("put", "fetch"):
            self.world.model.announced(body, self.world.now)
            return
        key = bytes.fromhex(body["key"])
        entries = self.store.memory.entries
        entry = entries.find(key) or entries.hidden(key)
        assert entry is not None, "a published key has no entry"
        number = number_of(key)
        ends_at = entry.created_at + (math.inf if entry.ttl_s is None else entry.ttl_s)
        self.world.fetches += body["event"] == "fetch"
        self.world.model.publish(number, version_of(number, self.tree(entry)), ends_at)

    def tree(self, entry: SpanEntry) -> Any:
        """The payload of an entry as it stands in the ring."""
        start = entry.offset + SPAN_HEADER_BYTES
        header = self.memory.ring[start : start + entry.tree_bytes].tobytes()
        return lease_over(self.memory.ring, start, entry.payload_bytes, recipe(header)).tree

    # ---- clients

    def join(self, wire: Wire, brought: int | None) -> list[int]:
        """Attaches a client. `brought`: its previous lane's descriptor. Returns those of ring, index and lane."""
        self.wires[wire.number] = wire
        self.do(events.ClientJoined(wire.number, 1000 + wire.number % 2, "simulated", writes=True))
        self.govern(governor_events.GovernorClientJoined(wire.number, "simulated", wire.number))
        if brought is not None and not self.memory.has_lane_for(brought):
            brought = None
        return self.memory.lend_lane(wire.number, fenced=True, brought=brought)[1]

    def hear(self, wire: Wire) -> None:
        """Handles the next message of one connection, or its end."""
        if not wire.up:
            if not wire.client_open:
                self.hang_up(wire)
            return
        message, fds = wire.up.popleft()
        self.world.say("heard", client=wire.number, message=message)
        try:
            self._hear(wire.number, message, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _hear(self, number: int, message: Any, fds: list[int]) -> None:
        match message:
            case messages.OpenInbox():
                try:
                    self.copier.open_inbox(number, fds[0], message.inbox_bytes, 1 << 30, 0, message.inbox, 16)
                except TensordError as error:
                    self._answer(number, messages.Error.of(error, message.id))
                else:
                    self._answer(number, messages.Done(message.id))
            case messages.CloseInbox():
                self.copier.close_inbox(number, message.inbox)
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
            case messages.StoreRequest():
                self.do(events.Received(number, message))
            case _:
                self.govern(governor_events.GovernorReceived(number, message))

    def _touched(self, message: messages.Touch) -> None:
        for key in message.keys:
            entry = self.store.memory.entries.find(key)
            if entry is not None and entry.ttl_s is not None:
                self.world.model.touched(number_of(key), self.world.now + entry.ttl_s)

    def look_at_generations(self) -> None:
        """Records the current generations in the model."""
        for tag in TAGS:
            self.world.model.invalidated(tag, self.memory.index.generations.current(tag))

    def hang_up(self, wire: Wire) -> None:
        """Ends a connection from the daemon's side."""
        wire.close_daemon()
        del self.wires[wire.number]
        self.memory.orphan(wire.number)
        self.do(events.ClientLeft(wire.number))
        self.govern(governor_events.GovernorClientLeft(wire.number))

    def match(
        self, number: int, message: messages.MatchPrefix, query: PrefixRecord, tokens: Any
    ) -> messages.Matched | None:
        """The answer to a prefix query; None if the store refused it."""
        self.matched = None
        self.do(events.PrefixAsked(number, message, query, tokens))
        return self.matched

    # ---- deferred work

    def copy(self) -> None:
        """Runs one turn of a random client's oldest copy. The turn may complete the copy or fail."""
        if not self.copies:
            return
        client = self.world.chance.choice(self.copies).client
        job = next(job for job in self.copies if job.client == client)
        assert not isinstance(job.part, effects.Move)
        copied = self.copier._outcome(job)
        self.world.say("copied", put=job.part.put_id, copied_bytes=job.copied_bytes, done=copied is not None)
        if copied is not None:
            self.copies.remove(job)
            self.do(copied)

    def ask_remote(self) -> None:
        """The remote store answers one of its requests."""
        if self.requests:
            request = self.world.chance.choice(self.requests)
            self.requests.remove(request)
            self.world.say("remote", request=request)
            self.remote._carry_out(request, math.inf)

    def move(self) -> None:
        """Runs one turn of moving a span to another place."""
        if not self.moves:
            return
        job = self.world.chance.choice(self.moves)
        moved = self.copier._outcome(job)
        if moved is not None:
            assert isinstance(moved, events.Moved) and moved.error is None, moved
            self.world.say("moved", span=moved.number)
            self.moves.remove(job)
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
        """Checks a recovered entry. Records the result a step later, if the slot still holds the same span."""
        if self.scrubbed is not None:
            number, span_id = self.scrubbed
            self.scrubbed = None
            slot = self.memory.index.read(number)
            if slot.published and slot.span_id == span_id:
                self.memory.index.mark(number, unverified=False)
        elif unverified := [slot for slot in self.memory.index.slots() if slot.published and slot.unverified]:
            slot = self.world.chance.choice(unverified)
            if not self.memory.is_sound(slot):
                assert self.world.damaged, "a recovered entry differs from the stored one"
                self.do(events.FoundCorrupt(slot.span_id))
                return
            self.scrubbed = slot.number, slot.span_id

    def keep_time(self) -> None:
        """Starts the jobs on lanes that are due: log reads, counts of holders, removal of lanes without holders."""
        self.lanes.keep_time(self.world.now)

    def tick(self) -> None:
        """Handles the timers that are due."""
        timer = self.store.next_timer()
        if timer is not None and timer <= self.world.now:
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
        copy = self.copies[0].part if self.copies else None
        if isinstance(copy, effects.Copy) and self.world.chance.random() < 0.5:
            self.memory.ring[copy.ring_offset : copy.ring_offset + copy.part_bytes // 2] = 0xEE
        for request in self.requests:
            if isinstance(request, effects.Copy):
                # A read of the remote store has come so far. It begins with the object's header.
                start = request.payload_offset - SPAN_HEADER_BYTES
                self.memory.ring[start : start + SPAN_HEADER_BYTES + request.part_bytes // 2] = 0xEE
        self._end()

    def stop(self) -> None:
        """Ends the daemon as SIGTERM does: connections close, and requested copies are completed."""
        if self.world.chance.random() < 0.5:
            self.finish_copies()
        for wire in list(self.wires.values()):
            self.hang_up(wire)
        self.finish_copies()
        self._end()

    def finish_copies(self) -> None:
        """Completes all requested copies and moves."""
        while self.copies or self.moves:
            self.copy()
            self.move()
        for request in [each for each in self.requests if isinstance(each, effects.Copy)]:
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

    def waiting(self) -> set[bytes]:
        """Keys of the slots that are unpublished but not yet free. A damaged slot may hold an unknown key."""
        return {slot.key for slot in self.memory.index.slots() if not slot.published}

    def ends_at(self) -> dict[int, float]:
        """The end of each entry's time to live."""
        return {number_of(e.key): math.inf if e.expires_at is None else e.expires_at for e in self.store.memory.entries}

    def hidden(self) -> set[int]:
        """The keys of the entries that wait for a scan's decision."""
        memory = self.store.memory
        return {number_of(e.key) for e in memory.unpublished() if memory.entries.hidden(e.key) is e}

    def check(self) -> None:
        """Asserts the invariants of every core, and that the memory agrees with the cores' state."""
        self.store.check_invariants()
        self.governor.check_invariants()
        status = self.store.status()
        found = status["found_corrupt"]
        assert self.world.damaged or not found, f"{found} entries were found corrupt"
        if not self.pages:
            # Reading a page that was given back would allocate the page again.
            blocks = os.stat(segments.SHM_FOLDER / f"tensord.{self.world.instance}.ring").st_blocks
            assert blocks * 512 == status["resident_bytes"], "the ring has pages unknown to the store"

    @property
    def busy(self) -> bool:
        """Whether work is in progress that ends without new input."""
        status = self.store.status()
        under_way = any(status[name] for name in ("puts_in_flight", "claims_held", "sweeps", "retired_bytes"))
        # The store is asked for generations for ever.
        for_ever = (effects.AskGenerations, effects.RaiseGeneration)
        asked = [each for each in self.requests if not isinstance(each, for_ever)]
        queued = self.copies or self.moves or self.pages or asked
        return under_way or bool(queued or self.store.memory.scan_in_flight)

    def holds(self, span_id: int, key: bytes) -> bool:
        """Whether a span is still allocated to `key`."""
        entry = self.store.memory.spans.find(span_id)
        return entry is not None and entry.key == key
