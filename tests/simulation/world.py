"""A simulated host under one seed: at most one daemon, a few processes, a clock and a random schedule of actions.

Shared memory is real, and so is all code that accesses it. Time, sockets and threads are simulated. All random
choices come from the seed, so a seed is a reproducible test. `trace` receives a line for each step.

Invariants at every step: a payload that a reader finds is f(key, version) of the version published last. A held payload
does not change, and its span belongs to no other entry. A stored entry stays until the daemon announces its removal.
The invariants of the store's core hold.
"""

from __future__ import annotations

import gc
import os
import random
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import Final

from tensord.daemon.forms.events import Pressed
from tensord.ipc.messages import control as messages
from tensord.shm.lanes import fence
from tensord.shm.ring import segments

from .calls import Calls
from .daemon import Daemon
from .model import Model
from .patches import patches
from .payloads import TAGS, at
from .process import Process
from .remote import SimulatedStore
from .settings import drawn, redrawn
from .work import Work

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
        self.kills = self.forks = self.reattached = 0
        self._clients = self._made = 0
        self._depth = 0
        self._patches = patches(self)
        for patch in self._patches:
            patch.start()
        self.calls = Calls(self)
        foreground = {**self.calls.weights(), self.join: 4}
        background: dict[Callable[[], None], float] = {
            self.hear: 60,
            self.receive: 40,
            self.calls.rest: 2,
            self.of_daemon(Daemon.turn): 40,
            self.of_daemon(Daemon.doze): 10,
            self.of_work(Work.copy): 40,
            self.of_work(Work.move): 30,
            self.of_work(Work.ask_remote): 20,
            self.remote_changes: 0.5,
            self.of_work(Work.work): 30,
            self.of_work(Work.move_pages): 14,
            self.of_daemon(Daemon.keep_time): 8,
            self.of_daemon(lambda daemon: daemon.scrubber.scrub()): 4,
            self.of_daemon(Daemon.press): 3,
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

    def of_work(self, act: Callable[[Work], None]) -> Callable[[], None]:
        """An action that calls `act` with what the daemon has under way, if there is one."""
        return self.of_daemon(lambda daemon: act(daemon.work))

    def some(self, *, connected: bool = False, seeing: bool = False) -> Process | None:
        """A random process, on request one with a connection or with a view; None if there is none."""
        there = [
            process
            for process in self.processes
            if (process.wire is not None or not connected) and (process.view is not None or not seeing)
        ]
        return self.chance.choice(there) if there else None

    # ---- the daemon

    def start_the_daemon(self) -> None:
        """Starts a daemon on the memory of its predecessor. Asserts that it finds every entry."""
        if self.daemon is not None:
            return
        self.settings = redrawn(self.chance, self.settings)
        self.say("daemon starts", settings=self.settings)
        self.daemon = Daemon(self, self.settings)
        # A smaller ring hides some entries until a scan decides about them.
        before, left = self.model.expect(), self.daemon.entries.visible() | self.daemon.entries.hidden()
        assert left == before, f"the restart lost keys {before - left} and brought back {left - before}"
        self.daemon.look_at_generations()

    def start_after_damage(self) -> None:
        """Starts a daemon on damaged memory. The model takes over the entries that the daemon finds.

        Raises:
            TensordError: the daemon refuses to start.
        """
        self.damaged = True
        self.daemon = Daemon(self, self.settings)
        left = self.daemon.entries.visible()
        self.model.there = {number: version for number, version in self.model.there.items() if number in left}
        self.model.ends_at |= self.daemon.entries.ends_at()
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
        self.model.restarted(daemon.entries.visible())
        self.waiting = daemon.entries.waiting()
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

    def counts(self) -> Counter[str]:
        """The number of events of each kind."""
        counted = Counter({f"ended as {reason}": count for reason, count in self.model.ended.items()})
        counted.update(
            hits=self.calls.hits,
            published=self.model.published,
            restarts=self.kills,
            forks=self.forks,
            matches=self.calls.matches,
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
            self.model.check(
                self.daemon.entries.visible(),
                self.daemon.entries.hidden(),
                self.daemon.entries.sound(damaged=self.damaged),
            )

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
        self._settle(daemon)
        used = daemon.parts.runway.places.used_bytes, daemon.store.status()["used_bytes"]
        assert used == (0, 0), f"ring memory leaked: {used}"
        assert daemon.store.status()["resident_bytes"] == daemon.ring_bytes, "pages are missing after the pressure"
        assert len(daemon.memory.lanes) == 1, "a lane leaked"
        daemon.check()

    def _settle(self, daemon: Daemon) -> None:
        quiet = 0
        for _ in range(400):
            quiet = quiet + 1 if not daemon.work.busy else 0
            if quiet > 12:
                return
            for wire in [*daemon.wires.values()]:
                while wire.number in daemon.wires and (wire.up or not wire.client_open):
                    daemon.hear(wire)
            daemon.work.finish()
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
