"""Chooses a stretch of the ring for a large place: of several, the one whose entries are worth least.

    rows in the order of offsets:   … │ may not go │ a │ hole │ b │ c │ hole │ d │ may not go │ …
                                                    └──── a stretch: neighbours that may go ────┘
    the cheapest run of a stretch that is wide enough → its entries are evicted, or move into holes elsewhere

The neighbours of the coldest entry are of random warmth. With entries of one size this does not matter: each new entry
evicts one. With mixed sizes, a large put would evict all the small entries around the coldest one. An entry that the
policy would keep moves instead, if a hole elsewhere has room for it. Blocks of sequences do not move, since the index
of sequences finds their records by the offset.

Owns: the choice and its prices. Does not own: which entries the policy prefers, nor what becomes of the chosen ones.

Invariants: every byte of a chosen run is free once its victims are gone and its other entries have moved. A run's
moves copy at most COPIED_SHARE times the bytes that are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress, islice
from typing import Final

import numpy as np

from ..store.entries import Entries, OverEntries
from ..store.table import EDGE, LIVE, Array

RUN_ROWS_MAX: Final = 512
"""Entries of one run."""
HOLES_MAX: Final = 16
"""Holes around which entries to move are looked for, in one round."""
LOOKS_MAX: Final = 1536
"""Rows looked at in one round: about 1.5 ms."""
WIDE: Final = 8
"""If no run is found, runs and looks of so many times as many rows are tried."""
COPIED_SHARE: Final = 4
MOVES_MAX: Final = 256
"""Moves of one round, 25 µs each. Without all of its moves, a way evicts nothing: the next round goes on."""
FIRST: Final = 4
"""Stretches around the coldest entries that are looked at before others."""
RUNS_MAX: Final = 8
"""Runs that are tried."""

Price = tuple[float, float, float]
"""Of some entries: the bytes of those in the policy's window, which are worth more than all others; the worth that is
lost with the others, for each byte what is above the worth of the coldest entry's bytes, which would be lost anyway (0
if the policy's worths only order entries); the worth of the warmest entry."""
NOTHING: Final[Price] = (0.0, 0.0, 0.0)
Test = Callable[[Array], Array]
"""Of rows, (n,) int64: which ones may be chosen, (n,) bool."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to make room: entries to evict, children before their parents, and entries to move. `inside`: the rows
    before the holes of the piece that becomes free, into which nothing may move. `handed`: the policy has handed the
    victims out."""

    victims: list[int]
    price: Price = NOTHING
    gone_bytes: int = 0
    copied_bytes: int = 0
    moves: list[int] = field(default_factory=list)
    inside: frozenset[int] = frozenset()
    handed: bool = False
    reason: str = "capacity"


class Stretches(OverEntries):
    """The stretches of one ring."""

    def __init__(self, entries: Entries) -> None:
        super().__init__(entries)
        self.rows_max, self.looks_max = RUN_ROWS_MAX, LOOKS_MAX
        """Of the search for the present attempt: `Ways` sets them."""

    def price(self, rows: Sequence[int], floor: float) -> Price:
        """The price of entries. `floor`: the worth of the coldest entry; 0: the price is what is lost in all."""
        if not rows:
            return NOTHING
        fresh, values, worths = self._values(rows, floor)
        return float(fresh.sum()), float(values.sum()), float(worths.max())

    def to_evict(self, size: int, anchors: Sequence[int], may_go: Test, rows_max: int = 0) -> Way | None:
        """The cheapest run of at most `rows_max` entries to evict, in the stretches around `anchors`, which come
        coldest first. Withdrawn pages in it, if `may_go` lets them be, are taken back afterwards."""
        table, found, rows_max = self._table, [], rows_max or self.rows_max
        seen: set[int] = set()
        for anchor in chosen(anchors, may_go):
            if anchor not in seen:
                found.append(self._around(table.prevs[anchor], size, may_go, rows_max))
                seen.update(found[-1])
                if len(seen) >= self.looks_max:
                    break
        every, firsts, lasts, _ = self._runs(found, size, rows_max)
        if not len(firsts):
            return None
        fresh, values, worths = self._values(every, float(self._policy.worth(anchors[:1])[0]))
        for amounts in (fresh, values):
            lost = _sums(amounts, firsts, lasts)
            # What differs by rounding is equal.
            least = lost <= lost.min() + 1e-12 * amounts.sum()
            firsts, lasts = firsts[least], lasts[least]
        edges = np.column_stack([firsts, lasts + 1]).ravel()
        warmest = np.maximum.reduceat(np.append(worths, 0.0), edges)[::2]
        best = int(np.argmin(warmest))
        run = slice(int(firsts[best]), int(lasts[best]) + 1)
        victims = [row for row in every[run] if table.states[row] == LIVE]
        price = float(fresh[run].sum()), float(values[run].sum()), float(warmest[best])
        return Way(victims, price, self._bytes_of(victims))

    def to_clear(
        self, size: int, anchors: Sequence[int], cold: float, most_bytes: tuple[int, int], may_move: Test, may_go: Test
    ) -> Way | None:
        """The run of entries with the fewest bytes to copy, if those that may go and are worth at most `cold` do, and
        the others move into holes elsewhere, in the stretches around `anchors` and around the largest holes. None
        without a run whose evicted and copied bytes are at most `most_bytes`."""
        table, found = self._table, []
        # Entries that were put together often are the coldest together: one stretch has many of them.
        seen: set[int] = set()
        coldest = [table.prevs[row] for row in anchors]
        for before in (*coldest[:FIRST], *self._largest_holes(), *coldest[FIRST:]):
            if before in seen and table.nexts[before] in seen:
                continue
            found.append(self._around(before, size, may_move))
            seen.update(found[-1])
            if len(found) <= FIRST and (way := self._cleared(found[-1:], size, cold, (most_bytes[0], 0), may_go)):
                return way
            if len(seen) >= self.looks_max:
                break
        return self._cleared(found, size, cold, most_bytes, may_go)

    def _cleared(
        self, found: list[list[int]], size: int, cold: float, most_bytes: tuple[int, int], may_go: Test
    ) -> Way | None:
        """`to_clear`, of these stretches."""
        table, policy = self._table, self._policy
        every, firsts, lasts, _ = self._runs(found, size)
        if not len(firsts):
            return None
        at = np.array(every, np.int64)
        goes = may_go(at) & (policy.worth(at) <= cold) & ~policy.are_in_window(at)
        sizes = table.column("sizes")[at].astype(np.int64)
        stays = ~goes & (table.column("records")[at] != 0)
        evicted = _sums(np.where(goes, sizes, 0), firsts, lasts)
        copied = _sums(np.where(goes, 0, sizes), firsts, lasts)
        fits = (evicted <= most_bytes[0]) & (copied <= most_bytes[1]) & (_sums(stays, firsts, lasts) == 0)
        for best in np.flatnonzero(fits)[np.argsort(copied[fits], kind="stable")][:RUNS_MAX].tolist():
            run = slice(int(firsts[best]), int(lasts[best]) + 1)
            rows = at[run]
            moves = self._largest_first(rows[~goes[run]].tolist())
            inside = frozenset((table.prevs[rows[0]], *rows.tolist()))
            if all(self._fit(moves, inside)):
                victims = rows[goes[run]].tolist()
                return Way(victims, NOTHING, int(evicted[best]), int(copied[best]), moves, inside)
        return None

    def to_move(self, size: int, floor: float, may_move: Test, may_go: Test) -> Way | None:
        """The cheapest run of entries to move: of each stretch around one of the largest holes, the run with the fewest
        bytes to copy. Those that fit into no hole elsewhere are evicted with it."""
        found, looks = [], 0
        for hole in self._largest_holes():
            found.append(self._around(hole, size, may_move, self.rows_max // 2))
            looks += len(found[-1])
            if looks >= self.looks_max // 4:
                break
        every, firsts, lasts, stretch = self._runs(found, size)
        if not len(firsts):
            return None
        copied = _sums(self._table.column("sizes")[every].astype(np.int64), firsts, lasts)
        best: Way | None = None
        seen: set[int] = set()
        for at in np.argsort(copied, kind="stable").tolist():
            if stretch[at] in seen:
                continue
            seen.add(int(stretch[at]))
            way = self._moved(every[firsts[at] : lasts[at] + 1], size, floor, may_go)
            if way is not None and (best is None or _cost(way) < _cost(best)):
                best = way
            if best is not None and not best.victims:
                break
        return best

    def _moved(self, rows: list[int], size: int, floor: float, may_go: Test) -> Way | None:
        table, run = self._table, self._largest_first(rows)
        inside = frozenset((table.prevs[rows[0]], *rows))
        movable = [row for row in run if not table.records[row]]
        moves = [*compress(movable, self._fit(movable, inside))]
        moved = set(moves)
        victims = [row for row in run if row not in moved]
        copied = self._bytes_of(moves)
        if copied > COPIED_SHARE * size or not may_go(np.array(victims, np.int64)).all():
            return None
        return Way(victims, self.price(victims, floor), self._bytes_of(victims), copied, moves, inside)

    def _fit(self, rows: Sequence[int], inside: frozenset[int]) -> list[bool]:
        """Which rows find holes elsewhere, the largest ones first. If all that a round moves do, so may the others: the
        next rounds look again."""
        sizes = [self._table.sizes[row] for row in rows]
        fit = self._holes.fits(sizes[:MOVES_MAX], inside)
        if len(sizes) <= MOVES_MAX:
            return fit
        return [True] * len(sizes) if all(fit) else self._holes.fits(sizes, inside)

    def _around(self, left: int, size: int, may: Test, most: int = 0) -> list[int]:
        """The neighbours on both sides of the gap behind a row, in order: on each side up to one that may not, or until
        they have `size` bytes."""
        table, most = self._table, most or self.rows_max
        before: list[int] = []
        behind: list[int] = []
        offsets, sizes, nexts, prevs = table.offsets, table.sizes, table.nexts, table.prevs
        right = nexts[left]
        row, low = left, (offsets[right] if right else self._holes.capacity_bytes) - size
        while row and len(before) < most:
            before.append(row)
            row = prevs[row] if offsets[row] > low else EDGE
        row, high = right, table.end(left) + size
        while row and len(behind) < most:
            behind.append(row)
            row = nexts[row] if offsets[row] + sizes[row] < high else EDGE
        rows = np.array(before[::-1] + behind, np.int64)
        bars = np.flatnonzero(~may(rows))
        at = np.searchsorted(bars, len(before))
        first = int(bars[at - 1]) + 1 if at else 0
        last = int(bars[at]) if at < len(bars) else len(rows)
        found: list[int] = rows[first:last].tolist()
        return found

    def _runs(self, stretches: list[list[int]], size: int, rows_max: int = 0) -> tuple[list[int], Array, Array, Array]:
        """The rows of all stretches, and the shortest runs of neighbours that have `size` bytes, holes included: for
        each row that one begins with, its place among all rows; the place of the last row; the stretch."""
        every = [row for rows in stretches for row in rows]
        table, places = self._table, np.arange(len(every))
        offsets, sizes, at = table.column("offsets"), table.column("sizes"), np.array(every, np.int64)
        befores, behinds = table.column("prevs")[at], table.column("nexts")[at]
        number = np.repeat(np.arange(len(stretches)), [len(rows) for rows in stretches])
        # So far apart that no run reaches into the next stretch.
        apart = number * (2 * self._holes.capacity_bytes)
        lows = (offsets[befores] + sizes[befores]).astype(np.int64) + apart
        highs = np.where(behinds == EDGE, self._holes.capacity_bytes, offsets[behinds].astype(np.int64)) + apart
        lasts = np.maximum(np.searchsorted(highs, lows + size), places)
        inside = lasts < len(every)
        inside[inside] = number[lasts[inside]] == number[inside]
        firsts = np.flatnonzero(inside & (lasts - places < (rows_max or self.rows_max)))
        return every, firsts, lasts[firsts], number[firsts]

    def _values(self, rows: Sequence[int], floor: float) -> tuple[Array, Array, Array]:
        """By row: the bytes if it is in the window; the worth that is lost if it is not; the worth."""
        at = np.array(rows, np.int64)
        stored = np.frombuffer(self._table.states, np.uint8)[at] == LIVE
        sizes = self._table.column("sizes")[at].astype(np.float64)
        worths = np.where(stored, self._policy.worth(at), 0.0)
        fresh = stored & self._policy.are_in_window(at)
        above = np.where(fresh, 0.0, np.maximum(worths - floor, 0.0)) if self._policy.weighs else 0.0
        return fresh * sizes, above * sizes, worths

    def _largest_holes(self) -> list[int]:
        """The rows before them."""
        return [before for before, _ in islice(self._holes.largest_first(), HOLES_MAX)]

    def _bytes_of(self, rows: Sequence[int]) -> int:
        return sum(map(self._table.sizes.__getitem__, rows))

    def _largest_first(self, rows: Sequence[int]) -> list[int]:
        return sorted(rows, key=lambda row: (-self._table.sizes[row], self._table.offsets[row]))


def chosen(rows: Sequence[int], may: Test) -> list[int]:
    """The rows that may be chosen, in their order."""
    return [*compress(rows, may(np.array(rows, np.int64)))]


def _sums(amounts: Array, firsts: Array, lasts: Array) -> Array:
    sums: Array = np.concatenate([[0], np.cumsum(amounts)])
    differences: Array = sums[lasts + 1] - sums[firsts]
    return differences


def _cost(way: Way) -> tuple[Price, int, int]:
    return way.price, way.gone_bytes, way.copied_bytes
