"""Every policy passes the conformance suite; lru, lfu and sieve agree with plain models."""

from __future__ import annotations

import pytest

from tensord.daemon.replacement import POLICIES

from .conformance import AnyPolicy, Exact, check
from .rows import Rows


class LRUModel(Exact):
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.uses = 0

    def was_put(self, row: int) -> None:
        super().was_put(row)
        self.was_used(row)

    def was_used(self, row: int) -> None:
        self.uses += 1
        self.rank[row] = (self.uses, 0)


class LFUModel(LRUModel):
    policy = "lfu"

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[int, int] = {}
        self.age = 0.0

    def was_put(self, row: int) -> None:
        self.counts[row] = 0
        super().was_put(row)

    def was_used(self, row: int) -> None:
        self.uses += 1
        self.counts[row] += 1
        self.rank[row] = (self.counts[row] + self.age, self.uses)

    def was_taken(self, rows: list[int], of_all: bool) -> None:
        if of_all:
            self.age = max([self.age, *(self.rank[row][0] for row in rows)])


class SieveModel(Exact):
    """The hand as a position; a bit says whether a row was used since its last visit."""

    policy = "sieve"

    def __init__(self) -> None:
        super().__init__()
        self.puts = 0
        self.hand = (0.0, 0.0)

    def was_put(self, row: int) -> None:
        super().was_put(row)
        self.puts += 1
        self.rank[row] = (self.hand[0], self.puts)

    def was_used(self, row: int) -> None:
        place = self.rank[row][1]
        next_visit = self.hand[0] if place >= self.hand[1] else self.hand[0] + 1
        self.rank[row] = (next_visit + 1, place)

    def was_taken(self, rows: list[int], of_all: bool) -> None:
        if of_all and rows:
            lap, place = max(self.rank[row] for row in rows)
            self.hand = max(self.hand, (lap, place + 1))


@pytest.mark.parametrize("model", [LRUModel, LFUModel, SieveModel])
def test_a_policy_agrees_with_its_model(model: type[Exact]) -> None:
    check(model)


@pytest.mark.parametrize("name", sorted(POLICIES.keys() - {"lru", "lfu", "sieve"}))
def test_a_policy_is_one(name: str) -> None:
    check(type(name, (AnyPolicy,), {"policy": name}))


@pytest.mark.parametrize("name", POLICIES)
def test_what_was_just_put_is_there_whatever_else_is_read(name: str) -> None:
    rows = Rows(name, 4096)
    for key in range(1000):
        rows.put(key)
    for round_of_reads in range(20):
        rows.policy.used(list(rows.live), 1.0 + round_of_reads)
    for key in range(1000, 1120):
        rows.put(key, 100.0)
        rows.policy.used([row for row, stored in rows.live.items() if stored < 1000], 101.0 + key)
        rows.evict(1)
    assert set(range(1000, 1120)) <= set(rows.live.values())


@pytest.mark.parametrize("name", POLICIES)
def test_without_reads_rows_go_in_the_order_of_their_puts(name: str) -> None:
    rows = Rows(name, 2048)
    for key in range(2000):
        rows.put(key, key / 100)
    gone = [key for _ in range(20) for key in rows.evict(64)]
    assert gone == list(range(1280))
