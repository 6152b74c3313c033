"""Policies with exact orders stay exact in large stores."""

from __future__ import annotations

import random

import numpy as np
import pytest

from .rows import Rows

MANY = 6_000


@pytest.mark.parametrize("name", ["lru", "lfu", "sieve"])
def test_victims_of_a_large_store_come_in_the_order_of_their_ranks(name: str) -> None:
    chance = random.Random(1)
    rows = Rows(name, MANY + 1)
    for key in range(MANY):
        rows.put(key, 0.0)
    rows.policy.used([row for row in rows.live if chance.random() < 0.5], 1.0)
    last = (-1.0, -1.0)
    for batch in range(20):
        begins = rows.policy.window.begins(rows.policy._bytes)
        victims = rows.policy.victims(97)
        ranks = np.array(rows.policy._ranks(np.array(victims))).T  # type: ignore[attr-defined]
        for rank in map(tuple, ranks.tolist()):
            assert rank > last
            last = rank
        left = np.array(sorted(rows.live.keys() - set(victims)))
        left = left[rows.policy.window.put_at[left] <= begins]
        assert min(map(tuple, np.array(rows.policy._ranks(left)).T.tolist())) > last  # type: ignore[attr-defined]
        rows.remove(victims)
        if batch % 10 == 0:
            rows.policy.check_invariants()
