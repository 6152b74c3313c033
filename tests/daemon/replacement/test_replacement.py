"""Every policy passes the conformance suite; lru agrees with a plain model."""

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


def test_lru_agrees_with_its_model() -> None:
    check(LRUModel)


@pytest.mark.parametrize("name", sorted(POLICIES.keys() - {"lru"}))
def test_a_policy_is_one(name: str) -> None:
    check(type(name, (AnyPolicy,), {"policy": name}))


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
