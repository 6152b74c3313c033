"""The conformance suite that every replacement policy has to pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tensord.daemon.replacement import Turn

from .rows import Rows, digest_of

TURNS: tuple[Turn, ...] = ("began", "tool_call", "turn_ended", "finished")
ROWS = 40


class AnyPolicy(RuleBasedStateMachine):
    """What the store relies on: which rows a policy may name as victims, and which it must."""

    policy = ""

    def __init__(self) -> None:
        super().__init__()
        self.rows = Rows(self.policy, ROWS)
        self.told = self.rows.policy
        self.held: set[int] = set()
        self.out: list[int] = []
        self.now = 0.0
        self.put_bytes = 0
        self.put_at: dict[int, int] = {}

    # ---- the model

    def size(self, row: int) -> int:
        return int(self.rows.columns["sizes"][row])

    def owner(self, row: int) -> int:
        return int(self.rows.columns["owners"][row])

    def parent(self, row: int) -> int:
        return int(self.rows.columns["parents"][row])

    def children(self, row: int) -> int:
        return int(self.rows.columns["children"][row])

    def in_window(self, row: int) -> bool:
        """Exact: an eighth of the stored bytes."""
        stored = sum(map(self.size, self.rows.live))
        return self.put_at[row] > max(self.put_bytes - stored // 8, 0)

    def is_free(self, row: int) -> bool:
        return row not in self.held and row not in self.out and not self.children(row)

    def was_put(self, row: int) -> None:
        self.put_bytes += self.size(row)
        self.put_at[row] = 0 if self.parent(row) else self.put_bytes

    def was_used(self, row: int) -> None:
        """For models of a policy's ranks."""

    # ---- what happens

    @rule(by=st.sampled_from([0.01, 1.0, 100.0]))
    def time_passes(self, by: float) -> None:
        self.now += by

    @rule(
        keys=st.lists(st.integers(1, 60), min_size=1, max_size=8, unique=True),
        size=st.sampled_from([64, 4096]),
        tokens=st.sampled_from([0, 16]),
        owner=st.sampled_from([1, 2]),
        agent=st.sampled_from([0, 2, 3]),
        in_sequence=st.booleans(),
        data=st.data(),
    )
    def put(
        self, keys: list[int], size: int, tokens: int, owner: int, agent: int, in_sequence: bool, data: st.DataObject
    ) -> None:
        stored = set(self.rows.live.values())
        parent = 0
        alive = sorted(self.rows.live.keys() - set(self.out))
        if in_sequence and alive:
            parent = data.draw(st.sampled_from(alive))
        for key in keys:
            if key in stored or not self.rows.free:
                continue
            if parent:
                self.told.admits(digest_of(key), size, parent, tokens=tokens, agent=agent)
            row = self.rows.fill(key, size, 0.0, tokens, owner, agent, parent)
            self.told.was_put(row)
            self.was_put(row)
            parent = row if in_sequence else 0
        self.told.batch_ended(self.now)

    @precondition(lambda self: self.rows.live)
    @rule(data=st.data(), agent=st.sampled_from([0, 2, 3]))
    def use(self, data: st.DataObject, agent: int) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.rows.live)), min_size=1, max_size=8))
        self.told.used(rows, self.now, agent)
        for row in rows:
            self.was_used(row)

    @precondition(lambda self: self.rows.live)
    @rule(data=st.data())
    def put_again(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows.live)))
        self.told.put_again(row)
        self.put_at[row] = self.put_at[row] and self.put_bytes

    @rule(agent=st.sampled_from([2, 3, 4]), state=st.sampled_from(TURNS))
    def turn(self, agent: int, state: Turn) -> None:
        self.told.turn(agent, state, self.now)

    @precondition(lambda self: self.rows.live.keys() - set(self.out))
    @rule(data=st.data())
    def change_whether_it_may_go(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows.live.keys() - set(self.out))))
        self.held ^= {row}
        self.told.may_go([row], row not in self.held)

    @precondition(lambda self: any(not self.children(row) for row in self.rows.live))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(row for row in self.rows.live if not self.children(row))))
        self.ended([row], evicted=False)

    @rule(most=st.integers(1, 12), owners=st.sampled_from([None, {1}, {1, 2}]), looks=st.booleans())
    def choose(self, most: int, owners: set[int] | None, looks: bool) -> None:
        looked = self.told.coldest(most) if looks else []
        free = {row for row in self.rows.live if self.is_free(row) and (not owners or self.owner(row) in owners)}
        outside = {row for row in free if not self.in_window(row)}
        window = {row for row in self.rows.live if self.in_window(row)}
        rows = self.told.victims(most, owners)
        assert len(rows) == len(set(rows)) <= most
        assert owners or not looks or rows == looked, "a look at the coldest rows is no choice"
        assert len(rows) >= min(most, len(free)), "a row that may go was not named"
        left = {row: self.children(row) for row in self.rows.live}
        for at, row in enumerate(rows):
            assert row not in self.held and row not in self.out and (not owners or self.owner(row) in owners)
            assert not left[row], "a parent before its child"
            assert row not in window or outside <= set(rows[:at]), "a row of the window before another"
            left[self.parent(row)] = left.get(self.parent(row), 0) - 1
        self.out += rows

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def scan_has_ended(self, data: st.DataObject) -> None:
        pinned = set(data.draw(st.lists(st.sampled_from(self.out), max_size=3)))
        out, self.out = self.out, []
        kept: list[int] = []
        gone: list[int] = []
        for row in out:
            if row in pinned or self.children(row) > sum(self.parent(each) == row for each in gone):
                kept.append(row)
            else:
                gone.append(row)
        self.told.may_go(kept, True)
        self.ended(gone, evicted=True)

    def ended(self, rows: list[int], *, evicted: bool) -> None:
        if rows:
            ended = set(rows)
            self.rows.remove(rows, evicted=evicted)
            self.held -= ended
            self.out = [row for row in self.out if row not in ended]

    # ---- what always holds

    @invariant()
    def it_knows_what_is_stored(self) -> None:
        self.told.check_invariants()
        assert np.flatnonzero(self.told._flags).tolist() == sorted(self.rows.live)
        for row in self.rows.live:
            assert self.told.in_window(row) == self.in_window(row)
            told = self.told.explain(row)
            assert self.told.standings([row])[0][0] == told.in_window
            assert told.worth == self.told.worth([row])[0] and told.in_window == self.in_window(row)


def check(machine: Callable[[], AnyPolicy]) -> None:
    """Runs a suite, which is derived from AnyPolicy."""
    effort = settings(max_examples=40, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(machine, settings=effort)  # type: ignore[arg-type]  # it takes any callable
