"""A simulated host under one seed: at most one daemon, a few processes, a clock and a random schedule of actions.

Shared memory is real, and so is all code that accesses it. Time, sockets, threads and gauges are simulated. All random
choices come from the seed, so a seed is a reproducible test. `trace` receives a line for each step.

Invariants at every step: a payload that a reader finds is f(key, version) of the version published last. A held payload
does not change, and its span belongs to no other entry. A stored entry stays until the daemon announces its removal.
The invariants of every core hold.
"""

from __future__ import annotations

import gc
import os
import random
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import numpy as np

from tensord.client.reading.lease import Lease
from tensord.client.reading.view import View
from tensord.client.writing import arena, outcomes, put, puts
from tensord.client.writing.wire import Wire
from tensord.daemon.core.host_memory import Pressed
from tensord.daemon.governor.forms.events import FormerDaemonFound
from tensord.daemon.memory import copier
from tensord.daemon.room import lending
from tensord.errors import Corrupt, TensordError
from tensord.ipc.messages import control as messages
from tensord.shm.lanes import fence
from tensord.shm.payloads.packing import Packed, Whole
from tensord.shm.ring import segments

from .daemon import GPU, Daemon
from .model import Model
from .payloads import ALL, SEQUENCES, TAGS, asked, at, before, blocks, is_block, number_of, tag_of
from .process import Process
from .remote import SimulatedStore
from .settings import drawn, redrawn

PIECE_BYTES: Final = 512
"""Bytes that a client copies at once."""
TURN_BYTES: Final = 1024
"""Bytes that the copier copies in one turn; 4 MiB in daemon/memory/copier.py."""
SMALL_BYTES: Final = 1024
"""Payloads up to this size are copied at once, and summed by their client; 128 KiB in daemon/memory/copier.py and
client/writing/put.py."""
SHARE: Final = 8
"""The part of the ring that one request may ask for, and that one client may have unused; 256 in client/writing/puts.py
and daemon/room/lending.py."""
PROCESSES_MAX: Final = 4
CHECK_EVERY: Final = 10
TEMPER: Final = (0.2, 0.5, 1.0, 1.0, 1.0, 2.0)
"""Factors for the weight of an action."""

Trace = Callable[[str], None]
Actions = tuple[list[Callable[[], None]], list[float]]


class World:
    """The host of one seed. Call `run`, then `finish`, and `close` in any case."""

    def __init__(self, seed: int, trace: Trace | None = None) -> None:
        fence.register()
        self.seed = seed
        self.chance = random.Random(seed)
        self.trace = trace
        self.instance = f"simulation-{os.getpid()}-{seed}"
        self.now = 100.0
        self.step = 0
        self.model = Model()
        self.settings = drawn(self.chance)
        self.waiting: set[bytes] = set()
        """Keys of the slots that were unpublished but not yet free when the last daemon ended."""
        self.damaged = False
        """Whether reads may find entries corrupt or miss them."""
        self.lane_words = self.chance.choice([3, 24, 24])
        self.processes: list[Process] = []
        self.daemon: Daemon | None = None
        self.remote = SimulatedStore(self.chance)
        self.fetches = 0
        self.hits = self.kills = self.forks = self.matches = self.reattached = 0
        self._clients = self._made = self._versions = 0
        self._depth = 0
        self._patches = self._patched()
        for patch in self._patches:
            patch.start()
        foreground: dict[Callable[[], None], float] = {
            self.put: 60,
            self.read: 30,
            self.let_go: 12,
            self.match: 8,
            self.ask: 8,
            self.claim: 8,
            self.use_device: 6,
            self.wait: 6,
            self.learn: 4,
            self.join: 4,
        }
        background: dict[Callable[[], None], float] = {
            self.hear: 60,
            self.receive: 40,
            self.rest: 2,
            self.of_daemon(Daemon.turn): 40,
            self.of_daemon(Daemon.doze): 10,
            self.of_daemon(Daemon.copy): 40,
            self.of_daemon(Daemon.move): 30,
            self.of_daemon(Daemon.ask_remote): 20,
            self.remote_changes: 0.5,
            self.of_daemon(Daemon.work): 30,
            self.of_daemon(Daemon.move_pages): 14,
            self.of_daemon(Daemon.keep_time): 8,
            self.of_daemon(Daemon.scrub): 4,
            self.of_daemon(Daemon.press): 1,
            self.of_daemon(Daemon.sample): 4,
            self.pass_time: 12,
            self.attach: 16,
            self.reload: 1,
            self.lose_connection: 1.5,
            self.fork: 1.2,
            self.kill_a_process: 1,
            self.close_a_client: 0.5,
            self.end_the_daemon: 1,
            self.start_the_daemon: 12,
        }
        # Each seed draws its own weights: a slow copier, a busy daemon, many forks.
        weights = {act: weight * self.chance.choice(TEMPER) for act, weight in {**foreground, **background}.items()}
        self._all = _weighted(weights)
        self._background = _weighted({act: weights[act] for act in background})

    # ---- the schedule

    def run(self, steps: int) -> None:
        """Starts a daemon and three processes, plays `steps` actions, and checks the host every CHECK_EVERY steps."""
        self.start_the_daemon()
        for _ in range(3):
            self.join()
        for self.step in range(steps):
            self._act(self._all)
            if not self.step % CHECK_EVERY:
                self.check()

    def meanwhile(self) -> None:
        """Plays some background actions while a process is in the middle of a call."""
        if not self._depth and self.chance.random() < 0.5:
            self._depth += 1
            for _ in range(self.chance.choice([1, 2, 4, 12])):
                self._act(self._background)
            self._depth -= 1

    def _patched(self) -> list[Any]:
        """Patches that play actions while a client waits and between the pieces of its copies, and sizes for small
        rings."""
        chance, clock = self.chance, SimpleNamespace(monotonic=lambda: self.now)

        def wait_for_bell(wire: Wire, seen: int, timeout_s: float) -> None:
            for _ in range(chance.choice([1, 4, 16, 60])):
                self.meanwhile()
                if wire.bells != seen:
                    return
            self.now += min(timeout_s, chance.choice([0.01, 0.1, 1.0]))

        def slowly(write: Callable[[Any, memoryview, int], None]) -> Callable[[Any, memoryview, int], None]:
            def written(payload: Any, memory: memoryview, start: int) -> None:
                whole = memoryview(bytearray(payload.payload_bytes))
                write(payload, whole, 0)
                for low in range(0, len(whole), PIECE_BYTES):
                    piece = whole[low : low + PIECE_BYTES]
                    memory[start + low : start + low + len(piece)] = piece
                    for _ in range(chance.choice([0, 1, 1, 4])):
                        self.meanwhile()

            return written

        return [
            *(mock.patch.object(module, "time", clock) for module in (arena, outcomes, puts)),
            # Time passes while a client waits, and not while it looks.
            mock.patch.object(outcomes, "LOOK_S", 0.0),
            mock.patch.object(Wire, "wait_for_bell", wait_for_bell),
            mock.patch.object(Packed, "write", slowly(Packed.write)),
            mock.patch.object(Whole, "write", slowly(Whole.write)),
            # What other threads do is done in place.
            mock.patch.object(puts, "aside", lambda work: work()),
            mock.patch.object(puts, "later", lambda work: work()),
            mock.patch.object(copier, "TURN_BYTES", TURN_BYTES),
            mock.patch.object(copier, "SMALL_BYTES", SMALL_BYTES),
            mock.patch.object(put, "CHECKED_BYTES_MAX", SMALL_BYTES),
            mock.patch.object(puts, "SHARE", SHARE),
            mock.patch.object(lending, "CLIENT_SHARE", SHARE),
            mock.patch.object(lending, "ALL_SHARE", 2),
        ]

    def _act(self, actions: Actions) -> None:
        [action] = self.chance.choices(actions[0], cum_weights=actions[1])
        action()

    def say(self, what: str, **fields: object) -> None:
        """Writes one line of the trace."""
        if self.trace is not None:
            self.trace(f"{self.step:4} {self.now:7.2f} {'  ' * self._depth}{what} {fields or ''}")

    def next_client(self) -> int:
        """The number of a new connection."""
        self._clients += 1
        return self._clients

    def of_daemon(self, act: Callable[[Daemon], None]) -> Callable[[], None]:
        """An action that calls `act` with the daemon, if there is one."""

        def action() -> None:
            if self.daemon is not None:
                act(self.daemon)

        return action

    def some(self, *, connected: bool = False, seeing: bool = False) -> Process | None:
        """A random process, on request one with a connection or with a view; None if there is none."""
        there = [
            process
            for process in self.processes
            if (process.wire is not None or not connected) and (process.view is not None or not seeing)
        ]
        return self.chance.choice(there) if there else None

    def number(self, process: Process, names: int = ALL) -> int:
        """Draws a key at the generation of its namespace that the process knows."""
        number = self.chance.randrange(names)
        return number + ALL * process.eras[tag_of(number)]

    # ---- the daemon

    def start_the_daemon(self) -> None:
        """Starts a daemon on the memory of its predecessor. Asserts that it finds every entry."""
        if self.daemon is not None:
            return
        self.settings = redrawn(self.chance, self.settings)
        self.say("daemon starts", settings=self.settings)
        self.daemon = Daemon(self, self.settings)
        self.daemon.govern(FormerDaemonFound())
        self.daemon.sample()
        # A smaller ring hides some entries until a scan decides about them.
        before, left = self.model.expect(), self.daemon.visible() | self.daemon.hidden()
        assert left == before, f"the restart lost keys {before - left} and brought back {left - before}"
        self.daemon.look_at_generations()

    def start_after_damage(self) -> None:
        """Starts a daemon on damaged memory. The model takes over the entries that the daemon finds.

        Raises:
            TensordError: the daemon refuses to start.
        """
        self.damaged = True
        self.daemon = Daemon(self, self.settings)
        left = self.daemon.visible()
        self.model.there = {number: version for number, version in self.model.there.items() if number in left}
        self.model.ends_at |= self.daemon.ends_at()
        self.model.eras = {tag: self.daemon.memory.index.generations.current(tag) for tag in self.model.eras}
        # A damaged sequence word may publish a removed entry again that still waited for its scan. Its bytes are
        # intact.
        returned = {number for number in left - self.model.there.keys() if at(number) in self.waiting}
        self.model.there |= {number: max(self.model.stored[number]) for number in returned}
        assert left == self.model.there.keys(), f"keys {left - self.model.there.keys()} were never put"

    def end_the_daemon(self) -> None:
        """Ends the daemon by SIGKILL or SIGTERM."""
        daemon = self.daemon
        if daemon is None:
            return
        killed = self.chance.random() < 0.7
        self.say("daemon is killed" if killed else "daemon stops")
        self.kills += 1
        (daemon.kill if killed else daemon.stop)()
        self.model.restarted(daemon.visible())
        self.waiting = daemon.waiting()
        self.daemon = None
        del daemon
        gc.collect()

    def reload(self) -> None:
        """Reloads the daemon's settings, as SIGHUP does."""
        if self.daemon is not None:
            settings = redrawn(self.chance, self.daemon.settings)
            self.say("daemon reloads", settings=settings)
            self.daemon.reload(settings)

    def pass_time(self) -> None:
        self.now += self.chance.choice([0.0, 0.01, 0.1, 3.0])
        if self.daemon is not None:
            self.daemon.tick()

    def remote_changes(self) -> None:
        """Something happens to the remote store."""
        self.remote.change(TAGS)

    def hear(self) -> None:
        """The daemon handles the next message of one connection."""
        if self.daemon is not None:
            wires = [wire for wire in self.daemon.wires.values() if wire.up or not wire.client_open]
            if wires:
                self.daemon.hear(self.chance.choice(wires))

    # ---- processes

    def join(self) -> None:
        """Adds a new process and attaches it."""
        if len(self.processes) < PROCESSES_MAX:
            process = self._made_process()
            self.processes.append(process)
            process.attach()

    def _made_process(self) -> Process:
        self._made += 1
        return Process(self, self._made)

    def attach(self) -> None:
        process = self.some()
        if process is not None and process.wire is None:
            process.attach()
            self.reattached += process.wire is not None
            self.say("attached", process=process.number, connected=process.wire is not None)

    def receive(self) -> None:
        waiting = [process for process in self.processes if process.wire is not None and process.wire.news]
        if waiting:
            self.chance.choice(waiting).receive()

    def lose_connection(self) -> None:
        """Closes either side of a connection. Messages in transit to that side are lost."""
        process = self.some(connected=True)
        if process is None or process.wire is None:
            return
        wire = process.wire
        self.say("connection lost", client=wire.number)
        if self.chance.random() < 0.5:
            wire.close_client()
        elif self.daemon is not None and wire.number in self.daemon.wires:
            self.daemon.hang_up(wire)

    def fork(self) -> None:
        """Forks a process. Both processes go on; the child may attach."""
        process = self.some()
        if process is not None and len(self.processes) < 2 * PROCESSES_MAX:
            self.forks += 1
            self._made += 1
            child = process.fork(self._made)
            self.say("forked", process=process.number, child=child.number, holds=len(child.held))
            self.processes.append(child)

    def kill_a_process(self) -> None:
        process = self.some()
        if process is not None and not self._depth and (self.chance.random() < 0.5 or len(self.processes) > 4):
            self.say("killed", process=process.number)
            self.processes.remove(process)
            process.die()

    def close_a_client(self) -> None:
        process = self.some(connected=True)
        if process is not None and not self._depth:
            self.say("closed", process=process.number)
            process.close()

    def put(self) -> None:
        process = self.some(connected=True)
        if process is None:
            return
        if self.chance.random() < 0.15:
            numbers = {self.number(process) for _ in range(4)}
            self._put_many(process, sorted(n for n in numbers if not is_block(n) and before(n) is None))
            return
        path = [self.number(process)]
        if process.view is not None and self.chance.random() < 0.8:
            # In most cases begin at the first missing entry, as a client does that stores a sequence.
            while (parent := before(path[0])) is not None and not process.view.contains(at(parent)):
                path.insert(0, parent)
        claim = None
        if process.claims and self.chance.random() < 0.7:
            claim, number = self.chance.choice([*process.claims.items()])
            del process.claims[claim]
            path = [number]
        # Some put all that is missing, without waiting.
        for number in path if self.chance.random() < 0.3 else path[:1]:
            self._put(process, number, claim)

    def _put(self, process: Process, number: int, claim: int | None) -> None:
        self._versions += 1
        version = self._versions if not is_block(number) else 0
        ttl_s = self.chance.choice([None, None, 10.0])
        way = self.chance.choice(["put", "put", "put", "produced"])
        self.say("put", process=process.number, key=number, version=version, way=way)
        process.put(number, version, claim=claim, ttl_s=ttl_s, way=way)

    def _put_many(self, process: Process, numbers: list[int]) -> None:
        versions = {number: self._versions + at for at, number in enumerate(numbers, 1)}
        self._versions += len(numbers)
        self.say("put_many", process=process.number, versions=versions)
        process.put_many(versions)

    def learn(self) -> None:
        """A process reads the generations, as after a restart with the same arguments."""
        process = self.some(seeing=True)
        if process is not None:
            process.learn()

    def wait(self) -> None:
        """A process waits for one of its puts."""
        process = self.some(connected=True)
        if process is not None:
            process.wait(self.chance.choice([0.0, 0.1, 3.0]))

    def rest(self) -> None:
        process = self.some()
        if process is not None and not process.closed:
            process.rest()

    def read(self) -> None:
        """Reads entries by one of the calls, with or without a connection, and holds the payloads found."""
        process = self.some(seeing=True)
        if process is None or process.view is None:
            return
        view = process.view
        known = [*self.model.there] or [0]
        numbers = [self.chance.choice([self.chance.choice(known), self.number(process)]) for _ in range(4)]
        if self.chance.random() < 0.3:
            process.wait_for_own(numbers[0])
            if process.view is not view:
                return
        way = self.chance.choice(["get", "hold", "verified", "get_many"])
        leases: list[Lease | None]
        if way == "get_many":
            leases = list(view.get_many(np.frombuffer(b"".join(map(at, numbers)), np.uint8).reshape(-1, 32)))
        else:
            leases = [self._found(view, way, number) for number in numbers]
        for number, lease in zip(numbers, leases, strict=True):
            contained = view.contains(at(number))
            there = lease is not None or (self.damaged and contained)
            # The ring may have grown since it was mapped. A full lane then copies entries that lie outside the view.
            copied = there and not contained and not view.is_whole and process.held_as_copy(lease)
            assert contained == there or copied, f"key {number}: {way} and contains disagree"
            if lease is not None:
                self.hits += 1
                found = process.keep(number, lease)
                assert found == self.model.there[number], f"key {number}: version {found} is stale"

    def _found(self, view: View, way: str, number: int) -> Lease | None:
        try:
            found: Lease | None = getattr(view, way)(at(number))
        except Corrupt:
            assert self.damaged, f"key {number} is corrupt"
            return None
        return found

    def let_go(self) -> None:
        process = self.some()
        if process is not None:
            process.let_go()

    def match(self) -> None:
        """Asserts that a prefix match returns the blocks that a reader finds."""
        process = self.some(connected=True, seeing=True)
        daemon = self.daemon
        if process is None or process.wire is None or process.view is None or daemon is None:
            return
        if process.wire.number not in daemon.wires:
            return
        words, era = self.chance.choice(SEQUENCES), process.eras[TAGS[2]]
        query, tokens = asked(words, era)
        message = messages.MatchPrefix(process.next_id(), TAGS[2], 0, query.record_bytes)
        matched = daemon.match(process.wire.number, message, query, tokens)
        if matched is None:
            return
        wanted = [at(number) for number in blocks(words, era)]
        there = [key for key in wanted if process.view.contains(key)]
        assert matched.blocks == wanted[: len(matched.blocks)]
        assert len(matched.blocks) <= len(there)
        # A block with a damaged record stays an entry, but no match finds the block.
        assert matched.blocks == there or self.damaged or daemon.parts.blocks.rebuilding
        self.matches += bool(there)

    def claim(self) -> None:
        """Requests a claim, renews it, abandons it, or forgets it."""
        process = self.some(connected=True)
        if process is None:
            return
        number = self.number(process, 5)
        held = [*process.claims]
        what = self.chance.choice(["claim", "claim", "renew", "abandon", "forget"])
        if what == "claim":
            if self.remote.objects and self.chance.random() < 0.5:
                number = number_of(self.chance.choice(sorted(self.remote.objects)))
            request = process.next_id()
            process.asked[request] = number
            self._send(process, messages.RequestClaim(request, at(number), self.chance.choice([0.0, 30.0])))
        elif held and what == "renew":
            self._send(process, messages.Renew(held))
        elif held and what == "abandon":
            token = self.chance.choice(held)
            process.claims.pop(token)
            error = messages.ErrorBody("ObjectTooLarge", "too large") if self.chance.random() < 0.3 else None
            self._send(process, messages.Abandon(token, error))
        elif held:
            process.claims.pop(held[0])

    def ask(self) -> None:
        process = self.some(connected=True)
        if process is None:
            return
        chance, request = self.chance, process.next_id()
        key = at(self.number(process))
        ring_bytes = self.daemon.ring_bytes if self.daemon is not None else 1 << 15
        tag = chance.choice(TAGS)
        make: list[Callable[[], Any]] = [
            lambda: messages.Evict(request, [key]),
            lambda: messages.Touch(request, [key]),
            lambda: messages.Pin(request, key, 5.0),
            lambda: messages.Unpin(request, key),
            lambda: messages.Limit(request, chance.choice([ring_bytes, ring_bytes, ring_bytes // 2])),
            lambda: messages.AgentTurn(
                request, "agent 1", chance.choice(["began", "tool_call", "turn_ended", "finished"])
            ),
            lambda: messages.Clear(request, None if chance.random() < 0.1 else tag),
            lambda: messages.Invalidate(request, tag, process.eras[tag]),
            lambda: messages.EvictPrefixes(request, TAGS[2]),
            lambda: messages.FetchRun(request, self._run(), chance.choice([0.0, 30.0])),
        ]
        [which] = chance.choices(make, [4, 4, 3, 3, 3, 3, 0.5, 0.7, 0.5, 3])
        self._send(process, which())

    def _run(self) -> list[bytes]:
        """Keys to fetch: often of a chain, since an entry's number is near its parent's."""
        first = number_of(self.chance.choice(sorted(self.remote.objects))) if self.remote.objects else 0
        return [at(number) for number in range(first, first + self.chance.randint(1, 6))]

    def use_device(self) -> None:
        """Uses entries in a process' VRAM: registers, uses and releases them, and answers orders or ignores them."""
        process = self.some(connected=True)
        if process is None:
            return
        chance, request = self.chance, process.next_id()
        number = self.number(process)
        if process.orders and chance.random() < 0.7:
            order = process.orders.pop(0)
            if order.kind != "promote":
                kind = chance.choice(["kept", "dropped", "offloaded"])
                said: dict[str, Any] = {kind: order.keys, "freed_bytes": 1 << 20}
                self._send(process, messages.AcknowledgeOrder(request, GPU, order.order, **said))
            return
        make: list[Callable[[], Any]] = [
            lambda: messages.OpenDevice(request, GPU),
            lambda: messages.RegisterEntry(request, GPU, at(number), 100 << 20, number % ALL, "agent 1"),
            lambda: messages.RegisterEntry(request, GPU, at(number), 100 << 20, number % ALL, "agent 0"),
            lambda: messages.UseEntries(GPU, [at(number)]),
            lambda: messages.ReleaseEntries(request, GPU, [at(number)]),
            lambda: messages.ReserveDevice(request, GPU, 50 << 20, 5.0, held=chance.random() < 0.2),
            lambda: messages.Subscribe(request),
            lambda: messages.RegisterWorkflow(
                request, "w", [messages.AgentStep("agent 0"), messages.AgentStep("agent 1", step_index=1)]
            ),
            lambda: messages.AdvanceWorkflow(request, "w", chance.randrange(2)),
            lambda: messages.EndWorkflow(request, "w"),
        ]
        self._send(process, chance.choice(make)())

    def _send(self, process: Process, message: Any) -> None:
        self.say("asks", process=process.number, message=message)
        try:
            process.send(message)
        except TensordError:
            pass

    def counts(self) -> Counter[str]:
        """The number of events of each kind."""
        counted = Counter({f"ended as {reason}": count for reason, count in self.model.ended.items()})
        counted.update(
            hits=self.hits,
            published=self.model.published,
            restarts=self.kills,
            forks=self.forks,
            matches=self.matches,
            attachments=self.reattached,
            fetches=self.fetches,
        )
        return counted

    # ---- invariants

    def check(self) -> None:
        """Checks every invariant that is visible between two steps."""
        for process in self.processes:
            process.check()
            process.settled()
            if process.view is not None:
                for tag, era in self.model.eras.items():
                    assert process.view.current(tag) == era, f"a client reads generation {process.view.current(tag)}"
        if self.daemon is not None:
            self.daemon.check()
            self.model.check(self.daemon.visible(), self.daemon.hidden(), self.daemon.sound())

    def finish(self) -> None:
        """Ends all processes and waits for the work in progress. Asserts that nothing leaks."""
        self.step += 1
        self.start_the_daemon()
        daemon = self.daemon
        assert daemon is not None
        self.check()
        while self.processes:
            self.processes.pop().die()
        gc.collect()
        self._settle(daemon)
        status = daemon.store.status()
        for figure in ("claims_held", "claims_waiting", "grants", "grants_waiting", "sweeps"):
            assert not status[figure], f"{figure} is {status[figure]} without any client"
        self.join()
        [process] = self.processes
        assert process.wire is not None
        process.wire.say([messages.Clear(process.next_id()), messages.Limit(process.next_id(), daemon.ring_bytes)])
        daemon.do(Pressed())
        daemon.settings = drawn(self.chance)  # no pressure from here on
        self._settle(daemon)
        used = daemon.parts.runway.places.used_bytes, daemon.store.status()["used_bytes"]
        assert used == (0, 0), f"ring memory leaked: {used}"
        assert daemon.store.status()["resident_bytes"] == daemon.ring_bytes, "pages are missing after the pressure"
        assert len(daemon.memory.lanes) == 1, "a lane leaked"
        daemon.check()

    def _settle(self, daemon: Daemon) -> None:
        quiet = 0
        for _ in range(400):
            quiet = quiet + 1 if not daemon.busy else 0
            if quiet > 12:
                return
            for wire in [*daemon.wires.values()]:
                while wire.number in daemon.wires and (wire.up or not wire.client_open):
                    daemon.hear(wire)
            daemon.finish_copies()
            while daemon.requests:
                daemon.ask_remote()
            while daemon.pages:
                daemon.move_pages(short=False)
            while daemon.jobs:
                daemon.work()
            self.now += 2.0
            daemon.tick()
            daemon.keep_time()
        raise AssertionError("the daemon does not come to rest without new input")

    def close(self) -> None:
        """Removes everything that the run made, also after a failure."""
        for patch in self._patches:
            patch.stop()
        for process in self.processes:
            process.die()
        self.processes.clear()
        if self.daemon is not None:
            self.daemon.memory.close(drop=True)
            self.daemon = None
        for segment in segments.existing(self.instance):
            segments.remove(segment)


def _weighted(actions: dict[Callable[[], None], float]) -> Actions:
    """The actions and their cumulative weights."""
    return [*actions], [*accumulate(actions.values())]
