"""Every policy passes the conformance suite; lru agrees with a plain model."""

from __future__ import annotations

import random

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


def test_lru_agrees_with_its_model() -> None:
    check(LRUModel)


@pytest.mark.parametrize("name", sorted(POLICIES.keys() - {"lru"}))
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


def test_lru_is_exact_in_a_large_store() -> None:
    chance, rows = random.Random(1), Rows("lru", 6_001)
    for key in range(6_000):
        rows.put(key, 0.0)
    used = [row for row in rows.live if chance.random() < 0.5]
    expected = [rows.live[row] for row in sorted(rows.live.keys() - set(used))] + [rows.live[row] for row in used]
    rows.policy.used(used, 1.0)
    gone = [key for _ in range(20) for key in rows.evict(97)]
    rows.policy.check_invariants()
    # The window has the keys that were put last.
    assert gone == [key for key in expected if key < 5_000][: len(gone)]
