"""The whole governor at random, against a model that only does the sums: who has what, who was told what."""

from __future__ import annotations

from itertools import cycle
from typing import Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tensord.daemon.forms.events import Tick
from tensord.daemon.governor.forms.events import AskNeighbour, NeighbourAnswered
from tensord.daemon.governor.forms.limits import NeighbourPlace
from tensord.ipc.messages import control as messages
from tensord.ipc.messages.control import AgentStep
from tensord.ipc.messages.modes import Mode

from .judged import (
    AGENTS,
    DEVICES,
    ENTRIES,
    NEIGHBOURS,
    NUMBERS,
    ONE_DEVICE,
    ONE_GAUGE,
    RESERVE_S_MAX,
    RETRY_S,
    ROOM_S_MAX,
    SHARES,
    Card,
    Entry,
    Judged,
)
from .stand import MIB, key


class AnyOrder(Judged):
    """What clients, gauges, neighbours and operators do, in any order."""

    @precondition(lambda self: len(self.stand.answers) < 4)
    @rule(devices=st.sampled_from([DEVICES, DEVICES[:1], []]))
    def join(self, devices: list[str]) -> None:
        self.clients += 1
        self.stand.join(self.clients)
        for device in devices:
            self.stand.open(self.clients, device=device)
            self.cards[device].owners.add(self.clients)

    @precondition(lambda self: len(self.stand.answers) > 1)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        client = self.client_of(data)
        self.stand.leave(client)
        for name, card in self.cards.items():
            for number, entry in list(self.mine(name, client)):
                card.close(entry, self.stand.now)
                del card.entries[number]
                self.counted["gone_with_owner"] += 1
            card.owners.discard(client)
            card.silent.discard(client)
            if not card.owners:
                self.cards[name] = Card()
        self.tokens = {token: owner for token, owner in self.tokens.items() if owner != client}
        self.waiting = {n: waiting for n, waiting in self.waiting.items() if waiting[0] != client}
        self.after()

    @rule(data=st.data(), device=ONE_DEVICE, entries=st.lists(ENTRIES, min_size=1, max_size=6))
    def register_entries(self, data: st.DataObject, device: str, entries: list[tuple[int, int, int, str]]) -> None:
        client = self.client_of(data)
        for entry in entries:
            self.register(client, device, *entry)

    def register(self, client: int, device: str, number: int, size: int, tokens: int, agent: str) -> None:
        card = self.cards[device]
        known = card.entries.get(number)
        emergency = any(t.gauge == device and t.mode is Mode.EMERGENCY for t in self.stand.governor.modes())
        answer = self.ask(client, messages.RegisterEntry, device, key(number), size, tokens, agent, new_bytes=size)
        if client not in card.owners:
            assert answer.code == "NoGauge"
        elif known is not None and known.client != client:
            assert answer.code == "OwnedElsewhere"
        elif known is None and emergency:
            assert answer.code == "UnderPressure"
        elif isinstance(answer, messages.Error):
            assert answer.code in ("DeviceFull", "BelowFloor")
            assert not self.fits(card, number, size, tokens), "refused though there was room"
        else:
            self.after()  # what goes for it was ordered before it came
            self.taken[device].append((self.stand.now, size))
            entry = card.entries.setdefault(number, Entry(client, size, self.stand.now, tokens))
            entry.used_at = self.stand.now
            self.counted["used" if known else "registered"] += 1
            assert known or self.fits(card, number, size, tokens), "more than the budget stays"
        self.after()

    def fits(self, card: Card, number: int, size: int, tokens: int) -> bool:
        """Whether the budgets have room for this entry beside those that stay."""
        limits, others = self.stand.limits, [e for n, e in card.entries.items() if n != number and not e.open]
        return len(others) < limits.max_entries and (
            limits.max_bytes is None or sum(e.size for e in others) + size <= limits.max_bytes
        )

    @rule(data=st.data(), device=ONE_DEVICE, numbers=st.lists(NUMBERS, max_size=4), uses=st.booleans())
    def use_or_release(self, data: st.DataObject, device: str, numbers: list[int], uses: bool) -> None:
        client, card = self.client_of(data), self.cards[device]
        keys = [key(number) for number in numbers]
        mine = {number for number, _ in self.mine(device, client)} & set(numbers)
        if uses:
            self.stand.say(client, messages.UseEntries(device, keys))
            for number in mine:
                card.entries[number].used_at = self.stand.now
                self.counted["used"] += numbers.count(number)
        else:
            assert self.ask(client, messages.ReleaseEntries, device, keys).count == len(mine)
            for number in mine:
                card.close(card.entries[number], self.stand.now)
                del card.entries[number]
                self.counted["released"] += 1
            if mine:
                self.heard(card, client)
        self.after()

    def orders_of(self, device: str) -> list[tuple[int, int]]:
        """Owners and orders that anything is left of."""
        return sorted({(e.client, e.order) for e in self.cards[device].entries.values() if e.order})

    @rule(
        data=st.data(),
        device=ONE_DEVICE,
        outcomes=st.lists(st.sampled_from(["offloaded", "dropped", "kept", None]), min_size=1, max_size=3),
        freed=st.sampled_from([0, MIB, 30 * MIB]),
    )
    def acknowledge_some(self, data: st.DataObject, device: str, outcomes: list[str | None], freed: int) -> None:
        """In part or whole, early or late; each entry with an outcome of its own."""
        orders = self.orders_of(device)
        if orders:
            self.acknowledge(device, *data.draw(st.sampled_from(orders)), outcomes, freed)

    @rule(outcome=st.sampled_from(["offloaded", "offloaded", "dropped", "kept"]), freed=st.sampled_from([0, 0, MIB]))
    def acknowledge_all(self, outcome: str, freed: int) -> None:
        for device in DEVICES:
            for client, order in self.orders_of(device):
                self.acknowledge(device, client, order, [outcome], freed)

    def acknowledge(self, device: str, client: int, order: int, outcomes: list[str | None], freed: int) -> None:
        card = self.cards[device]
        said: dict[str, list[bytes]] = {"offloaded": [], "dropped": [], "kept": []}
        under = [number for number, entry in self.mine(device, client) if entry.order == order]
        for number, outcome in zip(under, cycle(outcomes)):
            if outcome is None:
                continue
            said[outcome].append(key(number))
            entry = card.entries[number]
            if entry.open and order in card.passes and outcome != "kept":
                card.left_of.add(client)
            card.left_late |= order in card.slow_orders and outcome != "kept"
            card.close(entry, self.stand.now)
            entry.order, entry.not_before = 0, self.stand.now + RETRY_S
            self.counted[outcome] += 1
            if outcome != "kept":
                self.counted[f"{outcome}_bytes"] += entry.size
                del card.entries[number]
        if any(said.values()):
            self.counted["freed_bytes"] += freed
            if freed:
                card.freed |= order in card.passes
                card.vain.pop(client, None)
            self.heard(card, client)
            answer = self.ask(client, messages.AcknowledgeOrder, device, order, **said, freed_bytes=freed)
            assert isinstance(answer, messages.Done), answer
        self.after()

    @rule(
        gauge=ONE_GAUGE,
        share=st.sampled_from(SHARES),
        after_s=st.sampled_from([0.1, 1.0]),
        late_s=st.sampled_from([0.0, 0.0, 0.05, 0.9]),
        stale=st.sampled_from([False, False, False, True]),
    )
    def sample(self, gauge: str, share: float, after_s: float, late_s: float, stale: bool) -> None:
        began_at = self.stand.now + after_s - late_s
        self.stand.sample(share, gauge, after_s=after_s, began_at=began_at, stale=stale)
        self.after(began_at)

    @rule(
        device=ONE_DEVICE,
        idle_s=st.sampled_from([0.0, 6.0, 21.0, 41.0]),
        shares=st.lists(st.sampled_from(SHARES), min_size=2, max_size=5),
        late_s=st.sampled_from([0.0, 0.5]),
        outcome=st.sampled_from([None, "offloaded", "dropped", "kept"]),
        freed=st.sampled_from([0, MIB]),
    )
    def a_full_card_is_read(
        self, device: str, idle_s: float, shares: list[float], late_s: float, outcome: str | None, freed: int
    ) -> None:
        """Again and again, with what is ordered carried out between two readings, or not."""
        for number in range(12):
            if number not in self.cards[device].entries and self.cards[device].owners:
                owners = sorted(self.cards[device].owners)
                self.register(owners[number % len(owners)], device, number, 20 * MIB, number % 3, AGENTS[number % 4])
        self.pass_time(idle_s)
        for share in shares:
            if self.disturbed == "floors":
                self.requests_are_served(device, 20, 2)
            self.sample(device, share, 0.1, late_s, False)
            if outcome is not None:
                self.acknowledge_all(outcome, freed)

    @precondition(lambda self: self.disturbed == "gauges" and self.stand.gauges)
    @rule(data=st.data())
    def lose_a_gauge(self, data: st.DataObject) -> None:
        gauge = data.draw(st.sampled_from(sorted(self.stand.gauges)))
        self.stand.lose(gauge)
        self.after(self.stand.now)

    @rule(seconds=st.sampled_from([0.5, 2.0, 4.0, 25.0]))
    def pass_time(self, seconds: float) -> None:
        end = self.stand.now + seconds
        while (timer := self.stand.governor.next_timer()) is not None and timer <= end:
            self.stand.now = max(self.stand.now, timer)
            self.after()
        self.stand.now = end

    @rule(resident=st.integers(0, 500), settled=st.booleans())
    def store_says(self, resident: int, settled: bool) -> None:
        self.stand.holds(resident * MIB, 500 * MIB, settled=settled)
        assert (self.stand.press.resident_bytes_max or 0) >= 0
        self.after()

    @rule(
        data=st.data(),
        name=st.sampled_from("vwx"),
        agents=st.lists(st.sampled_from(AGENTS[1:]), min_size=1),
        step=st.integers(0, 5),
        then=st.sampled_from(["register", "advance", "end"]),
    )
    def workflow(self, data: st.DataObject, name: str, agents: list[str], step: int, then: str) -> None:
        client = self.client_of(data)
        if then == "register":
            self.ask(
                client, messages.RegisterWorkflow, name, [AgentStep(a, step_index=n) for n, a in enumerate(agents)]
            )
        elif then == "advance":
            self.ask(client, messages.AdvanceWorkflow, name, step)
        else:
            self.ask(client, messages.EndWorkflow, name)
        self.after()

    @rule(
        data=st.data(),
        device=ONE_DEVICE,
        size=st.sampled_from([1, 50, 100, 300, 400, 600, 1001]),
        wait_s=st.sampled_from([0.0, 1.0, 6.0, 60.0]),
        room=st.booleans(),
    )
    def reserve(self, data: st.DataObject, device: str, size: int, wait_s: float, room: bool) -> None:
        """A client asks for memory of its own, or an operator for room."""
        client = self.client_of(data)
        self.stand.do(Tick())
        self.after()
        number = self.stand._requests = self.stand._requests + 1
        make, wait_s_max = (messages.MakeRoom, ROOM_S_MAX) if room else (messages.ReserveDevice, RESERVE_S_MAX)
        self.waiting[number] = client, device, self.stand.now + min(wait_s, wait_s_max)
        self.stand.say(client, make(number, device, size * MIB, 5.0, wait_s))
        self.after(asked=True)
        assert wait_s or number not in self.waiting

    def neighbours_asked(self) -> list[AskNeighbour]:
        return [each for each in self.stand.neighbours_asked if each.number not in self.neighbours_told]

    @precondition(lambda self: self.neighbours_asked())
    @rule(data=st.data(), outcome=st.sampled_from(["done", "busy", "failed"]))
    def neighbour_answers(self, data: st.DataObject, outcome: Literal["done", "busy", "failed"]) -> None:
        asked = self.neighbours_asked()
        assert len({each.place for each in asked}) == len(asked), "a neighbour is asked twice at once"
        number = data.draw(st.sampled_from(asked)).number
        self.neighbours_told.add(number)
        self.stand.do(NeighbourAnswered(number, outcome, "why"))
        self.after()

    @precondition(lambda self: self.disturbed == "limits")
    @rule(neighbours=st.sampled_from([(), NEIGHBOURS]))
    def change_neighbours(self, neighbours: tuple[NeighbourPlace, ...]) -> None:
        self.stand.change_limits(neighbours=neighbours)
        self.after()

    @rule(data=st.data(), device=ONE_DEVICE)
    def end_room(self, data: st.DataObject, device: str) -> None:
        self.ask(self.client_of(data), messages.EndRoom, device)
        self.after()

    @precondition(lambda self: self.disturbed == "restart")
    @rule(data=st.data(), device=ONE_DEVICE, size=st.sampled_from([100, 600]))
    def hold_again(self, data: st.DataObject, device: str, size: int) -> None:
        client = self.client_of(data)
        answer = self.ask(client, messages.ReserveDevice, device, size * MIB, 5.0, held=True)
        if isinstance(answer, messages.Reserved):
            self.tokens[answer.reservation] = client
        else:
            assert answer.code == "LimitReached"
        self.after(asked=True)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def release_reservation(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(sorted(self.tokens)))
        self.ask(self.tokens.pop(token), messages.ReleaseReservation, token)
        self.after()

    @precondition(lambda self: self.disturbed == "floors")
    @rule(device=ONE_DEVICE, count=st.integers(1, 30), blocks=st.integers(0, 4))
    def requests_are_served(self, device: str, count: int, blocks: int) -> None:
        if device in self.stand.gauges or self.cards[device].entries:
            client = min(self.stand.answers)
            self.stand.say(client, messages.RequestsArrived(device, count))
            self.stand.say(client, messages.RequestCompleted(device, 0.5, blocks))
        self.after()

    @precondition(lambda self: self.disturbed == "baselines")
    @rule(configured=st.sampled_from([(), (("", 500 * MIB),), (("", 2000 * MIB), (DEVICES[0], 300 * MIB))]))
    def change_baselines(self, configured: tuple[tuple[str, int], ...]) -> None:
        self.stand.change_limits(baselines=configured)
        self.after()

    @precondition(lambda self: self.disturbed == "limits")
    @rule(budget=st.sampled_from([None, 60 * MIB, 90 * MIB]), entries=st.sampled_from([3, 4, 1000]))
    def change_limits(self, budget: int | None, entries: int) -> None:
        self.stand.change_limits(max_bytes=budget, max_entries=entries)
        self.after()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
