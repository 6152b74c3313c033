"""A model of the governor that only does the sums, and judges all that the governor says.

The model knows of each entry its owner, size, last use and the order that it is under; it learns of orders as owners
do, by being sent them, and judges each by the rules of the mode that it names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from tensord.daemon.forms.events import Tick
from tensord.daemon.governor.devices.choices import WAITING_RETRY_S
from tensord.daemon.governor.devices.record import SLOW_S
from tensord.daemon.governor.forms.events import FormerDaemonFound, Sampled
from tensord.daemon.governor.forms.limits import NeighbourPlace
from tensord.daemon.governor.reservations import REATTACH_S
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.modes import HOST_GAUGE

from .stand import MIB, Stand, key

DEVICES = ["gpu 0", "gpu 1"]
ONE_DEVICE = st.sampled_from([DEVICES[0], *DEVICES])
ONE_GAUGE = st.sampled_from([DEVICES[0], *DEVICES, HOST_GAUGE])
NUMBERS = st.integers(0, 11)
SHARES = [0.3, 0.6, 0.75, 0.84, 0.86, 0.9, 0.93, 0.97, 1.1]
AGENTS = ["", "a", "b", "c"]
NEIGHBOURS = (
    NeighbourPlace("vllm", "127.0.0.1", 8000),
    NeighbourPlace("ollama", "127.0.0.1", 11434),
    NeighbourPlace("comfyui", "127.0.0.1", 8188, DEVICES[1]),
)
ENTRIES = st.tuples(NUMBERS, st.integers(1, 5).map(lambda n: n * 10 * MIB), st.integers(0, 30), st.sampled_from(AGENTS))
IDLE_S = {"relaxed": 40.0, "normal": 20.0, "critical": 5.0, "emergency": 5.0}
ACK_S, RETRY_S, PASS_SHARE, BLOCK, RESERVE_S_MAX, ROOM_S_MAX = 3.0, 6.0, 0.5, 10 * MIB, 8.0, 20.0


@dataclass
class Entry:
    """`order`: the last that names it; `open`: that is not acknowledged."""

    client: int
    size: int
    used_at: float
    tokens: int = 0
    order: int = 0
    open: bool = False
    not_before: float = float("-inf")


@dataclass
class Card:
    """One device as its owners see it. `passes`: the last pass's orders; `closed_at`: when one of those last ended;
    `left_of`: the owners whose entries left by them; `freed`: whether a byte was freed for them. `slow_orders`: those
    of the pass that it may not wait for; `left_late`: whether entries left by one of them. `vain`: when the owners that
    have returned nothing were last found to."""

    entries: dict[int, Entry] = field(default_factory=dict)
    owners: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)
    passes: set[int] = field(default_factory=set)
    closed_at: float = float("-inf")
    left_of: set[int] = field(default_factory=set)
    freed: bool = False
    slow_orders: set[int] = field(default_factory=set)
    left_late: bool = False
    vain: dict[int, float] = field(default_factory=dict)
    waits: dict[int, float] = field(default_factory=dict)

    def close(self, entry: Entry, now: float) -> None:
        if entry.open and entry.order in self.passes:
            self.closed_at = now
        entry.open = False

    def open_of(self, client: int) -> set[int]:
        return {entry.order for entry in self.entries.values() if entry.open and entry.client == client}

    def leave_slow(self, now: float) -> None:
        """The current pass does not wait for owners that have been silent for SLOW_S."""
        for client, since in self.waits.items():
            if now >= since + SLOW_S:
                self.slow_orders |= self.passes & self.open_of(client)
                self.passes -= self.slow_orders

    def resident_bytes(self) -> int:
        return sum(entry.size for entry in self.entries.values() if not entry.open)


class Judged(RuleBasedStateMachine):
    """Two cards, up to four clients, 12 keys: what the governor says is judged by the model."""

    def join(self, devices: list[str]) -> None:
        raise NotImplementedError

    @initialize(
        budget=st.sampled_from([None, None, 150 * MIB]),
        entries=st.sampled_from([1000, 1000, 6]),
        disturbed=st.sampled_from(["", "", "floors", "limits", "gauges", "baselines", "restart"]),
        neighbours=st.sampled_from([(), NEIGHBOURS]),
    )
    def start(self, budget: int | None, entries: int, disturbed: str, neighbours: tuple[NeighbourPlace, ...]) -> None:
        self.stand = Stand(
            max_bytes=budget,
            max_entries=entries,
            relaxed_idle_s=IDLE_S["relaxed"],
            normal_idle_s=IDLE_S["normal"],
            critical_idle_s=IDLE_S["critical"],
            ack_s=ACK_S,
            retry_s=RETRY_S,
            pass_share=PASS_SHARE,
            block_bytes=BLOCK,
            remembered_max=3,
            workflows_max=2,
            reservations_max=2,
            reserve_s_max=RESERVE_S_MAX,
            room_s_max=ROOM_S_MAX,
            neighbours=neighbours,
        )
        self.cards = {name: Card() for name in DEVICES}
        self.counted: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.clients = 0
        self.told = self.seen = 0
        self.disturbed = disturbed
        self.tokens: dict[int, int] = {}
        self.waiting: dict[int, tuple[int, str, float]] = {}
        self.ended: set[str] = set()
        self.taken: dict[str, list[tuple[float, int]]] = {name: [] for name in DEVICES}
        self.neighbours_told: set[int] = set()
        if disturbed == "restart":
            self.stand.do(FormerDaemonFound())
        self.grants_from = self.stand.now + (REATTACH_S if disturbed == "restart" else 0)
        self.join(DEVICES)
        self.join(DEVICES)

    def hear_of_reservations(self) -> None:
        """Judges the answers to reservations that may have waited."""
        came = [
            (client, answer, self.waiting.pop(answer.id))
            for client, answers in self.stand.answers.items()
            for answer in answers
            if self.waiting.get(getattr(answer, "id", 0), (None,))[0] == client
        ]
        self.ended = {device for _, _, (_, device, _) in came}
        for client, answer, (_, device, _) in came:
            if isinstance(answer, messages.Error):
                self.refused[answer.code] += 1
                continue
            if isinstance(answer, messages.RoomMade) and not answer.made:
                self.refused["NoGauge" if "has no gauge" in answer.why else "DeviceFull"] += 1
                continue
            before = [number for number, (_, d, _) in self.waiting.items() if d == device and number < answer.id]
            assert not before, "a reservation was overtaken"
            assert self.stand.now >= self.grants_from, "granted before clients have said what they hold"
            if isinstance(answer, messages.Reserved):
                self.tokens[answer.reservation] = client
            gauge = next(g for g in self.stand.status()["gauges"] if g["gauge"] == device)
            free = gauge["total_bytes"] - gauge["used_bytes"]
            began_at = self.stand.now - gauge["age_s"]
            free -= sum(size for at, size in self.taken[device] if at > began_at)
            free = max(free, self.stand.device(device)["reserved_bytes"]) if self.disturbed == "restart" else free
            assert self.stand.device(device)["reserved_bytes"] <= free, "more was reserved than is free"
        assert all(until >= self.stand.now for _, _, until in self.waiting.values()), "a wait without an end"

    def after(self, began_at: float | None = None, asked: bool = False) -> None:
        """Judges the orders that came, and learns of owners that are late. `began_at`: the event was this reading;
        `asked`: it was a request for a reservation."""
        stand = self.stand
        stand.settle()
        passed: dict[str, set[int]] = {}
        if began_at is not None:
            for card in self.cards.values():
                card.leave_slow(stand.now)
        self.hear_of_reservations()
        for told in stand.told[self.told :]:
            self.hear_of_vain(told)
        given, self.seen = stand.given[self.seen :], len(stand.given)
        for client, order in given:
            if order.kind == "promote":
                assert not any(key(n) in order.keys for n in self.cards[order.device].entries)
                continue
            self.judge(client, order)
            if order.reason != "budget":
                passed.setdefault(order.device, set()).add(order.order)
        for device in {order.device for _, order in given if order.kind != "promote"}:
            row = stand.device(device)
            assert row["bytes"] - row["ordered_bytes"] >= row["floor_blocks"] * BLOCK, "below the floor"
        for device, orders in passed.items():
            card = self.cards[device]
            assert began_at is not None or asked, "a pass without a reading"
            open_orders = {e.order for e in card.entries.values() if e.open} & card.passes
            assert not open_orders, "a second pass before the first was acknowledged"
            assert began_at is None or began_at > card.closed_at, (
                "a second pass on a reading from before the first had ended"
            )
            card.passes, card.left_of, card.freed = orders, set(), False
            card.slow_orders, card.left_late = set(), False
        for told in stand.told[self.told :]:
            if told["event"] == "owner":
                card, client = self.cards[told["device"]], told["client"]
                (card.silent.add if told["unresponsive"] else card.silent.discard)(client)
                if told["unresponsive"]:
                    self.counted["timed_out"] += sum(e.open for e in card.entries.values() if e.client == client)
        self.told = len(stand.told)

    def hear_of_vain(self, told: dict[str, Any]) -> None:
        """Judges whether a pass was in vain, and learns of it."""
        if told["event"] == "mode" and told["gauge"] in self.cards:
            self.cards[told["gauge"]].vain.clear()
        elif told["event"] == "stuck":
            card = self.cards[told["device"]]
            if not told["why"]:
                card.vain.clear()
            else:
                assert card.left_of or card.left_late, "no pass had anything to do it with"
                assert not card.freed, "a pass that did something"
                card.vain.update(dict.fromkeys(card.left_of, self.stand.now))

    def judge(self, client: int, order: messages.Order) -> None:
        card, now = self.cards[order.device], self.stand.now
        gauge = next((g for g in self.stand.status()["gauges"] if g["gauge"] == order.device), None)
        lacks = gauge is not None and gauge["used_bytes"] - gauge["baseline_bytes"] >= 0.85 * (
            gauge["total_bytes"] - gauge["baseline_bytes"]
        )
        # A wait that is over ends with the Tick after the reading.
        waits = self.stand.device(order.device)["waiting_reservations"] > 0 or order.device in self.ended
        assert client not in card.silent, "an order to who does not answer"
        if order.reason != "budget" and client in card.vain:
            assert now >= card.vain[client] + RETRY_S, "asked in vain again too soon"
        assert len(set(order.keys)) == len(order.keys) > 0
        for each in order.keys:
            entry = card.entries[int.from_bytes(each[:8], "little")]
            assert entry.client == client, "an order to who does not own it"
            assert not entry.open, "ordered twice"
            early_s = RETRY_S - WAITING_RETRY_S if waits and order.reason != "budget" else 0.0
            assert entry.not_before - early_s <= now, "ordered again too soon"
            if order.reason in IDLE_S and not (order.reason in ("critical", "emergency") and lacks):
                assert entry.used_at <= now - IDLE_S[order.reason], f"not idle in {order.reason}"
            if not card.open_of(client):
                card.waits[client] = now
            entry.order, entry.open = order.order, True
            self.counted["ordered"] += 1
        if order.reason == "reservation":
            assert waits, "nobody waits for it"
        elif order.reason in ("pressure", "workflow_aware"):
            assert lacks, "ordered without need"
        elif order.reason != "budget":
            assert self.stand.mode(order.device) == order.reason

    def ask(self, client: int, make: Any, *args: Any, **more: Any) -> Any:
        self.stand.do(Tick())  # status is as of the last event
        self.after()
        before = self.stand.status()
        answer = self.stand.ask(client, make, *args, **more)
        if isinstance(answer, messages.Error):
            self.refused[answer.code] += 1
            after = self.stand.status()
            assert before["counters"].pop("refused") != after["counters"].pop("refused")
            assert before == after, "a refusal that changed something"
        return answer

    def client_of(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.stand.answers)))

    def mine(self, device: str, client: int) -> Iterator[tuple[int, Entry]]:
        return ((n, e) for n, e in self.cards[device].entries.items() if e.client == client)

    def heard(self, card: Card, client: int) -> None:
        """What the governor announces in the same event: a client that carries out orders answers again."""
        card.waits[client] = self.stand.now
        card.silent.discard(client)

    @invariant()
    def all_is_sound_and_the_sums_are_right(self) -> None:
        self.stand.check()
        status = self.stand.status()
        counters = status["counters"]
        assert counters.pop("refused") == dict(self.refused)
        for name in ("promoted", "passes", "transitions"):
            del counters[name]
        assert counters == {name: self.counted[name] for name in counters}
        rows = {row["device"]: row for row in status["devices"]}
        for name, card in self.cards.items():
            row = rows.get(name)
            assert (0 if row is None else row["entries"]) == len(card.entries)
            assert (0 if row is None else row["ordered_entries"]) == sum(e.open for e in card.entries.values())
            assert (0 if row is None else row["bytes"] - row["ordered_bytes"]) == card.resident_bytes()
        for row in status["owners"]:
            own = [entry for _, entry in self.mine(row["device"], row["client"])]
            assert (row["entries"], row["bytes"]) == (len(own), sum(entry.size for entry in own))
            assert row["ordered_entries"] == sum(entry.open for entry in own)
        silent = {(row["device"], row["client"]) for row in status["owners"] if row["unresponsive"]}
        assert silent == {(name, client) for name, card in self.cards.items() for client in card.silent}
        assert all(row["refuses"] == (row["level"] == "emergency") for row in status["gauges"])

    def teardown(self) -> None:
        if not hasattr(self, "stand"):
            return
        stand = self.stand
        for client in list(stand.answers):
            for device in DEVICES:
                stand.ask(client, messages.EndRoom, device)
            stand.leave(client)
        for row in stand.status()["gauges"]:
            assert row["baseline_bytes"] <= 0.95 * row["total_bytes"]
        stand.do(Sampled(()))
        stand.settle()
        counters, status = stand.status()["counters"], stand.status()
        gone = ("offloaded", "dropped", "released", "gone_with_owner")
        assert counters["registered"] == sum(counters[name] for name in gone)
        assert status["owners"] == status["workflows"] == status["gauges"] == []
        assert status["reservations"] == status["remembered"] == 0
        assert stand.governor.next_timer() is None
        assert not stand.press.refuse and stand.press.resident_bytes_max is None
        stand.check()
