"""A plain table of rows with the columns that policies read, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from tensord.daemon.replacement import POLICIES, Facts, Replacement
from tensord.daemon.replacement.known import Array
from tensord.daemon.store.table import RowTable


def digest_of(key: int) -> int:
    """A hash of a key, as the store's column has it."""
    return (key + 1) * 0x9E3779B97F4A7C15 % (1 << 64)


class Rows:
    """The rows of a store and its policy. Row 0 is never an entry."""

    def __init__(self, policy: str, many: int = 64) -> None:
        self.columns: dict[str, Array] = {}
        for each in fields(Facts):
            self.columns[each.name] = np.zeros(many, RowTable.__annotations__[each.name].lower())
        self.policy: Replacement = POLICIES[policy](Facts.of(self.columns.__getitem__))
        self.free = list(range(many - 1, 0, -1))
        self.live: dict[int, int] = {}
        """By row: the key."""

    def put(self, key: int, now: float = 0.0, size: int = 64, **facts: Any) -> int:
        """Stores an entry as a batch of one put, as `fill` does."""
        row = self.fill(key, size, **facts)
        self.policy.was_put(row)
        self.policy.batch_ended(now)
        return row

    def fill(
        self,
        key: int,
        size: int = 64,
        cost: float = 0.0,
        tokens: int = 0,
        owner: int = 1,
        agent: int = 0,
        parent: int = 0,
    ) -> int:
        """Takes a row and fills its columns, as a commit does. `parent`: a row."""
        row, columns = self.free.pop(), self.columns
        values = (digest_of(key), size, cost, tokens, owner, agent)
        for name, value in zip(("digests", "sizes", "costs", "tokens", "owners", "agents"), values, strict=True):
            columns[name][row] = value
        columns["depths"][row] = int(columns["depths"][parent]) + 1 if parent else 0
        columns["befores"][row] = int(columns["befores"][parent]) + int(columns["sizes"][parent]) if parent else 0
        columns["parents"][row] = parent
        columns["children"][row] = 0
        if parent:
            columns["children"][parent] += 1
        self.live[row] = key
        return row

    def remove(self, rows: Sequence[int], *, evicted: bool = True) -> None:
        """Ends entries, children before their parents."""
        for row in rows:
            assert not self.columns["children"][row] or not evicted, "children end before their parents"
            del self.live[row]
            parent = int(self.columns["parents"][row])
            if parent in self.live:
                self.columns["children"][parent] -= 1
        self.policy.removed(rows, evicted=evicted)
        self.free += reversed(rows)

    def evict(self, most: int) -> list[int]:
        """Evicts the coldest rows, and returns their keys in order."""
        rows = self.policy.victims(most)
        keys = [self.live[row] for row in rows]
        self.remove(rows)
        return keys
