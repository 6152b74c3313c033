"""The rows that a policy knows: their facts, which of them may go, and the window of new ones.

    put → `was_put(row)`     batch of puts → `batch_ended(now)`     READ_AT rows → the policy takes them in

A put only appends its row. The policy takes the new rows in as one batch of arrays, at the latest when a batch of puts
ends with READ_AT of them, and before anything else that it does. So a row is never freed, and used again, while it
waits here. An entry leaves the window without any work: its place in the order of puts is a number, `put_at`, and the
policy compares it with the bytes of all puts.

Owns: the rows that were put and not taken in yet, the place of each row in the order of puts, and which rows are known,
held or handed out. Does not own the columns of the store, nor the order in which rows go (`replacement`).

Invariants: `put_at` only rises along the order of puts. A row with a parent is never in the window: a later block of a
sequence must be worth its place from the start (docs/replacement.md has the trials).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

import numpy as np
from msgspec import Struct

WINDOW_SHARE: Final = 1 / 8
"""The window's share of the stored bytes: more than the promised tenth of the ring, because the ring has holes."""
READ_AT: Final = 256
"""New rows that are taken in at once. Arrays of this length cost about 0.2 µs a row and operation less than rows."""
RUN: Final = 16
"""A sample has runs of this many rows that follow one another: they are in the same lines of the processor's cache."""
RECOVERED_AT_ONCE: Final = 1 << 12
KNOWN: Final = 1
HELD: Final = 2
"""The store said that the row may not go."""
OUT: Final = 4
"""Handed out by `victims`, and neither removed nor kept since."""

Turn = Literal["began", "tool_call", "turn_ended", "finished"]
Array = np.ndarray[Any, Any]
Batches = list[tuple[int, float]]
"""Numbers of rows, each with the time at which they were put."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The store's columns, by row, which a policy only reads. They are filled when the row is put.

    Args:
        digests: a hash of the key, uint64.
        sizes: bytes of the ring, uint64.
        costs: milliseconds that computing it took; 0 if not known.
        tokens: the tokens that it stands for; 0 if not known.
        owners: the number of the uid that put it.
        agents: the number of the agent that put it: 0 none. 1 is never an agent's number.
        depths: its ancestors in its sequence, at most 65,535.
        befores: bytes of these ancestors.
        parents: the row of its parent; 0 if it has none, so row 0 is no entry.
        children: the number of its children that are stored.
    """

    digests: Array
    sizes: Array
    costs: Array
    tokens: Array
    owners: Array
    agents: Array
    depths: Array
    befores: Array
    parents: Array
    children: Array

    @classmethod
    def of(cls, column: Callable[[str], Array]) -> Facts:
        """The columns of a table, which gives them by these names."""
        return cls(*(column(each.name) for each in fields(cls)))


class Explained(Struct, frozen=True):
    """A policy's knowledge of a stored entry, or of an evicted key that it remembers.

    Args:
        worth: of two entries that may be evicted, the one with the lower worth is evicted first. Comparable only
            between entries of one policy.
        uses: the put and all later uses that the policy counted, including those before an eviction. None: the policy
            does not count uses.
        like: the traits of the entry's class, in words.
        comes_back: the share of entries of that class, unused for as long, that were used again, evicted or not. None:
            too few are known, or the policy does not learn.
        in_window: the entry was put so recently that it is evicted only if no other entry can be.
    """

    worth: float
    uses: int | None = None
    like: tuple[str, ...] = ()
    comes_back: float | None = None
    in_window: bool = False


class KnownRows(ABC):
    """The rows of one store, as far as they do not differ between policies."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._new: list[int] = []
        self.was_put = self._new.append
        """Adds a row that was put: all that a put does."""
        self._marked = 0
        self._batches: Batches = []
        """The new rows whose batches have ended, and these batches."""
        self._put_bytes = 0
        """Bytes of all puts that were taken in."""
        self.put_at = np.zeros(len(facts.sizes), np.uint64)
        """By row: `_put_bytes` with the row's put; 0 for a row that is never in the window."""
        self._flags = np.zeros(len(facts.sizes), np.uint8)
        self._top = 0
        """Above all rows that were ever known."""
        self._count = 0
        self._bytes = 0
        self._chance = np.random.default_rng(1)
        self._density = 1.0
        """The share of rows that may go and are outside the window, in the last sample."""

    @abstractmethod
    def _put(self, rows: Array, batches: Batches) -> None:
        """New rows, in the order of their puts; they are known already."""

    def batch_ended(self, now: float) -> None:
        """The rows that were put since the last call were put at `now`."""
        count = len(self._new)
        if count > self._marked:
            self._batches.append((count - self._marked, now))
            self._marked = count
            if count >= READ_AT:
                self.take_in()

    def take_in(self) -> None:
        """Takes in what was put since, but for a batch that has not ended. The policy does it by itself when it has
        to."""
        if not self._new:
            return
        rows, batches = np.array(self._new[: self._marked], np.int64), self._batches
        del self._new[: self._marked]
        self._batches, self._marked = [], 0
        if len(rows):
            self._place(rows)
            self._know(rows)
            self._put(rows, batches)

    def put_again(self, row: int) -> None:
        """A put named the key of a stored row: it belongs to the window again, unless it has a parent. It counts as a
        use too if the store reports one."""
        self.take_in()
        if self.put_at[row]:
            self.put_at[row] = self._put_bytes

    def in_window(self, row: int) -> bool:
        """Whether a stored row is evicted only if no other can be."""
        self.take_in()
        return bool(self.put_at[row] > self._window_begins())

    def are_in_window(self, rows: Array) -> Array:
        """`in_window` of many rows, (n,) bool."""
        self.take_in()
        found: Array = self.put_at[rows] > self._window_begins()
        return found

    def check_invariants(self) -> None:
        self.take_in()
        known = np.flatnonzero(self._flags & KNOWN)
        assert len(known) == self._count and (not len(known) or known[-1] < self._top)
        assert int(self._facts.sizes[known].sum()) == self._bytes
        assert not self._flags[(self._flags & KNOWN) == 0].any()
        assert not (self._flags & HELD & OUT).any()

    def _window_begins(self) -> int:
        """The window has the rows whose `put_at` is above this."""
        return max(self._put_bytes - int(WINDOW_SHARE * self._bytes), 0)

    def _place(self, rows: Array) -> None:
        """Rows were put, in this order."""
        ends = np.cumsum(self._facts.sizes[rows]) + np.uint64(self._put_bytes)
        self._put_bytes = int(ends[-1])
        self.put_at[rows] = np.where(self._facts.depths[rows] == 0, ends, 0)

    def _know(self, rows: Array) -> None:
        assert not self._flags[rows].any(), "a row was put twice"
        self._flags[rows] = KNOWN
        self._top = max(self._top, int(rows.max()) + 1)
        self._count += len(rows)
        self._bytes += int(self._facts.sizes[rows].sum())

    def _is_free(self, rows: Array) -> Array:
        """Which rows are known, childless, not held and not handed out."""
        free: Array = (self._flags[rows] & (KNOWN | HELD | OUT) == KNOWN) & (self._facts.children[rows] == 0)
        return free

    def _sample(self, count: int, owners: Array | None) -> tuple[Array, float]:
        """About `count` rows that may go and are outside the window, all if there are not many more; and the share of
        all such rows that they are, about."""
        looks = count / self._density if owners is None else count
        if self._top > 2 * looks:
            runs = int(looks) // RUN
            # One run in each of as many equal ranges of the table.
            width = self._top / runs
            starts = (np.arange(runs) * width + self._chance.random(runs) * (width - RUN)).astype(np.int64)
            rows = (starts[:, None] + np.arange(RUN)).ravel()
            found = self._outside(rows[self._flags[rows] == KNOWN], owners)
            if len(found) >= count // 8:
                if owners is None:
                    self._density = len(found) / len(rows)
                return found, len(rows) / self._top
        found = self._outside(np.flatnonzero(self._flags[: self._top] == KNOWN), owners)
        if owners is None:
            self._density = max(len(found), 1) / max(self._top, 1)
        if len(found) <= 2 * count:
            return found, 1.0
        some = np.sort(self._chance.choice(len(found), count, replace=False, shuffle=False))
        return found[some], count / len(found)

    def _outside(self, rows: Array, owners: Array | None) -> Array:
        """Those of known rows, neither held nor handed out, that are childless and outside the window."""
        may = (self._facts.children[rows] == 0) & (self.put_at[rows] <= self._window_begins())
        return self._rows_of(rows[may], owners)

    def _rows_of(self, rows: Array, owners: Array | None) -> Array:
        return rows if owners is None else rows[self._are_theirs(rows, owners)]

    def _are_theirs(self, rows: Array, owners: Array) -> Array:
        # Not np.isin: its first call in a process loads numpy.ma, which takes 15 ms.
        wanted = np.zeros(1 << 16, np.bool_)
        wanted[owners] = True
        theirs: Array = wanted[self._facts.owners[rows]]
        return theirs


def parts(rows: Array) -> Iterator[Array]:
    """The rows, some at a time."""
    for first in range(0, len(rows), RECOVERED_AT_ONCE):
        yield rows[first : first + RECOVERED_AT_ONCE]
