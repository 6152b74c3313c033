"""The base class of replacement policies: which rows of the store are evicted next.

    puts ── window.append ──┐
    access logs ── used ────┤→ policy → victims(most) ─ fence, scan ─┬→ removed(evicted=True)
    ends ── removed ────────┘                                        └→ may_go(rows, True)    of a row that is pinned

A policy knows the rows of the store's table by their numbers, and reads the store's columns (`Facts`). Everything comes
in batches, as arrays; no Python object is made for an entry. A policy takes new rows in itself (`window`), so a put
calls nothing of it.

Owns: which rows are known, held or handed out. Does not own the order of rows (`pooled`, and the policies), nor the
columns of the store, nor pins.

Invariants: `victims` never gives a row that has children which are not victims before it, that is held or handed out
already, or, while others may go, that is in the window. A row that `victims` gave is given again only after `may_go`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Final, Literal

import numpy as np
from msgspec import Struct

from .window import Array, Batches, RowWindow

Turn = Literal["began", "tool_call", "turn_ended", "finished"]
Rank = tuple[float, float]
"""The warmth of a row, lower is colder; two numbers, so that few rows are equal."""
Item = tuple[float, float, int]
"""A rank and its row."""
Owners = Collection[int]

RECOVERED_AT_ONCE: Final = 1 << 12
KNOWN: Final = 1
HELD: Final = 2
"""The store said that the row may not go."""
OUT: Final = 4
"""Handed out by `victims`, and neither removed nor kept since."""


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


class Replacement(ABC):
    """One store's policy. A class that derives with `name="..."` is registered under that name (`POLICIES`)."""

    name: ClassVar[str]
    weighs: ClassVar[bool] = True
    """Whether worths may be added up, for each byte. If not, they only order the rows."""
    registered: ClassVar[dict[str, type[Replacement]]] = {}

    def __init_subclass__(cls, name: str = "", **more: object) -> None:
        super().__init_subclass__(**more)
        if name:
            assert name not in Replacement.registered, f"two policies are named {name}"
            cls.name = name
            Replacement.registered[name] = cls

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self.window = RowWindow(facts.sizes, facts.depths, self.take_in)
        self._flags = np.zeros(len(facts.sizes), np.uint8)
        self._top = 0
        """Above all rows that were ever known."""
        self._count = 0
        self._bytes = 0

    def __len__(self) -> int:
        """The number of known rows."""
        self.take_in()
        return self._count

    # ---- what the store says

    def take_in(self) -> None:
        """Takes in what was put since. The policy does it by itself when it has to."""
        if len(self.window):
            rows, batches = self.window.taken()
            if len(rows):
                self._know(rows)
                self._put(rows, batches)

    def recovering(self, by_use: Array, by_put: Array, uses: Array, now: float) -> Iterator[None]:
        """Takes over the rows that an earlier daemon left, in the order of their last uses, and in that of their puts:
        once, before the first put, in steps of a few milliseconds. The policy is asked nothing until the last. `uses`:
        by row, how often it was used after its put."""
        there = np.zeros(len(self._flags), np.bool_)
        there[by_use] = True
        rows = np.flatnonzero(there)
        yield
        for part in parts(rows):
            self._know(part)
            yield
        for part in parts(by_put):
            self.window.recovered(part)
            yield
        yield from self._recovering(rows, by_use, uses, now)

    def put_again(self, row: int) -> None:
        """A put named the key of a stored row. It counts as a use too if the store reports one."""
        self.take_in()
        self.window.put_again(row)

    def used(self, rows: Sequence[int] | Array, now: float, agents: Sequence[int] | Array | int = 0) -> None:
        """Stored rows were used until `now`, in this order, a row perhaps several times. `agents`: the numbers of the
        agents that used them, or of the one that used all."""
        self.take_in()
        if len(rows):
            self._used(np.asarray(rows, np.int64), now, agents)

    def may_go(self, rows: Sequence[int] | Array, it_may: bool) -> None:
        """Says whether stored rows may be evicted from now on. A row that was handed out as a victim, and stays
        because a reader holds it, is either held until the reader has ended, or may go again. Children need no
        call: the policy reads their number."""
        self.take_in()
        at = np.asarray(rows, np.int64)
        if not len(at):
            return
        assert (self._flags[at] & KNOWN).all(), "a row that is not stored"
        self._flags[at] = KNOWN if it_may else KNOWN | HELD
        if it_may:
            self._may_go_again(at)

    def removed(self, rows: Sequence[int] | Array, *, evicted: bool) -> None:
        """Stored rows were removed, for room (`evicted`) or for another reason. The store's columns still describe
        them, and their parents' numbers of children are lowered already."""
        self.take_in()
        at = np.asarray(rows, np.int64)
        if not len(at):
            return
        assert (self._flags[at] & KNOWN).all(), "a row that is not stored"
        self._count -= len(at)
        self._bytes -= int(self._facts.sizes[at].sum())
        self._forget(at, evicted)
        self._flags[at] = 0
        self.window.put_at[at] = 0
        parents = self._facts.parents[at].astype(np.int64)
        if parents.any():
            parents = parents[self._is_free(parents)]
            if len(parents):
                self._may_go_again(np.unique(parents))

    def turn(self, agent: int, state: Turn, now: float) -> None:
        """A client has reported the state of an agent. Default: the policy ignores it."""
        return

    # ---- what the store asks

    def victims(self, most: int, owners: Owners | None = None) -> list[int]:
        """Up to `most` rows to evict, coldest first, children before their parents; with `owners` only rows of these
        owners. They are handed out: each is removed, or kept with `may_go`. A victim that is kept keeps its ancestors
        among the victims too."""
        self.take_in()
        rows = self._victims(most, None if owners is None else np.array(sorted(owners), np.uint16))
        self._flags[rows] |= OUT
        return rows

    @abstractmethod
    def standings(self, rows: Sequence[int] | Array) -> list[tuple[bool, Rank]]:
        """Of stored rows, whether each is in the window, and its rank: the lowest is evicted first."""

    def coldest(self, most: int, owners: Owners | None = None) -> list[int]:
        """As `victims`, but the rows are not handed out."""
        rows = self.victims(most, owners)
        self.may_go(rows, True)
        return rows

    def admits(self, digest: int, size: int, parent: int, cost: float = 0.0, tokens: int = 0, agent: int = 0) -> bool:
        """Whether a child of the row `parent`, which is not stored yet, is worth as much as the next victim. The store
        asks when it has no room without evicting. The numbers are those of `Facts`. Default: true."""
        return True

    @abstractmethod
    def worth(self, rows: Sequence[int] | Array) -> Array:
        """The worths of stored rows. Of two rows outside the window, the one with the lower worth is evicted first."""

    def explain(self, row: int) -> Explained:
        """The policy's knowledge of a stored row. Default: its worth."""
        self.take_in()
        return Explained(float(self.worth([row])[0]), in_window=self.in_window(row))

    def recall(self, digest: int) -> Explained | None:
        """The policy's knowledge of a key whose entry was evicted; its worth leaves out cost and size. None, the
        default: the policy does not remember the key."""
        return None

    def in_window(self, row: int) -> bool:
        """Whether a stored row is evicted only if no other can be."""
        self.take_in()
        return bool(self.window.put_at[row] > self.window.begins(self._bytes))

    def are_in_window(self, rows: Array) -> Array:
        """`in_window` of many rows, (n,) bool."""
        self.take_in()
        found: Array = self.window.put_at[rows] > self.window.begins(self._bytes)
        return found

    @property
    def window_bytes(self) -> int:
        """The bytes of the rows in the window. Looks at every row."""
        self.take_in()
        put_at = self.window.put_at[: self._top]
        return int(self._facts.sizes[: self._top][put_at > self.window.begins(self._bytes)].sum())

    # ---- restarts

    def learned(self) -> Iterator[bytes]:
        """The policy's state, for the policy of the same name in the next daemon. Default: nothing."""
        return iter(())

    def learn(self, data: Sequence[bytes]) -> None:
        """Restores the state that a policy of the same name yielded from `learned`. Called once, after `recovering`.
        Some rows in `data` may not be stored any more, others may be missing there.

        Raises:
            ValueError: `data` is not a state of this policy.
        """
        return

    def check_invariants(self) -> None:
        """Asserts the invariants of the policy's structures."""
        self.take_in()
        known = np.flatnonzero(self._flags & KNOWN)
        assert len(known) == self._count and (not len(known) or known[-1] < self._top)
        assert int(self._facts.sizes[known].sum()) == self._bytes
        assert not self._flags[(self._flags & KNOWN) == 0].any()

    # ---- what a policy implements

    @abstractmethod
    def _put(self, rows: Array, batches: Batches) -> None:
        """New rows, in the order of their puts; they are known already."""

    def _recovering(self, rows: Array, by_use: Array, uses: Array, now: float) -> Iterator[None]:
        """Known rows of an earlier daemon, as they ascend, and in the order of their last uses; and by row its number
        of uses. Default: as new."""
        for part in parts(by_use):
            self._put(part, [(len(part), now)])
            yield

    @abstractmethod
    def _used(self, rows: Array, now: float, agents: Sequence[int] | Array | int) -> None:
        """Known rows were used."""

    @abstractmethod
    def _forget(self, rows: Array, evicted: bool) -> None:
        """Known rows are removed."""

    @abstractmethod
    def _may_go_again(self, rows: Array) -> None:
        """Known rows may be evicted that perhaps could not be before."""

    @abstractmethod
    def _victims(self, most: int, owners: Array | None) -> list[int]:
        """As `victims`."""

    def _know(self, rows: Array) -> None:
        if not len(rows):
            return
        assert not self._flags[rows].any(), "a row was put twice"
        self._flags[rows] = KNOWN
        self._top = max(self._top, int(rows.max()) + 1)
        self._count += len(rows)
        self._bytes += int(self._facts.sizes[rows].sum())

    def _is_free(self, rows: Array) -> Array:
        """Which rows are known, childless, not held and not handed out."""
        free: Array = (self._flags[rows] & (KNOWN | HELD | OUT) == KNOWN) & (self._facts.children[rows] == 0)
        return free


def parts(rows: Array) -> Iterator[Array]:
    """The rows, some at a time."""
    for first in range(0, len(rows), RECOVERED_AT_ONCE):
        yield rows[first : first + RECOVERED_AT_ONCE]
