"""The table of one device's entries: one row for each, in columns.

Owns rows, keys, agents' names, and their sums, also those of each owner slot. Does not own the owner of a slot, the
meaning of an order number, or the choice of entries to evict.

A row is free, resident, or ordered away. Freed rows are used again; columns grow by doubling. `order`: the last order
that the row is under, also of a resident row whose owner was late; 0: none. `serial` rises from entry to entry, and
tells whether a row still has the same entry.

Invariants: a key has one row, and a row that is not free has one key. The sums are exactly those of the columns; they
are Python integers, since clients state the sizes and tokens. An agent's name is kept while a row has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

FREE: Final = 0
RESIDENT: Final = 1
ORDERED: Final = 2
USES_MAX: Final = 1 << 53
"""Uses are counted up to the largest count that a float64 represents exactly."""

Rows: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]
Column: TypeAlias = NDArray[Any]

_ROWS_MIN: Final = 64
_COLUMNS: Final[dict[str, Any]] = {
    "keys": np.object_,
    "owner": np.int32,
    "agent": np.int32,
    "size_bytes": np.int64,
    "tokens": np.int64,
    "uses": np.int64,
    "cost_ms": np.float64,
    "kind": np.uint8,
    "used_at": np.float64,
    "not_before": np.float64,
    "order": np.int64,
    "serial": np.int64,
    "state": np.uint8,
}


@dataclass(slots=True)
class Owned:
    """The sums of an owner slot. `bytes`: of all its entries."""

    entries: int = 0
    bytes: int = 0
    ordered_entries: int = 0


class Agents:
    """Names as small numbers, with a count of rows. A name without rows is forgotten, and its number is used again.

    Number 0 is the empty name: no agent. `version` changes whenever a number gets another name.
    """

    def __init__(self) -> None:
        self.names: list[str] = [""]
        self.version = 0
        self._numbers: dict[str, int] = {}
        self._rows: list[int] = [0]
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def known(self) -> AbstractSet[str]:
        """The names that rows have."""
        return self._numbers.keys()

    def number(self, name: str) -> int | None:
        """The number of a name; None if no row has it."""
        return self._numbers.get(name)

    def take(self, name: str, rows: int = 1) -> int:
        """The number of a name. Adds `rows` to its count."""
        if not name:
            return 0
        number = self._numbers.get(name)
        if number is None:
            self.version += 1
            if self._free:
                number = self._free.pop()
                self.names[number] = name
            else:
                number = len(self.names)
                self.names.append(name)
                self._rows.append(0)
            self._numbers[name] = number
        self._rows[number] += rows
        return number

    def give(self, number: int, rows: int = 1) -> None:
        """Subtracts `rows` from the name's count."""
        if not number:
            return
        self._rows[number] -= rows
        if not self._rows[number]:
            del self._numbers[self.names[number]]
            self.names[number] = ""
            self._free.append(number)

    def check_invariants(self, numbers: Column) -> None:
        """Asserts that the counts are those of `numbers`, one for each row."""
        counts = np.bincount(numbers, minlength=len(self.names)).tolist()
        assert counts[1:] == self._rows[1:], "rows of an agent were miscounted"
        assert all(self.names[number] == name for name, number in self._numbers.items())
        assert len(self._numbers) + len(self._free) == len(self.names) - 1


class Table:
    """Columns to read, and methods to change them. Row numbers are valid until a row is removed."""

    keys: NDArray[np.object_]
    owner: NDArray[np.int32]
    agent: NDArray[np.int32]
    size_bytes: Rows
    tokens: Rows
    uses: Rows
    cost_ms: NDArray[np.float64]
    kind: NDArray[np.uint8]
    used_at: NDArray[np.float64]
    not_before: NDArray[np.float64]
    order: Rows
    serial: Rows
    state: NDArray[np.uint8]

    def __init__(self) -> None:
        for name, dtype in _COLUMNS.items():
            setattr(self, name, np.zeros(_ROWS_MIN, dtype))
        self.agents = Agents()
        self.end = 0
        """No row from here on was ever used."""
        self.bytes = self.all_tokens = 0
        self.ordered_entries = self.ordered_bytes = self.ordered_tokens = 0
        self.last_serial = 0
        self._owned: dict[int, Owned] = {}
        self._rows: dict[bytes, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def owned(self, owner: int) -> Owned:
        """The sums of an owner slot, without a walk."""
        return self._owned.get(owner) or Owned()

    def find(self, key: bytes) -> int | None:
        """A key's row."""
        return self._rows.get(key)

    def rows(self, keys: Sequence[bytes]) -> Rows:
        """The row of each key, int64; -1 for an unknown key."""
        return np.fromiter(map(self._rows.get, keys, repeat(-1)), np.int64, len(keys))

    def add(
        self,
        key: bytes,
        owner: int,
        size_bytes: int,
        tokens: int,
        agent: str,
        uses: int,
        now: float,
        cost_ms: float = 0.0,
        kind: int = 0,
    ) -> int:
        """Adds a row for a key without one."""
        row = self._free.pop() if self._free else int(self._take(1)[0])
        self._rows[key] = row
        self.keys[row] = key
        self.owner[row] = owner
        self.agent[row] = self.agents.take(agent)
        self.size_bytes[row] = size_bytes
        self.tokens[row] = tokens
        self.uses[row] = min(uses, USES_MAX)
        self.cost_ms[row], self.kind[row] = cost_ms, kind
        self.used_at[row] = now
        self.not_before[row] = 0.0
        self.order[row] = 0
        self.last_serial += 1
        self.serial[row] = self.last_serial
        self.state[row] = RESIDENT
        self.bytes += size_bytes
        self.all_tokens += tokens
        self._own(owner, 1, size_bytes)
        return row

    def copy(self, other: Table, rows: Rows, owner: int, now: float) -> None:
        """Adds rows of another table, whose keys are not in this one, as rows of this owner. Their uses are kept."""
        keys = other.keys[rows]
        own = self._take(len(rows))
        self._rows.update(zip(keys.tolist(), own.tolist(), strict=True))
        self.keys[own] = keys
        self.owner[own] = owner
        numbers = other.agent[rows]
        for number, count in runs(numbers):
            self.agent[own[numbers == number]] = self.agents.take(other.agents.names[number], count)
        self.size_bytes[own] = other.size_bytes[rows]
        self.tokens[own] = other.tokens[rows]
        self.uses[own] = other.uses[rows]
        self.cost_ms[own], self.kind[own] = other.cost_ms[rows], other.kind[rows]
        self.used_at[own] = now
        self.not_before[own] = 0.0
        self.order[own] = 0
        self.serial[own] = np.arange(self.last_serial + 1, self.last_serial + 1 + len(rows))
        self.last_serial += len(rows)
        self.state[own] = RESIDENT
        size_bytes = exact_sum(self.size_bytes[own])
        self.bytes += size_bytes
        self.all_tokens += exact_sum(self.tokens[own])
        self._own(owner, len(rows), size_bytes)

    def replace(self, row: int, size_bytes: int, tokens: int, agent: str, cost_ms: float = 0.0, kind: int = 0) -> None:
        """Replaces what a registration says of a row; its uses, owner and order are kept."""
        more_bytes, more_tokens = size_bytes - int(self.size_bytes[row]), tokens - int(self.tokens[row])
        self.bytes += more_bytes
        self.all_tokens += more_tokens
        self._own(int(self.owner[row]), 0, more_bytes)
        if self.state[row] == ORDERED:
            self.ordered_bytes += more_bytes
            self.ordered_tokens += more_tokens
        self.size_bytes[row], self.tokens[row] = size_bytes, tokens
        self.cost_ms[row], self.kind[row] = cost_ms, kind
        number = self.agents.take(agent)
        self.agents.give(int(self.agent[row]))
        self.agent[row] = number

    def use(self, rows: Rows, now: float) -> None:
        """Counts one use for each time that a row is in `rows`."""
        np.add.at(self.uses, rows, 1)
        self.uses[rows] = np.minimum(self.uses[rows], USES_MAX)
        self.used_at[rows] = now

    def mark_ordered(self, rows: Rows, order: int | Rows) -> None:
        """Marks resident rows as ordered away, each by its number in `order`."""
        self._sum_ordered(rows, 1)
        self.state[rows] = ORDERED
        self.order[rows] = order

    def take_back(self, rows: Rows, not_before: float) -> None:
        """Makes ordered rows resident again; they are not ordered before `not_before`. They keep their order number."""
        self._sum_ordered(rows, -1)
        self.state[rows] = RESIDENT
        self.not_before[rows] = not_before

    def remove(self, rows: Rows) -> None:
        """Frees rows, each listed once."""
        self._sum_ordered(rows[self.state[rows] == ORDERED], -1)
        self.bytes -= exact_sum(self.size_bytes[rows])
        self.all_tokens -= exact_sum(self.tokens[rows])
        owners = self.owner[rows]
        for owner, count in runs(owners):
            self._own(owner, -count, -exact_sum(self.size_bytes[rows[owners == owner]]))
        for key in self.keys[rows].tolist():
            del self._rows[key]
        for number, count in runs(self.agent[rows]):
            self.agents.give(number, count)
        self.keys[rows] = None
        self.agent[rows] = 0
        self.state[rows] = FREE
        self.order[rows] = 0
        if self._rows:
            self._free.extend(rows.tolist())
        else:
            self.end = 0
            self._free.clear()

    def where(self, *, owner: int, state: int | None = None) -> Rows:
        """The rows of an owner slot in one state; None: in any state except free."""
        states = self.state[: self.end]
        mask = states != FREE if state is None else states == state
        return np.flatnonzero(mask & (self.owner[: self.end] == owner))

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        live = np.flatnonzero(self.state[: self.end] != FREE)
        assert not self.state[self.end :].any()
        assert {key: row for row, key in zip(live.tolist(), self.keys[live].tolist(), strict=True)} == self._rows
        assert sorted([*live.tolist(), *self._free]) == list(range(self.end)), "a row is lost, or twice free"
        self.agents.check_invariants(self.agent[live])
        ordered = live[self.state[live] == ORDERED]
        assert self.bytes == sum(self.size_bytes[live].tolist()), "bytes were miscounted"
        assert self.all_tokens == sum(self.tokens[live].tolist()), "tokens were miscounted"
        assert self.ordered_entries == len(ordered)
        owned: dict[int, Owned] = {}
        for row in live.tolist():
            each = owned.setdefault(int(self.owner[row]), Owned())
            each.entries += 1
            each.bytes += int(self.size_bytes[row])
            each.ordered_entries += int(self.state[row] == ORDERED)
        assert self._owned == owned, "an owner's entries were miscounted"
        assert self.ordered_bytes == sum(self.size_bytes[ordered].tolist())
        assert self.ordered_tokens == sum(self.tokens[ordered].tolist())
        assert (self.order[ordered] > 0).all(), "a row is ordered away by no order"
        assert (self.uses[live] > 0).all() and (self.tokens[live] >= 0).all() and (self.size_bytes[live] > 0).all()

    def _take(self, count: int) -> Rows:
        """`count` unused rows."""
        freed = self._free[max(0, len(self._free) - count) :]
        del self._free[len(self._free) - len(freed) :]
        first, self.end = self.end, self.end + count - len(freed)
        while self.end > len(self.state):
            for name in _COLUMNS:
                column = getattr(self, name)
                longer = np.zeros(2 * len(column), column.dtype)
                longer[: len(column)] = column
                setattr(self, name, longer)
        return np.array([*freed, *range(first, self.end)], np.int64)

    def _own(self, owner: int, entries: int, size_bytes: int) -> None:
        owned = self._owned.setdefault(owner, Owned())
        owned.entries += entries
        owned.bytes += size_bytes
        if not owned.entries:
            del self._owned[owner]

    def _sum_ordered(self, rows: Rows, sign: int) -> None:
        for owner, count in runs(self.owner[rows]):
            self._owned[owner].ordered_entries += sign * count
        self.ordered_entries += sign * len(rows)
        self.ordered_bytes += sign * exact_sum(self.size_bytes[rows])
        self.ordered_tokens += sign * exact_sum(self.tokens[rows])


def exact_sum(values: Rows) -> int:
    """The exact sum of non-negative int64 values, even beyond 64 bits."""
    return (int((values >> 32).sum()) << 32) + int((values & 0xFFFFFFFF).sum())


def runs(values: Column) -> list[tuple[int, int]]:
    """Each number in `values` with its count. Not np.unique: its first call in a process takes 20 ms."""
    if not len(values):
        return []
    ordered = np.sort(values)
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    counts = np.diff(starts, append=len(ordered))
    return list(zip(ordered[starts].tolist(), counts.tolist(), strict=True))
