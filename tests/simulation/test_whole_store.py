"""The whole store under one seed: clients, lanes, late copies, late scans, pressure, and kills of anybody at any event.

Everything that touches shared memory is the real thing: the daemon's segments, its copier (one part at a time, when the
schedule says so), the core, and readers that go through client/view.py with leases in their hands. Only time, sockets
and threads are played. The model is one table: which generation of each key was published last. A hit must give that
one, a lease must go on giving what it gave, and a daemon that is killed must be followed by one that has every entry.

Keys from KEYS on are blocks of cached sequences, of one generation each. No block is there without the one before it,
and a query finds as many as a reader does, but for those that a restarted daemon has not put into its index again.
"""

from __future__ import annotations

import gc
import os
import random
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from tensord.client.inbox import Inbox, Region
from tensord.client.lease import Lease
from tensord.client.view import View
from tensord.daemon.copier import Copier, Job
from tensord.daemon.core.effects import Allocate, Announce, Copy, Forget, Punch, Scan, Send
from tensord.daemon.core.events import (
    Accessed,
    Allocated,
    ClientJoined,
    ClientLeft,
    Copied,
    Event,
    PrefixAsked,
    Pressed,
    Punched,
    Received,
    RingGrown,
    Scanned,
    Tick,
)
from tensord.daemon.core.limits import StoreLimits
from tensord.daemon.core.store import Store
from tensord.daemon.memory import Memory
from tensord.daemon.policy.replacement import by_name
from tensord.errors import NotEnoughMemory, TensordError
from tensord.ipc import messages
from tensord.shm import fence, segments
from tensord.shm.lanes import Lane
from tensord.shm.ring import Ring
from tensord.shm.tree import encode

from ..daemon.core.pieces import TAG, block, name, query, text
from ..memory_bench import key

RING_BYTES: Final = 1 << 16
INBOX_BYTES: Final = 1 << 15
KEYS: Final = 24
SEQUENCES: Final = [words for length in (1, 2, 3) for words in product((1, 2), repeat=length)]
ALL: Final = KEYS + len(SEQUENCES)
HELD_MAX: Final = 5
SEEDS: Final = int(os.environ.get("TENSORD_TEST_SEEDS", "10"))
EVENTS: Final = 2000


def at(number: int) -> bytes:
    """The key of a number."""
    return key(number) if number < KEYS else name(SEQUENCES[number - KEYS])


def payload(number: int, generation: int) -> Any:
    """f(key, generation): one array, or a tree with one; up to a sixth of the ring."""
    array = np.full(64 + (number * 31 + generation * 17) % 1200, number << 32 | generation, np.uint64)
    if number >= KEYS:
        record = np.frombuffer(block(SEQUENCES[number - KEYS]).record, np.uint8)
        return {"prefix": record, "array": array[: 64 + number]}
    return array if number % 2 else {"number": number, "array": array}


def generation_of(number: int, tree: Any) -> int:
    """Which generation of key `number` this is; an AssertionError where it is none."""
    array = tree if number % 2 and number < KEYS else tree["array"]
    assert (array == array[0]).all(), "parts of two entries"
    assert int(array[0]) >> 32 == number, "another key's entry"
    generation = int(array[0]) & 0xFFFFFFFF
    assert array.size == (64 + (number * 31 + generation * 17) % 1200 if number < KEYS else 64 + number)
    return generation


@dataclass(eq=False)
class Client:
    """A process: its view, what it holds, its inbox, and the parts that it has not sent yet."""

    number: int
    view: View
    lane_fd: int
    inbox: Inbox
    connected: bool = True
    held: list[tuple[int, int, Any]] = field(default_factory=list)
    regions: dict[int, Region] = field(default_factory=dict)
    unsent: deque[messages.Part] = field(default_factory=deque)
    putting: dict[int, int] = field(default_factory=dict)


class Simulation:
    def __init__(self, seed: int) -> None:
        fence.register()
        self.chance = random.Random(seed)
        self.instance = f"simulation-{os.getpid()}-{seed}"
        self.policy = self.chance.choice(["lru", "lfu"])
        self.now = 100.0
        self.clients: list[Client] = []
        self.made = 0
        self.requests = 0
        self.generations = 0
        self.sent: dict[tuple[int, int], int] = {}
        self.shown: dict[int, int] = {}
        self.kills = self.hits = self.published = self.matches = 0
        self.matched: messages.Matched
        self.start()

    # ---- the daemon

    def start(self) -> None:
        self.memory = Memory.open(self.instance, RING_BYTES, 64)
        recovered = self.memory.recovered
        limits = StoreLimits(
            ring_bytes=RING_BYTES,
            max_bytes=RING_BYTES,
            max_entries=20,
            object_bytes_max=RING_BYTES // 2,
            put_idle_s=20.0,
            default_ttl_s=self.chance.choice([None, 300.0]),
        )
        ring = Ring(RING_BYTES if recovered else 0)
        self.store = Store(
            self.memory.index,
            ring,
            by_name(self.policy),
            limits,
            self.memory.superblock.epoch,
            1e6,
            read=self.memory.read,
            seed=self.chance.getrandbits(128),
        )
        self.copier = Copier(self.memory.ring, 32, lambda _: None)
        self.copies: deque[Copy] = deque()
        self.scan: frozenset[int] | None = None
        self.scan_asked = False
        self.pages: deque[Punch | Allocate] = deque()
        if recovered:
            self.store.recover(self.memory.found(), self.now, self.memory.missing)
        else:
            self.memory.grow(0, prefault=False)
        self.do(RingGrown(RING_BYTES, more=False))

    def do(self, event: Event) -> None:
        for effect in self.store.handle(event, self.now):
            match effect:
                case Send(number, message):
                    self.receive(number, message)
                case Copy():
                    self.copies.append(effect)
                case Scan():
                    assert not self.scan_asked
                    assert self.scan is None
                    self.scan_asked = True
                case Punch() | Allocate():
                    self.pages.append(effect)
                case Forget(number):
                    self.copier.close_inbox(number)
                case Announce(body):
                    if body["event"] == "put":
                        self.publish(body["client"], bytes.fromhex(body["key"]))

    def publish(self, client: int, key: bytes) -> None:
        number = next(n for n in range(ALL) if at(n) == key)
        self.shown[number] = self.sent[client, number]
        self.published += 1

    def copy(self) -> None:
        """The oldest copy of some put is carried out, or fails."""
        if not self.copies:
            return
        put_id = self.chance.choice(self.copies).put_id
        copy = next(copy for copy in self.copies if copy.put_id == put_id)
        self.copies.remove(copy)
        try:
            copied = self.copier._carry_out(Job(copy))
            assert copied is not None, "more than one turn"
            self.do(copied)
        except TensordError as error:
            self.do(Copied(copy.client, put_id, error=error))

    def move_pages(self, *, short: bool | None = None) -> None:
        """The oldest of what is asked of the system's memory, which has none to give now and then."""
        if not self.pages:
            return
        effect = self.pages.popleft()
        if isinstance(effect, Punch):
            self.memory.punch(effect.offset, effect.size_bytes)
            self.do(Punched(effect.offset))
        elif self.chance.random() < 0.2 if short is None else short:
            self.do(Allocated(effect.offset, NotEnoughMemory("none is to be had")))
        else:
            self.memory.allocate(effect.offset, effect.size_bytes, prefault=False)
            self.do(Allocated(effect.offset))

    def press(self) -> None:
        """The governor says how much may be in memory; mostly that all may."""
        most = self.chance.choice([None, None, RING_BYTES // 2, RING_BYTES // 4 + 1])
        idle_s = self.chance.choice([None, None, None, 5.0])
        self.do(Pressed(most, idle_s, refuse=self.chance.random() < 0.1, reason="the schedule"))

    def look_at_lanes(self) -> None:
        """The scan's two halves, with anything else between them."""
        if self.scan_asked:
            self.scan_asked, self.scan = False, self.memory.pins()
        elif self.scan is not None:
            pinned, self.scan = self.scan, None
            self.do(Scanned(pinned))

    def pass_time(self) -> None:
        self.now += self.chance.choice([0.0, 0.01, 0.1, 3.0])
        timer = self.store.next_timer()
        if timer is not None and timer <= self.now:
            self.do(Tick())
        for lane in self.memory.lanes:
            drained = lane.reader.drain()
            if drained is not None:
                self.do(Accessed(drained.span_ids.tolist(), drained.misses, drained.lost, drained.again))
        self.memory.forget_abandoned()

    def kill_the_daemon(self) -> None:
        """It dies, perhaps in the middle of a copy; the next one finds what it left."""
        self.kills += 1
        if self.copies and self.chance.random() < 0.5:
            copy = self.copies[0]
            self.memory.ring[copy.ring_offset : copy.ring_offset + copy.part_bytes // 2] = 0xEE
        before = self.visible()
        # A killed process' descriptors and mappings go, and nothing else happens.
        self.memory.close(drop=False)
        del self.memory, self.store, self.copier
        gc.collect()
        for client in self.clients:
            client.connected = False
        assert self.visible() == before, "readers need no daemon"
        self.start()
        assert self.visible() == before, "a committed entry was lost"
        # Some processes attach again with the lane they had, others are slow, or never do.
        for client in self.clients:
            if self.chance.random() < 0.7:
                self.attach(client)

    def visible(self) -> dict[int, int]:
        """The generations that a reader finds now."""
        slots = (slot for slot in self.memory.index.slots() if slot.published) if hasattr(self, "memory") else None
        if slots is not None:
            keys = {slot.key for slot in slots}
            self.last_keys = {n for n in range(ALL) if at(n) in keys}
            shown = {SEQUENCES[n - KEYS] for n in self.last_keys if n >= KEYS}
            assert all(len(words) == 1 or words[:-1] in shown for words in shown), "without the block before it"
        return {n: self.shown[n] for n in self.last_keys}

    # ---- clients

    def join(self) -> None:
        if sum(client.connected for client in self.clients) < 4:
            self.made += 1
            lane_id, fds = self.lend(self.made, None)
            view = View.open(fds[0], fds[1], Lane(fds[2]))
            assert view.lane.lane_id == lane_id
            client = Client(self.made, view, fds[2], Inbox(INBOX_BYTES))
            self.clients.append(client)
            self.greet(client)

    def lend(self, number: int, brought: int | None) -> tuple[int, list[int]]:
        return self.memory.lend_lane(number, fenced=True, brought=brought)

    def greet(self, client: Client) -> None:
        self.do(ClientJoined(client.number, 1000, "simulated"))
        self.copier.open_inbox(client.number, client.inbox.fd, INBOX_BYTES, 1 << 30)
        client.connected = True

    def attach(self, client: Client) -> None:
        """A process that lost its connection comes back, as another client with the lane it had."""
        self.made += 1
        client.number = self.made
        lane_id, fds = self.lend(self.made, client.lane_fd)
        assert lane_id == client.view.lane.lane_id
        os.close(fds[2])
        # What was under way is lost to it: a whole commit may still be carried out, from the old inbox.
        client.inbox.close()
        client.inbox = Inbox(INBOX_BYTES)
        client.regions, client.unsent, client.putting = {}, deque(), {}
        self.greet(client)

    def some(self, *, connected: bool) -> Client | None:
        there = [client for client in self.clients if client.connected or not connected]
        return self.chance.choice(there) if there else None

    def lose_connection(self) -> None:
        """The socket closes; the process and its leases live on, and perhaps it comes back."""
        client = self.some(connected=True)
        if client is not None:
            self.leave(client)
            if self.chance.random() < 0.6:
                self.attach(client)

    def leave(self, client: Client) -> None:
        client.connected = False
        self.memory.orphan(client.number)
        self.do(ClientLeft(client.number))

    def kill_a_client(self) -> None:
        """Its descriptors and mappings go, and with the last of them the lock on its lane."""
        client = self.some(connected=False)
        if client is not None and self.chance.random() < 0.5:
            self.clients.remove(client)
            client.held.clear()
            os.close(client.lane_fd)
            client.inbox.close()
            if client.connected:
                self.leave(client)

    def put(self) -> None:
        client = self.some(connected=True)
        number = self.chance.randrange(ALL)
        if client is None:
            return
        if number >= KEYS and self.chance.random() < 0.8:
            # Mostly from where the sequence is missing, as those do who want it stored.
            words = SEQUENCES[number - KEYS]
            while len(words) > 1 and not client.view.contains(name(words[:-1])):
                words = words[:-1]
            number = KEYS + SEQUENCES.index(words)
        if number in client.putting:
            return
        self.generations += number < KEYS
        generation = self.generations if number < KEYS else 0
        image = encode(payload(number, generation))
        region = client.inbox.take(image.image_bytes, 0.0)
        if region is None or region.memory is None:
            return
        image.write_into(region.memory)
        self.requests += 1
        request = self.requests
        client.regions[request] = region
        client.putting[number] = request
        self.sent[client.number, number] = generation
        parts = self.chance.randrange(1, 4)
        cuts = [image.image_bytes * i // parts for i in range(parts + 1)]
        commit = messages.Commit(request, at(number), image.image_bytes, len(image.header), number)
        if number >= KEYS:
            piece = block(SEQUENCES[number - KEYS]).piece
            commit = msgspec.structs.replace(commit, prefix_bytes=piece.record_bytes, follows=piece.parent)
        client.unsent += [
            messages.Part(request, region.offset + low, high - low, high == image.image_bytes)
            for low, high in pairwise(cuts)
        ]
        self.do(Received(client.number, commit))

    def send_part(self) -> None:
        client = self.some(connected=True)
        if client is not None and client.unsent:
            self.do(Received(client.number, client.unsent.popleft()))

    def receive(self, number: int, message: messages.Message) -> None:
        client = next((c for c in self.clients if c.number == number and c.connected), None)
        if isinstance(message, messages.Matched):
            self.matched = message
        if client is not None and isinstance(message, messages.Committed):
            region = client.regions.pop(message.id)
            region.release()
            client.putting = {n: request for n, request in client.putting.items() if request != message.id}
            client.unsent = deque(part for part in client.unsent if part.id != message.id)

    def ask(self) -> None:
        client = self.some(connected=True)
        if client is None:
            return
        self.requests += 1
        number = self.chance.randrange(ALL)
        request: Any = self.chance.choice(
            [
                messages.Evict(self.requests, [at(number)]),
                messages.Touch(self.requests, [at(number)]),
                messages.Pin(self.requests, at(number), 5.0),
                messages.Unpin(self.requests, at(number)),
                messages.Limit(self.requests, self.chance.choice([RING_BYTES, RING_BYTES, RING_BYTES // 2])),
                messages.Invalidate(self.requests, b"other ns", 0),
                messages.Clear(self.requests, None if self.chance.random() < 0.1 else b"other ns"),
            ]
        )
        self.do(Received(client.number, request))

    def match(self) -> None:
        """What the index says is cached of a sequence is what a reader finds of it."""
        client = self.some(connected=True)
        if client is None:
            return
        words = self.chance.choice(SEQUENCES)
        tokens = np.append(text(words), np.uint32(999_999))
        self.requests += 1
        message = messages.MatchPrefix(self.requests, TAG, 0, query(tokens).record_bytes)
        self.do(PrefixAsked(client.number, message, query(tokens), tokens))
        blocks = [name(words[: end + 1]) for end in range(len(words))]
        there = [key for key in blocks if client.view.contains(key)]
        assert self.matched.blocks == blocks[: len(self.matched.blocks)]
        assert len(self.matched.blocks) <= len(there)
        assert self.matched.blocks == there or self.store.memory.sequences.rebuilding
        self.matches += bool(there)

    def read(self) -> None:
        """By any of the ways, connected or not; some of what is found is held."""
        client = self.some(connected=False)
        if client is None:
            return
        numbers = [self.chance.randrange(ALL) for _ in range(4)]
        way = self.chance.choice(["get", "verified", "get_many"])
        leases: list[Lease | None]
        if way == "get_many":
            leases = list(client.view.get_many(np.frombuffer(b"".join(map(at, numbers)), np.uint8).reshape(-1, 32)))
        else:
            leases = [getattr(client.view, way)(at(number)) for number in numbers]
        for number, lease in zip(numbers, leases, strict=True):
            assert client.view.contains(at(number)) == (lease is not None)
            if lease is not None:
                self.hits += 1
                generation = generation_of(number, lease.tree)
                assert generation == self.shown[number], "a stale entry"
                client.held.append((number, generation, lease.tree))
        while len(client.held) > HELD_MAX:
            self.let_go(client)

    def let_go(self, client: Client | None = None) -> None:
        client = client or self.some(connected=False)
        if client is not None and client.held:
            number, generation, tree = client.held.pop(self.chance.randrange(len(client.held)))
            assert generation_of(number, tree) == generation, "a lease has changed"

    # ---- the schedule

    def run(self, events: int) -> None:
        actions = {
            self.put: 30,
            self.send_part: 40,
            self.copy: 40,
            self.look_at_lanes: 20,
            self.read: 30,
            self.match: 25,
            self.let_go: 20,
            self.pass_time: 10,
            self.ask: 12,
            self.press: 1,
            self.move_pages: 25,
            self.join: 4,
            self.lose_connection: 1,
            self.kill_a_client: 1,
            self.kill_the_daemon: 0.8,
        }
        for turn in range(events):
            [action] = self.chance.choices([*actions], [*actions.values()])
            action()
            if not turn % 20:
                self.check()

    def check(self) -> None:
        self.store.check_invariants()
        status = self.store.status()
        assert status["evicted_while_pinned"] == 0
        if not self.pages:
            # Whoever only looked at a page that was given back would have had it made again.
            blocks = os.stat(segments.SHM_FOLDER / f"tensord.{self.instance}.ring").st_blocks
            assert blocks * 512 == status["resident_bytes"], "pages are there that the store knows nothing of"
        for client in self.clients:
            for number, generation, tree in client.held:
                assert generation_of(number, tree) == generation, "a lease has changed"

    def settle(self) -> None:
        """Nobody does anything new; what is under way comes to its end."""
        for _ in range(200):
            while self.copies or self.pages:
                self.copy()
                self.move_pages(short=False)
            for _ in range(2):
                self.look_at_lanes()
            self.now += 1.0
            self.pass_time()

    def finish(self) -> None:
        self.check()
        while self.clients:
            self.kill_a_client()
        gc.collect()
        self.settle()
        self.join()
        self.requests += 1
        self.do(Received(self.clients[0].number, messages.Clear(self.requests)))
        self.do(Received(self.clients[0].number, messages.Limit(self.requests + 1, RING_BYTES)))
        self.do(Pressed())
        self.settle()
        assert self.store.memory.ring.used_bytes == 0, "ring memory leaked"
        assert self.store.status()["resident_bytes"] == RING_BYTES, "pressure is gone, and not all is back"
        assert len(self.memory.lanes) == 1, "a lane leaked"
        self.store.check_invariants()

    def close(self) -> None:
        for client in self.clients:
            os.close(client.lane_fd)
            client.inbox.close()
        self.clients.clear()
        if hasattr(self, "memory"):
            self.memory.close(drop=True)
        for segment in segments.existing(self.instance):
            segments.remove(segment)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_under_one_seed_nothing_wrong_is_shown_nothing_is_lost_and_nothing_leaks(seed: int) -> None:
    simulation = Simulation(seed)
    try:
        simulation.run(EVENTS)
        assert simulation.hits > 30
        assert simulation.published > 10
        assert simulation.matches > 0
        assert simulation.kills > 0
        simulation.finish()
    finally:
        simulation.close()
