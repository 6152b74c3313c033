"""Three processes share one card. As it fills up, the daemon decides which entries of which process leave.

    python examples/pressure.py [--json PATH]

Needs no GPU. The card is a stand-in whose capacity holds across processes, with a caching allocator and asynchronous
copies as on a real card. The tensors, the daemon, the offloads and the fetches are real. A fourth process, the engine,
allocates more and more of the card and frees it again, so that the gauge passes all modes up and down.

The timeline shows offload before eviction, refusals in an emergency, and acceptance afterwards. Every offloaded tensor
is fetched and compared byte by byte. The exit status is 1 if an expectation failed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
from demonstration import PATIENCE_S, OwnProcess, own_daemon

import tensord
from tensord.testing.fake_vram import FakeCard, FakeVram

MIB: Final = 1 << 20
CARD: Final = "card0"
CARD_BYTES: Final = 512 * MIB
ENTRY_BYTES: Final = 4 * MIB
HOST_BYTES: Final = 1024 * MIB
RING_BYTES: Final = 256 * MIB
AGENTS: Final = ("planner", "coder", "critic")
ENTRIES_EACH: Final = 8
# The daemon's default times are minutes; these are short for the demonstration.
IDLE_S: Final = 0.5
SETTINGS: Final[dict[str, Any]] = {
    "ring_bytes": RING_BYTES,
    "gauges_sample_s": 0.1,
    "gauges_sample_pressed_s": 0.05,
    "pressure_normal_idle_s": IDLE_S,
    "pressure_critical_idle_s": IDLE_S,
    "log_level": "error",
}
REFILL_S: Final = 2.0
MODES: Final = ("relaxed", "normal", "workflow_aware", "pressure", "critical", "emergency")


@dataclass
class Seen:
    """The observations of the run, with their expectations."""

    modes: list[str] = field(default_factory=list)
    offloaded: int = 0
    dropped: int = 0
    dropped_before_host_was_full: int = 0
    finished_went_first: bool = False
    refused_in_emergency: bool = False
    accepted_afterwards: bool = False
    fetched: int = 0
    wrong: int = 0

    @property
    def failures(self) -> list[str]:
        """The failed expectations."""
        wanted = {
            "the gauge did not go through all modes": set(MODES) <= set(self.modes),
            "the gauge did not return to relaxed": bool(self.modes) and self.modes[-1] == "relaxed",
            "no tensor was offloaded": self.offloaded > 0,
            "a tensor was evicted while the host had room": self.dropped_before_host_was_full == 0,
            "no tensor was evicted when the host had no room": self.dropped > 0,
            "tensors of other agents left before those of the finished agent": self.finished_went_first,
            "the daemon accepted a tensor in an emergency": self.refused_in_emergency,
            "the daemon accepted no tensor after the emergency": self.accepted_afterwards,
            "no tensor was fetched": self.fetched > 0,
            "a fetched tensor had other bytes": self.wrong == 0,
        }
        return [text for text, fulfilled in wanted.items() if not fulfilled]

    def came_to(self, mode: str, since: int) -> bool:
        """True if `mode` was current when `since` modes had been seen, or has occurred after them.

        Looks at all of them, not only the last: evictions may end a mode as soon as it begins. The current mode counts
        too: evictions may have reached it before the call.
        """
        return mode in self.modes[max(since - 1, 0) :]


class Timeline:
    """Prints events with the time since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def tell(self, what: str, text: str) -> None:
        with self._lock:
            print(f"{time.monotonic() - self._began:6.2f} s  {what:<9} {text}", flush=True)


# ---- an agent: a process that holds tensors on the card


def tensor_of(agent: str, number: int) -> np.ndarray[Any, Any]:
    """The content of an entry, which every process can compute."""
    seed = int.from_bytes(hashlib.sha256(f"{agent}/{number}".encode()).digest()[:8], "little")
    return np.random.default_rng(seed).standard_normal(ENTRY_BYTES // 4).astype(np.float32)


def key_of(agent: str, number: int) -> bytes:
    namespace = tensord.Namespace(model="demo", revision="1", dtype="float32", processor="none")
    return namespace.key("encoder", "image", f"{agent}/{number}".encode())


def be_agent(agent: str, socket: Path, folder: Path, orders: Connection) -> None:
    """Carries out `orders`: put N, use N, fetch, count."""
    card = FakeVram(FakeCard(folder, CARD, CARD_BYTES))
    with tensord.Client(socket, name=agent, timeout_s=PATIENCE_S, required=True) as client:
        cache = tensord.DeviceCache(client, card)
        done: dict[str, Callable[[Any], Any]] = {
            "put": lambda number: _put(cache, card, agent, number),
            "use": lambda number: cache.get(key_of(agent, number)) is not None,
            "fetch": lambda number: _fetch(cache, agent, number),
            "here": lambda _: len(cache),
            "mode": lambda _: str(cache.mode),
        }
        orders.send("ready")
        while (order := orders.recv()) is not None:
            what, argument = order
            orders.send(done[what](argument))
        cache.close()


def _put(cache: Any, card: FakeVram, agent: str, number: int) -> str:
    """Registers one tensor of `agent`, and returns the outcome."""
    tensor = card.upload(tensor_of(agent, number))
    registration = cache.put(key_of(agent, number), {"hidden": tensor}, tokens=1024, agent=agent)
    registration.wait(PATIENCE_S)
    return "registered" if registration.error is None else f"refused: {registration.error}"


def _fetch(cache: Any, agent: str, number: int) -> str:
    """Fetches a tensor from the card or the host, and compares it with the tensor that was put."""
    lease = cache.get(key_of(agent, number), promote=True)
    if lease is None:
        return "gone"
    with lease:
        same = np.array_equal(lease.tree["hidden"].numpy(), tensor_of(agent, number))
        return "same" if same else "changed"


class Agent(OwnProcess):
    """An agent's process, seen from the demonstration."""

    def __init__(self, name: str, socket: Path, folder: Path) -> None:
        super().__init__(name, be_agent, socket, folder)
        self.hear()

    def ask(self, what: str, argument: Any = None) -> Any:
        """Sends an order, and returns its result."""
        self.tell((what, argument))
        return self.hear()


# ---- the demonstration


class Demonstration:
    """The engine: fills the card, waits for the effects, and prints the timeline."""

    def __init__(self, cache: tensord.Client, agents: Sequence[Agent], card: FakeCard, host: FakeCard) -> None:
        self.seen = Seen()
        self._cache = cache
        self._agents = agents
        self._card = card
        self._host = host
        self._timeline = Timeline()
        self._modes = threading.Condition()
        self._host_full = False
        self._occupied_bytes = 0
        self._before: dict[str, int] = {}
        self._subscription = cache.on_mode(self._changed)

    def run(self) -> None:
        """Passes all modes up and down."""
        tell = self._timeline.tell
        each = f"{ENTRIES_EACH} tensors of {ENTRY_BYTES // MIB} MiB each"
        tell("card", f"{CARD_BYTES // MIB} MiB; {len(AGENTS)} agents, {each}")
        for agent in self._agents:
            for number in range(ENTRIES_EACH):
                agent.ask("put", number)
        self._count()
        self._fill_to(0.75, "normal")
        self._settle("idle tensors are offloaded to the host")
        self._put_more(1)
        self._fill_to(0.88, "pressure")
        self._settle("the least used per token leave, and only as many as needed")
        self._fill_to(0.5, "relaxed")
        self._put_more(2)
        self._with_workflow()
        self._fill_to(0.935, "critical")
        self._settle("all idle tensors are offloaded to the host")
        self._fill_to(0.97, "emergency")
        outcome = self._agents[0].ask("put", 900)
        self.seen.refused_in_emergency = outcome.startswith("refused")
        tell("put", f"{self._agents[0].name}: {outcome}")
        self._fill_to(0.2, "relaxed")
        outcome = self._agents[0].ask("put", 901)
        self.seen.accepted_afterwards = outcome == "registered"
        tell("put", f"{self._agents[0].name}: {outcome}")
        self._fetch_all()
        tell("host", "the host's memory is full too: from now on tensors that leave the card are evicted")
        self._host.occupy(HOST_BYTES * 9 // 10)
        self._host_full = True
        self._await(lambda: self._cache.modes()["host"].mode == "pressure", "the host's pressure")
        self._fill_to(0.935, "critical")
        self._settle("all idle tensors are evicted")
        self._host.occupy(HOST_BYTES // 5)
        self._fill_to(0.0, "relaxed")
        self._subscription.close()

    def _with_workflow(self) -> None:
        """A step graph gives the order of the agents: a finished agent's tensors leave first, whoever was used last."""
        graph = tensord.AgentStepGraph()
        for step, agent in enumerate(AGENTS):
            graph.add_step(tensord.AgentStep(agent, depends_on=AGENTS[:step][-1:], step_index=step))
        with self._cache.workflow("ticket", graph) as workflow:
            workflow.advance(1, wait=True)  # the daemon has the step before the card fills up
            self._timeline.tell("workflow", f"{AGENTS[0]} is finished, {AGENTS[1]} is working, {AGENTS[2]} is next")
            # The next agent's tensors are promoted first: the card must not fill any further while they come.
            everything = ENTRIES_EACH + 2 * (ENTRIES_EACH // 2)
            self._await(lambda: self._agents[2].ask("here") == everything, "the next agent's tensors")
            before = {agent.name: agent.ask("here") for agent in self._agents}
            self._fill_to(0.87, "workflow_aware")
            self._settle("the finished agent's leave, and only as many as needed")
            after = {agent.name: agent.ask("here") for agent in self._agents}
            gone = {name for name in AGENTS if after[name] < before[name]}
            self.seen.finished_went_first = gone == {AGENTS[0]}

    def _put_more(self, round_number: int) -> None:
        """Puts tensors, so that every level has tensors to evict."""
        for agent in self._agents:
            for number in range(ENTRIES_EACH // 2):
                agent.ask("put", 100 * round_number + number)

    def _fetch_all(self) -> None:
        numbers = [*range(ENTRIES_EACH), *(100 * r + n for r in (1, 2) for n in range(ENTRIES_EACH // 2))]
        for agent in self._agents:
            outcomes = [agent.ask("fetch", number) for number in numbers]
            self.seen.fetched += outcomes.count("same")
            self.seen.wrong += outcomes.count("changed")
            self.seen.dropped_before_host_was_full += outcomes.count("gone")
        self._timeline.tell("fetched", f"{self.seen.fetched} tensors, {self.seen.wrong} of them with other bytes")

    def _fill_to(self, share: float, mode: str) -> None:
        """Allocates or frees memory so that the card stays at that level until the mode has come."""
        self._before = self._counters()
        since = len(self.seen.modes)
        self._timeline.tell("engine", f"fills the card to {share:.0%}")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            # Repeats: entries that leave meanwhile, such as idle ones, lower the level.
            used_bytes, total_bytes = self._card.reading()
            self._occupied_bytes = max(0, int(share * total_bytes) - (used_bytes - self._occupied_bytes))
            self._card.occupy(self._occupied_bytes)
            with self._modes:
                if self._modes.wait_for(lambda: self.seen.came_to(mode, since), REFILL_S):
                    return
            if time.monotonic() > deadline:
                raise RuntimeError(f"the card was not {mode} within {PATIENCE_S:g} s: {self.seen.modes[since:]}")

    def _settle(self, why: str) -> None:
        """Waits until no entry is being moved, and prints the result."""
        before = self._before
        time.sleep(2 * IDLE_S)  # the demonstration is about idle tensors
        self._await(lambda: not any(row["ordered_entries"] for row in self._devices()), "orders carried out")
        after = self._counters()
        offloaded, dropped = (after[name] - before[name] for name in ("offloaded", "dropped"))
        self.seen.offloaded, self.seen.dropped = after["offloaded"], after["dropped"]
        if not self._host_full:
            self.seen.dropped_before_host_was_full += dropped
        self._timeline.tell("governor", f"{offloaded} offloaded, {dropped} evicted: {why}")
        self._count()

    def _count(self) -> None:
        here = {agent.name: agent.ask("here") for agent in self._agents}
        used_bytes, total_bytes = self._card.reading()
        held = ", ".join(f"{name} {count}" for name, count in here.items())
        self._timeline.tell("card", f"{used_bytes / total_bytes:.0%} full; tensors on it: {held}")

    def _changed(self, change: Any) -> None:
        self._timeline.tell("mode", f"{change.gauge}: {change.before} → {change.mode}")
        if change.gauge == CARD:
            with self._modes:
                self.seen.modes.append(str(change.mode))
                self._modes.notify_all()

    def _devices(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._cache.status()["governor"]["devices"]
        return found

    def _counters(self) -> dict[str, int]:
        found: dict[str, int] = self._cache.status()["governor"]["counters"]
        return found

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} did not come within {PATIENCE_S:g} s")
            time.sleep(0.02)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A card fills up, and the daemon decides which tensors leave.")
    parser.add_argument("--json", type=Path, help="write the observations there")
    given = parser.parse_args(argv)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensord-demo-")))
        card = stack.enter_context(FakeCard(folder, CARD, CARD_BYTES))
        host = stack.enter_context(FakeCard(folder, "host", HOST_BYTES))
        host.occupy(HOST_BYTES // 5)
        watched: dict[str, Any] = {"gauges_device": "file", "gauges_host": "file", "gauges_file": card.gauge_file}
        socket = stack.enter_context(own_daemon(folder, "pressure", **SETTINGS, **watched))
        cache = stack.enter_context(tensord.Client(socket, name="engine", timeout_s=PATIENCE_S, required=True))
        agents = []
        for name in AGENTS:
            agents.append(Agent(name, socket, folder))
            stack.callback(agents[-1].end)
        shown = Demonstration(cache, agents, card, host)
        shown.run()
    seen = shown.seen
    if given.json:
        given.json.write_text(json.dumps(asdict(seen), indent=2) + "\n")
    for failure in seen.failures:
        print(f"pressure: {failure}", file=sys.stderr)
    if not seen.failures:
        print(
            f"\n{seen.offloaded} tensors were offloaded, {seen.fetched} fetched bit-identical; "
            f"{seen.dropped} were evicted, all of them after the host was full"
        )
    return 1 if seen.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
