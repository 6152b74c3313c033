"""Which rows of a table go first: orders, and the beginning of an order that is enough.

Owns: the orders by age, by uses a token, and by steps to execution; how to take so many of the first rows without
sorting all of them. Does not own: which order a mode goes by, nor who may go at all.

A rank is a tuple of criteria, the weightiest first: each gives values for places among the rows that it ranks, of which
the lowest go first. The lighter ones are looked at where the weightier are equal, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .table import Column, Mask, Rows, Table, exact_sum

Steps: TypeAlias = Generator[None, None, Rows]
"""Rows or places, found in steps of a few milliseconds at 100,000 rows, so that others get a turn between two."""
Criterion: TypeAlias = Callable[[Rows], Column]
Rank: TypeAlias = tuple[Criterion, ...]

SORTED_WHOLE: Final = 4096
"""So many rows are simply sorted."""
_SAMPLE: Final = 4096
_MARGIN: Final = 96
"""Places in the sample to either side of where the end is reckoned: 3 standard deviations, were all sizes equal."""


def by_age(table: Table, rows: Rows) -> Rank:
    """Least recently used first."""
    return (table.used_at[rows].__getitem__,)


def by_density(table: Table, rows: Rows) -> Rank:
    """Fewest uses a token first; then more tokens, more bytes, least recently used."""
    density = table.uses[rows] / np.maximum(table.tokens[rows], 1)
    return (
        density.__getitem__,
        lambda places: -table.tokens[rows[places]],
        lambda places: -table.size_bytes[rows[places]],
        lambda places: table.used_at[rows[places]],
    )


def by_distance(table: Table, rows: Rows, distances: NDArray[np.float64]) -> Rank:
    """Most steps to execution first, by the agents' `distances`, one a number; then least recently used."""
    steps = -distances[table.agent[rows]]
    return (steps.__getitem__, lambda places: table.used_at[rows[places]])


def worth_copying(table: Table, rows: Rows, copy_bytes_per_s: int, compute_s_per_token: float) -> Mask:
    """Whether to copy an entry is quicker than to compute it anew, as far as its tokens say what that costs."""
    tokens = table.tokens[rows]
    worth: Mask = (tokens == 0) | (table.size_bytes[rows] / copy_bytes_per_s <= tokens * compute_s_per_token)
    return worth


def at_once(steps: Steps) -> Rows:
    """All steps without a break."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Rows = end.value
            return found


def first(rank: Rank, sizes: Rows, need_bytes: float, most: int) -> Steps:
    """The fewest of the first whose sizes add up to `need_bytes`, `most` at most; all, if all are not enough.

    Returns places, int64, each once. The last that it took to reach the need or `most` is the last returned; the
    others come in no certain order beyond SORTED_WHOLE. Ties go by place, lower first.
    """
    places = np.arange(len(sizes))
    taken: list[Rows] = []
    # Each round works on rows that all go after those in `taken`, and halves them many times over.
    while need_bytes > 0 and most > 0 and len(places):
        if len(places) <= SORTED_WHOLE:
            taken.append(_cut(places[_sorted(rank, places)], sizes, need_bytes, most))
            break
        low, high = _bounds(rank, places, sizes, need_bytes, most)
        yield
        below, rest = _split(rank, places, low)
        below_bytes = _bytes(sizes, below)
        if len(below) and (below_bytes >= need_bytes or len(below) >= most):
            places = below
            continue
        taken.append(below)
        need_bytes -= below_bytes
        most -= len(below)
        middle, rest = _split(rank, rest, high)
        middle_bytes = _bytes(sizes, middle)
        if middle_bytes >= need_bytes or len(middle) >= most:
            places = middle
            yield
            if len(middle) > 4 * SORTED_WHOLE:
                continue
            taken.append(_cut(places[_sorted(rank, places)], sizes, need_bytes, most))
            break
        taken.append(middle)
        need_bytes -= middle_bytes
        most -= len(middle)
        places = rest
    return np.concatenate(taken) if taken else places[:0]


@dataclass(frozen=True, slots=True)
class Amounts:
    """So much of each budget, or so much lacking of it; 0 or less: nothing."""

    bytes: int = 0
    tokens: int = 0
    entries: int = 0

    def __bool__(self) -> bool:
        return self.bytes > 0 or self.tokens > 0 or self.entries > 0

    def less(self, sizes: Rows, tokens: Rows) -> Amounts:
        """What is still lacking when these rows have gone."""
        return Amounts(self.bytes - exact_sum(sizes), self.tokens - exact_sum(tokens), self.entries - len(sizes))


def enough(sizes: Rows, tokens: Rows, needs: Amounts, spare_bytes: int, rounds: int = 8) -> Rows | None:
    """The fewest of rows in their order that meet every need and together are no more than `spare_bytes`.

    One that would pass that is left out, and smaller ones behind it are tried, so often as `rounds` says.

    Returns:
        Places, int64; None where these rows do not do.
    """
    places = np.arange(len(sizes))
    taken: list[Rows] = []
    spare = float(spare_bytes)
    for _ in range(rounds):
        if not needs:
            break
        # float64: sums of what clients say need not fit into 64 bits; they are exact up to 2**53.
        total = np.cumsum(sizes[places], dtype=np.float64)
        met = (total >= needs.bytes) & (np.cumsum(tokens[places], dtype=np.float64) >= needs.tokens)
        met[: max(0, needs.entries - 1)] = False
        count = int(met.argmax()) + 1 if met.any() else len(places) + 1
        fits = min(count, int(np.searchsorted(total, spare, side="right")))
        went = places[:fits]
        taken.append(went)
        if fits == count:
            return np.concatenate(taken)
        spare -= float(total[fits - 1]) if fits else 0.0
        needs = needs.less(sizes[went], tokens[went])
        places = places[fits:]
        places = places[sizes[places] <= spare]
        if not len(places):
            return None
    return None if needs else np.concatenate([places[:0], *taken])


def _bytes(sizes: Rows, places: Rows) -> float:
    return float(sizes[places].sum(dtype=np.float64))


def _sorted(rank: Rank, places: Rows) -> Rows:
    """How to index `places` so that they stand in order. Only those that are equal are compared further."""
    values = rank[0](places)
    order = np.argsort(values, kind="stable")
    values = values[order]
    equal = values[1:] == values[:-1]
    if len(rank) > 1 and equal.any():
        tied = np.flatnonzero(np.concatenate([equal, [False]]) | np.concatenate([[False], equal]))
        lighter = [criterion(places[order[tied]]) for criterion in reversed(rank[1:])]
        order[tied] = order[tied][np.lexsort([*lighter, values[tied]])]
    return order


def _cut(places: Rows, sizes: Rows, need_bytes: float, most: int) -> Rows:
    """The beginning of sorted places that is enough."""
    enough_at = int(np.searchsorted(np.cumsum(sizes[places], dtype=np.float64), need_bytes)) + 1
    return places[: min(enough_at, most)]


def _bounds(rank: Rank, places: Rows, sizes: Rows, need_bytes: float, most: int) -> tuple[int, int]:
    """Two places between which the end lies in all likelihood, from a sample."""
    sample = places[:: max(1, len(places) // _SAMPLE)]
    sample = sample[_sorted(rank, sample)]
    one_stands_for = len(places) / len(sample)
    total = np.cumsum(sizes[sample], dtype=np.float64) * one_stands_for
    end = min(int(np.searchsorted(total, need_bytes)), int(most / one_stands_for), len(sample) - 1)
    return int(sample[max(0, end - _MARGIN)]), int(sample[min(len(sample) - 1, end + _MARGIN)])


def _split(rank: Rank, places: Rows, pivot: int) -> tuple[Rows, Rows]:
    """Places that go before the pivot or are it, and the others."""
    before = _before(rank, places, pivot)
    return places[before], places[~before]


def _before(rank: Rank, places: Rows, pivot: int) -> Mask:
    if not rank:
        return places <= pivot
    values, limit = rank[0](places), rank[0](np.array([pivot]))[0]
    before: Mask = values < limit
    ties = np.flatnonzero(values == limit)
    if len(ties):
        before[ties] = _before(rank[1:], places[ties], pivot)
    return before
