"""The device registry at random, beside a model of plain dicts: whatever happens, every entry is accounted for.

The model knows nothing of ranks: it takes the registry's orders as they come, checks that each could be given, and
keeps the books of what owners then say and do.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tensord.daemon.devices.devices import Circumstances
from tensord.daemon.devices.record import WAITING_RETRY_S
from tensord.errors import BelowFloor, DeviceFull, OwnedElsewhere, TensordError, UnderPressure, UnknownOrder
from tensord.ipc.modes import Mode

from .registry import FINISHED, GPU, UNREAD, Registry, key, number

TOTAL = 200
ACK_S, RETRY_S, IDLE_S = 5.0, 12.0, {"relaxed": 60.0, "normal": 30.0, "critical": 10.0, "emergency": 10.0}
NUMBERS = st.integers(0, 11)
CLIENTS = st.integers(1, 3)
AGENTS = ["", "a", "b", "c"]
NAMES = ("resident", "offloaded", "dropped", "released", "gone_with_owner")


@dataclass
class Entry:
    client: int
    size: int
    tokens: int
    used_at: float
    uses: int
    order: int = 0
    open: bool = False
    not_before: float = 0.0


class Model:
    """Entries by number; `order` stays with an entry that is late."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.entries: dict[int, Entry] = {}
        self.counts: Counter[str] = Counter()
        self.offloaded: set[int] = set()
        self.heard_at: dict[int, float] = {}
        self.silent: set[int] = set()

    def staying(self) -> list[Entry]:
        return [entry for entry in self.entries.values() if not entry.open]

    def ordered_to(self, client: int) -> list[tuple[int, Entry]]:
        return [(n, e) for n, e in self.entries.items() if e.open and e.client == client]

    def take_orders(self, circumstances: Circumstances | None) -> None:
        """Judges the orders that came; each must have been possible."""
        for client, order in self.registry.orders:
            if order.kind == "promote":
                assert circumstances is not None and circumstances.mode in (Mode.RELAXED, Mode.WORKFLOW_AWARE)
                assert {number(each) for each in order.keys} <= self.offloaded - self.entries.keys()
                continue
            assert client not in self.silent
            if not self.ordered_to(client):
                self.heard_at[client] = self.registry.now
            for each in order.keys:
                entry = self.entries[number(each)]
                early_s = RETRY_S - WAITING_RETRY_S if circumstances and circumstances.wanted_bytes else 0.0
                assert entry.client == client and not entry.open and entry.not_before - early_s <= self.registry.now
                if order.reason in ("critical", "emergency"):
                    assert circumstances is not None
                    lacks = circumstances.used_bytes >= 0.85 * TOTAL
                    assert lacks or entry.used_at <= self.registry.now - IDLE_S[order.reason]
                elif order.reason in IDLE_S:
                    assert entry.used_at <= self.registry.now - IDLE_S[order.reason]
                entry.order, entry.open = order.order, True
            self.counts["ordered"] += len(order.keys)
            floor = circumstances.floor_blocks if circumstances else 0
            assert sum(entry.size for entry in self.staying()) >= floor, "below the floor"
        self.registry.orders.clear()

    def answers(self, client: int) -> None:
        self.silent.discard(client)

    def time_out(self) -> None:
        now = self.registry.now
        for client, heard_at in list(self.heard_at.items()):
            late = self.ordered_to(client)
            if late and heard_at + ACK_S <= now:
                self.silent.add(client)
                self.counts["timed_out"] += len(late)
                for _, entry in late:
                    entry.open, entry.not_before = False, now + RETRY_S

    def gone(self, which: int, how: str) -> None:
        entry = self.entries.pop(which)
        self.counts[how] += 1
        if how in ("offloaded", "dropped"):
            self.counts[f"{how}_bytes"] += entry.size


class AnyOrder(RuleBasedStateMachine):
    """Three clients, twelve keys, one device; a second passes with most steps."""

    @initialize(
        limits=st.fixed_dictionaries(
            {
                "max_bytes": st.sampled_from([None, 60]),
                "max_tokens": st.sampled_from([None, 25]),
                "max_entries": st.sampled_from([4, 1000]),
                "pass_share": st.sampled_from([0.25, 1.0]),
                "remembered_max": st.sampled_from([0, 2, 100]),
                "keys_per_request_max": st.sampled_from([2, 1024]),
            }
        )
    )
    def start(self, limits: dict[str, Any]) -> None:
        idle = {f"{mode}_idle_s": idle_s for mode, idle_s in IDLE_S.items() if mode != "emergency"}
        self.registry = Registry(ack_s=ACK_S, retry_s=RETRY_S, **idle, **limits)
        self.model = Model(self.registry)
        self.circumstances: Circumstances | None = None

    @rule(seconds=st.sampled_from([1.0, 1.0, 4.0, 15.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.registry.pass_time(seconds)
        self.model.time_out()
        self.model.take_orders(self.circumstances)

    @rule(
        client=CLIENTS,
        which=NUMBERS,
        size=st.integers(1, 30),
        tokens=st.integers(0, 12),
        agent=st.sampled_from(AGENTS),
        known=st.booleans(),
    )
    def register(self, client: int, which: int, size: int, tokens: int, agent: str, known: bool) -> None:
        registry, model, limits = self.registry, self.model, self.registry.limits
        circumstances = (known and self.circumstances) or UNREAD
        entry = model.entries.get(which)
        before = registry.snapshot()
        answer: Any = None
        refused: TensordError | None = None
        try:
            answer = registry.register(client, which, size, tokens, circumstances, agent=agent)
        except TensordError as error:
            refused = error
        if refused is not None:
            assert registry.snapshot() == before and not registry.orders, "a refusal changed something"
            if isinstance(refused, OwnedElsewhere):
                assert entry is not None and entry.client != client
            elif isinstance(refused, UnderPressure):
                assert entry is None and circumstances.refuses
            else:
                assert isinstance(refused, DeviceFull | BelowFloor)
                assert not self.fits(entry, size, tokens), "refused though there was room"
                assert isinstance(refused, DeviceFull) or circumstances.floor_blocks
            return
        assert answer.renewed == (entry is not None)
        if entry is None:
            model.counts["registered"] += 1
            model.entries[which] = Entry(client, size, tokens, registry.now, 1)
            if registry.counters["promoted"] > model.counts["promoted"]:
                assert which in model.offloaded
                model.counts["promoted"] += 1
            model.offloaded.discard(which)
        else:
            assert entry.client == client and (not entry.open or entry.order)
            entry.size, entry.tokens, entry.used_at, entry.uses = size, tokens, registry.now, entry.uses + 1
            model.counts["renewed"] += 1
        model.take_orders(circumstances)
        model.answers(client)
        staying = model.staying()
        mine = model.entries[which]
        if not mine.open:
            assert len(staying) <= limits.max_entries
            assert limits.max_bytes is None or sum(e.size for e in staying) <= limits.max_bytes
            assert limits.max_tokens is None or sum(e.tokens for e in staying) <= limits.max_tokens

    def fits(self, entry: Entry | None, size: int, tokens: int) -> bool:
        limits, others = self.registry.limits, [e for e in self.model.staying() if e is not entry]
        return (
            len(others) < limits.max_entries
            and (limits.max_bytes is None or sum(e.size for e in others) + size <= limits.max_bytes)
            and (limits.max_tokens is None or sum(e.tokens for e in others) + tokens <= limits.max_tokens)
        )

    @rule(client=CLIENTS, which=st.lists(NUMBERS, max_size=4))
    def use(self, client: int, which: list[int]) -> None:
        self.registry.use(client, *which)
        self.model.answers(client)
        for each in which:
            entry = self.model.entries.get(each)
            if entry is not None and entry.client == client:
                entry.uses, entry.used_at = entry.uses + 1, self.registry.now
                self.model.counts["used"] += 1

    @rule(client=CLIENTS, which=st.lists(NUMBERS, max_size=4))
    def release(self, client: int, which: list[int]) -> None:
        own = {n for n in which if n in self.model.entries and self.model.entries[n].client == client}
        assert self.registry.release(client, *which) == len(own)
        for each in own:
            self.model.gone(each, "released")
        self.model.silent.discard(client)

    @rule(client=CLIENTS)
    def leave_and_come_back(self, client: int) -> None:
        """The same process connects anew, which the daemon takes for another client; here it keeps its number."""
        for which in [n for n, e in self.model.entries.items() if e.client == client]:
            self.model.gone(which, "gone_with_owner")
        self.registry.leave(client)
        self.model.silent.discard(client)
        self.registry.join(client)

    @rule(
        mode=st.sampled_from(list(Mode)),
        used=st.integers(0, TOTAL),
        floor=st.sampled_from([0, 0, 20, 1000]),
        host_accepts=st.booleans(),
        began=st.sampled_from([0.0, 0.5, 3.0]),
        wanted=st.sampled_from([0, 0, 15, 60]),
    )
    def sample(self, mode: Mode, used: int, floor: int, host_accepts: bool, began: float, wanted: int) -> None:
        registry = self.registry
        registry.pass_time(1)
        self.model.time_out()
        if self.circumstances is None or self.circumstances.mode is not mode:
            registry.devices.mode_changed(GPU, registry.now)
        refuses = "it is full" if mode is Mode.EMERGENCY else ""
        self.circumstances = Circumstances(
            mode, used, TOTAL, registry.now - began, host_accepts, floor, refuses, 0, wanted
        )
        before = registry.snapshot()
        planned = registry.devices.plan(GPU, self.circumstances, registry.now)
        assert registry.snapshot() == before, "a plan changed something"
        passes, stuck = registry.counters["passes"], self.stuck()
        passing = registry.devices.is_passing(GPU)
        registry.devices.sampled(GPU, self.circumstances, registry.now)
        registry.settle()
        entries = {"offload": 0, "drop": 0, "promote": 0}
        for _, order in registry.orders:
            entries[order.kind] += len(order.keys)
        if registry.counters["passes"] > passes:
            # What a pass that is over has shown may change whom the next one asks.
            if stuck == self.stuck() and not (passing and stuck):
                assert (entries["offload"], entries["drop"]) == (planned.offload_entries, planned.drop_entries)
            assert host_accepts or not entries["offload"]
        else:
            assert entries["offload"] == entries["drop"] == 0
        self.model.take_orders(self.circumstances)

    def stuck(self) -> bool:
        status = self.registry.devices.status()
        return bool(status and status[0]["stuck"])

    @rule(wanted=st.sampled_from([15, 60]))
    def reservation_waits(self, wanted: int) -> None:
        if self.circumstances is not None:
            self.circumstances = replace(self.circumstances, wanted_bytes=wanted)
            self.registry.devices.make_room(GPU, self.circumstances, self.registry.now)
            self.registry.settle()
            self.model.take_orders(self.circumstances)

    @precondition(lambda self: any(entry.order for entry in self.model.entries.values()))
    @rule(freed=st.integers(0, 20), seed=st.integers(0, 1 << 16))
    def acknowledge(self, freed: int, seed: int) -> None:
        """All of an order or a part of it, early or late."""
        model, chance = self.model, random.Random(seed)
        order = chance.choice(sorted({e.order for e in model.entries.values() if e.order}))
        under = sorted(n for n, e in model.entries.items() if e.order == order)
        client = model.entries[under[0]].client
        chance.shuffle(under)
        under = under[: chance.randint(1, len(under))]
        said: dict[str, list[int]] = {"offloaded": [], "dropped": [], "kept": []}
        for each in under:
            said[chance.choice(["offloaded", "dropped", "kept"])].append(each)
        self.registry.acknowledge(
            client, order, freed=freed, **{how: [key(n) for n in which] for how, which in said.items()}
        )
        for how in ("offloaded", "dropped"):
            for each in said[how]:
                model.gone(each, how)
        model.offloaded |= set(said["offloaded"])
        for each in said["kept"]:
            entry = model.entries[each]
            entry.order, entry.open, entry.not_before = 0, False, self.registry.now + RETRY_S
        model.counts["kept"] += len(said["kept"])
        model.counts["freed_bytes"] += freed
        model.answers(client)
        if model.ordered_to(client):
            model.heard_at[client] = self.registry.now

    @rule(client=CLIENTS, order=st.integers(1, 40), which=st.lists(NUMBERS, min_size=1, max_size=4))
    def acknowledge_anything(self, client: int, order: int, which: list[int]) -> None:
        mine = [self.model.entries.get(each) for each in which]
        if all(e is not None and (e.client, e.order) == (client, order) for e in mine) and len(set(which)) == len(
            which
        ):
            return
        before = self.registry.snapshot()
        try:
            self.registry.acknowledge(client, order, dropped=[key(each) for each in which], freed=3)
        except UnknownOrder:
            assert self.registry.snapshot() == before
        else:
            raise AssertionError("taken for an order that was given")

    @rule(steps=st.lists(st.sampled_from([0, 1, 2, FINISHED]), min_size=3, max_size=3))
    def workflows_move(self, steps: list[float]) -> None:
        self.registry.workflows.set(**dict(zip(AGENTS[1:], steps, strict=True)))

    @invariant()
    def every_entry_is_accounted_for(self) -> None:
        if not hasattr(self, "model"):
            return
        registry, model = self.registry, self.model
        registry.devices.check_invariants()
        counters, status = registry.counters, registry.status
        for name, count in model.counts.items():
            assert counters[name] == count, name
        assert {name for name in NAMES[1:] if counters[name]} <= model.counts.keys()
        assert counters["registered"] == len(model.entries) + sum(counters[name] for name in NAMES[1:])
        assert status["entries"] == len(model.entries)
        assert status["bytes"] == sum(entry.size for entry in model.entries.values())
        assert status["tokens"] == sum(entry.tokens for entry in model.entries.values())
        ordered = [entry for entry in model.entries.values() if entry.open]
        assert (status["ordered_entries"], status["ordered_bytes"]) == (len(ordered), sum(e.size for e in ordered))
        for row in registry.devices.owners():
            own = [entry for entry in model.entries.values() if entry.client == row["client"]]
            assert (row["entries"], row["bytes"]) == (len(own), sum(entry.size for entry in own))
            assert row["unresponsive"] == (row["client"] in model.silent)
        assert registry.devices.remembered <= registry.limits.remembered_max

    @invariant()
    def uses_and_last_uses_are_those_of_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        table = self.registry.devices._devices[GPU].table
        for which, entry in self.model.entries.items():
            row = table.find(key(which))
            assert row is not None and table.used_at[row] == entry.used_at
            assert table.uses[row] >= entry.uses


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("seed", range(12))
def test_refused_offloaded_and_evicted_entries_add_up_over_a_long_random_schedule(seed: int) -> None:
    """The same steps, most of them such as bring entries in and out."""
    chance = random.Random(seed)
    some = chance.choice
    run: Any = AnyOrder()
    run.start(
        limits={
            "max_bytes": some([None, 60, 120]),
            "max_tokens": some([None, 25, 60]),
            "max_entries": some([4, 1000]),
            "pass_share": some([0.25, 1.0]),
            "remembered_max": some([0, 2, 100]),
            "keys_per_request_max": some([2, 1024]),
        }
    )
    steps: dict[Callable[[], Any], int] = {
        lambda: run.register(
            client=chance.randint(1, 3),
            which=chance.randint(0, 11),
            size=chance.randint(1, 30),
            tokens=chance.randint(0, 12),
            agent=some(AGENTS),
            known=chance.random() < 0.8,
        ): 10,
        lambda: run.sample(
            mode=some(list(Mode)),
            used=chance.randint(0, TOTAL),
            floor=some([0, 0, 20]),
            host_accepts=chance.random() < 0.7,
            began=some([0.0, 0.5, 3.0]),
            wanted=some([0, 0, 15, 60]),
        ): 4,
        lambda: run.acknowledge(freed=chance.randint(0, 20), seed=chance.randint(0, 1 << 16)): 5,
        lambda: run.time_passes(seconds=some([1.0, 1.0, 4.0, 15.0])): 2,
        lambda: run.use(client=chance.randint(1, 3), which=chance.choices(range(12), k=3)): 2,
        lambda: run.release(client=chance.randint(1, 3), which=[chance.randint(0, 11)]): 1,
        lambda: run.acknowledge_anything(
            client=chance.randint(1, 3), order=chance.randint(1, 99), which=[chance.randint(0, 11)]
        ): 1,
        lambda: run.workflows_move(steps=chance.choices([0, 1, 2, FINISHED], k=3)): 1,
        lambda: run.leave_and_come_back(client=chance.randint(1, 3)) if chance.random() < 0.2 else None: 1,
        lambda: run.reservation_waits(wanted=some([15, 60])): 1,
    }
    acknowledging = list(steps)[2]
    for _ in range(400):
        (step,) = chance.choices(list(steps), list(steps.values()))
        if step is acknowledging and not any(entry.order for entry in run.model.entries.values()):
            continue
        step()
        run.every_entry_is_accounted_for()
        run.uses_and_last_uses_are_those_of_the_model()
    counters = run.registry.counters
    assert counters["ordered"] and counters["offloaded"] and counters["dropped"] and counters["kept"]
