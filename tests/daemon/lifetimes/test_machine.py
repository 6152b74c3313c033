"""Puts, uses, ends, pins, expiry, sweeps, victims and scans in any order, beside a plain model of what is stored."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tensord.errors import LimitReached
from tensord.ipc.messages import control as messages

from ..store.rows import TAG, key_of
from .stand import SPAN, LifetimesStand

OTHER = b"other ns"
NUMBERS = st.integers(0, 11)


@dataclass
class Model:
    """An entry of the model. `ends`: when it expires; 0: never."""

    number: int
    parent: int | None
    ends: float
    ttl: float
    uses: int = 0


class LifetimesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stand = LifetimesStand(14 * SPAN)
        self.model: dict[int, Model] = {}
        self.pins: dict[tuple[int, int], float] = {}
        self.ended = 0

    def key(self, number: int) -> bytes:
        return key_of(number, TAG if number < 8 else OTHER)

    def is_pinned(self, number: int) -> bool:
        return any(pinned == number for _, pinned in self.pins)

    def gone(self, number: int) -> None:
        """In the model an entry has ended, with its descendants."""
        self.ended += 1
        del self.model[number]
        self.pins = {pin: until for pin, until in self.pins.items() if pin[1] != number}
        for child in [each.number for each in self.model.values() if each.parent == number]:
            self.gone(child)

    # ---- what clients do

    @rule(number=NUMBERS, ttl=st.sampled_from([0.0, 3.0, 9.0]), parent=st.one_of(st.none(), NUMBERS))
    def put(self, number: int, ttl: float, parent: int | None) -> None:
        if parent is not None and (parent not in self.model or parent == number or (parent < 8) != (number < 8)):
            parent = None
        if number in self.model:
            row = self.stand.row(self.key(number))
            self.stand.uses.put_again([row], self.stand.now)
            self.model[number].uses += 1
            return
        above = {"parent": self.key(parent)} if parent is not None else {}
        store = self.stand.rows
        row = store.put(self.key(number), now=self.stand.now, ttl=ttl, **above)  # type: ignore[arg-type]
        if row:
            self.stand.lifetimes.stored([row], self.stand.now, 1)
            self.model[number] = Model(number, parent, self.stand.now + ttl if ttl else 0.0, ttl)

    @rule(numbers=st.lists(NUMBERS, max_size=5))
    def read(self, numbers: list[int]) -> None:
        there = [number for number in numbers if number in self.model]
        rows = [self.stand.row(self.key(number)) for number in there]
        self.stand.read(others=[self.stand.rows.table.span_ids[row] for row in rows])
        for number in there:
            self.model[number].uses += 1

    @rule(number=NUMBERS)
    def touch(self, number: int) -> None:
        if number in self.model:
            self.stand.uses.touched([self.stand.row(self.key(number))], self.stand.now)
            entry = self.model[number]
            entry.uses += 1
            entry.ends = self.stand.now + entry.ttl if entry.ttl else 0.0

    @rule(client=st.integers(1, 2), number=NUMBERS, for_s=st.sampled_from([2.0, 20.0]))
    def pin(self, client: int, number: int, for_s: float) -> None:
        if number in self.model:
            until = self.stand.now + for_s
            try:
                self.stand.lifetimes.pin(client, self.stand.row(self.key(number)), until)
            except LimitReached:
                assert sum(each == client for each, _ in self.pins) == 4
                return
            self.pins[client, number] = until

    @rule(client=st.integers(1, 2), number=NUMBERS)
    def unpin(self, client: int, number: int) -> None:
        if number in self.model:
            self.stand.lifetimes.pins.unpin(client, self.stand.row(self.key(number)))
            self.pins.pop((client, number), None)

    @rule(client=st.integers(1, 2))
    def leave(self, client: int) -> None:
        self.stand.lifetimes.pins.client_left(client)
        self.pins = {pin: until for pin, until in self.pins.items() if pin[0] != client}

    @rule(numbers=st.sets(NUMBERS, max_size=3))
    def evict(self, numbers: set[int]) -> None:
        self.stand.outbox.now = self.stand.now
        rows = [self.stand.row(self.key(number)) for number in numbers if number in self.model]
        self.stand.lifetimes.end(rows, "explicit")
        self.stand.settle()
        for number in numbers:
            if number in self.model:
                self.gone(number)

    @rule(tag=st.sampled_from([None, TAG, OTHER]))
    def clear(self, tag: bytes | None) -> None:
        before = self.ended
        self.stand.clear(1, tag)
        self.stand.settle()
        for number in range(12):
            if number in self.model and tag in (None, self.key(number)[:8]):
                self.gone(number)
        assert self.stand.answers[1].pop() == messages.Counted(1, self.ended - before)

    # ---- the store

    @rule(lane_pins=st.sets(NUMBERS, max_size=2))
    def scan(self, lane_pins: set[int]) -> None:
        table = self.stand.rows.table
        pinned = {table.span_ids[self.stand.row(self.key(number))] for number in lane_pins if number in self.model}
        self.stand.outbox.now = self.stand.now
        hidden = {number for number in self.model if self.key(number) in self.stand.rows.spans.hidden}
        self.stand.rows.scan(pinned)
        for number in hidden:
            if number in self.model and not self.stand.row(self.key(number)):
                self.gone(number)

    @precondition(lambda self: self.model)
    @rule(most=st.integers(1, 4))
    def choose_victims(self, most: int) -> None:
        rows = self.stand.rows.policy.victims(most)
        assert not any(self.stand.lifetimes.pins.holds(row) for row in rows)
        self.stand.rows.spans.hide(rows, "capacity")

    @rule(seconds=st.sampled_from([0.5, 2.0, 7.0]))
    def pass_time(self, seconds: float) -> None:
        until = self.stand.now + seconds
        self.stand.pass_time(seconds)
        self.stand.pass_time(0.01)
        self.stand.now = until
        self.pins = {pin: ends for pin, ends in self.pins.items() if ends > until}
        for number in list(self.model):
            if number in self.model and not self.stand.row(self.key(number)):
                entry = self.model[number]
                assert entry.ends and entry.ends <= until + 0.02, "ended before its time"
                assert not self.is_pinned(number)
                self.gone(number)
        for number, entry in self.model.items():
            if entry.ends and entry.ends <= until - 0.02:
                kept = self.is_pinned(number) or any(each.parent == number for each in self.model.values())
                assert kept, "an expired entry stays for no reason"

    # ---- what holds

    @invariant()
    def the_same_is_stored(self) -> None:
        self.stand.check()
        stored = {number for number in range(12) if self.stand.row(self.key(number))}
        assert stored == set(self.model)
        status = self.stand.status()
        assert sum(status["evictions"].values()) == self.ended == len(self.stand.history)
        assert status["pins"] == len(self.pins)
        for number, entry in self.model.items():
            assert self.stand.entries.describe(self.stand.row(self.key(number)), self.stand.now)["uses"] == entry.uses


def test_lifetimes_agree_with_a_plain_model() -> None:
    effort = settings(max_examples=50, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(LifetimesMachine, settings=effort)
