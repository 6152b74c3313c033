"""Every policy passes the conformance suite; lru agrees with a plain model."""

from __future__ import annotations

from heapq import heappop, heappush

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from tensord.daemon.replacement import POLICIES

from .conformance import AnyPolicy, check
from .rows import Rows


class LRUModel(AnyPolicy):
    """Victims come in the order of their last uses."""

    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.uses = 0
        self.last_use: dict[int, int] = {}

    def was_put(self, row: int) -> None:
        super().was_put(row)
        self.was_used(row)

    def was_used(self, row: int) -> None:
        self.uses += 1
        self.last_use[row] = self.uses

    def expected(self, most: int, owners: set[int] | None) -> list[int]:
        chosen: list[int] = []
        for protects in (True, False):
            left = {row: self.children(row) for row in self.rows.live}
            ahead: list[tuple[int, int]] = []

            def may_follow(row: int, protects: bool = protects) -> bool:
                theirs = not owners or self.owner(row) in owners
                return (
                    theirs and row not in self.held and row not in self.out and not (protects and self.in_window(row))
                )

            for row in self.rows.live:
                if not left[row] and row not in chosen and may_follow(row):
                    heappush(ahead, (self.last_use[row], row))
            while ahead and len(chosen) < most:
                row = heappop(ahead)[1]
                chosen.append(row)
                above = self.parent(row)
                if above:
                    left[above] -= 1
                    if not left[above] and may_follow(above):
                        heappush(ahead, (self.last_use[above], above))
        return chosen

    @rule(most=st.integers(1, 12), owners=st.sampled_from([None, {1}, {1, 2}]), looks=st.booleans())
    def choose(self, most: int, owners: set[int] | None, looks: bool) -> None:
        expected = self.expected(most, owners)
        super().choose(most, owners, looks)
        assert self.out[len(self.out) - len(expected) :] == expected

    @invariant()
    def it_tells_the_last_uses(self) -> None:
        assert all(self.told.worth([row])[0] == self.last_use[row] for row in self.rows.live)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_one(name: str) -> None:
    check(LRUModel if name == "lru" else type(name, (AnyPolicy,), {"policy": name}))


@pytest.mark.parametrize("name", POLICIES)
def test_without_reads_rows_go_in_the_order_of_their_puts(name: str) -> None:
    rows = Rows(name, 2048)
    for key in range(2000):
        rows.put(key, key / 100)
    gone = [key for _ in range(20) for key in rows.evict(64)]
    assert gone == list(range(1280))


@pytest.mark.parametrize("name", POLICIES)
def test_a_row_that_was_just_read_is_not_the_next_to_go(name: str) -> None:
    rows = Rows(name, 2048)
    at = [rows.put(key, key / 100) for key in range(2000)]
    for oldest in range(0, 200, 2):
        rows.policy.used([at[oldest]], 20 + oldest / 100, 0)
        assert rows.evict(1) == [oldest + 1]
