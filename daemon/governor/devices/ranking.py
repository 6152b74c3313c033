"""Orders over the rows of a table, and the shortest beginning of an order that meets a need.

Owns the orders by age, by uses per token, and by steps to execution; and how to take the first rows without sorting all
of them. Does not own which order a mode uses, nor which rows may go.

A rank is a tuple of criteria, the most significant first. Each criterion gives values for places among the ranked rows;
the lowest values go first. Less significant criteria are evaluated only for equal values of the more significant ones.

Invariant: nothing here changes a table.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .table import Column, Mask, Rows, Table, exact_sum

Steps: TypeAlias = Generator[None, None, Rows]
"""Rows or places, found in steps of a few milliseconds at 100,000 rows. Other work may run between two steps."""
Criterion: TypeAlias = Callable[[Rows], Column]
Rank: TypeAlias = tuple[Criterion, ...]

SORTED_WHOLE: Final = 4096
"""Up to so many rows are simply sorted."""
_SAMPLE: Final = 4096
_MARGIN: Final = 96
"""Places in the sample to either side of the estimated end: 3 standard deviations if all sizes are equal."""


def by_age(table: Table, rows: Rows) -> Rank:
    """Least recently used first."""
    return (table.used_at[rows].__getitem__,)


def by_density(table: Table, rows: Rows) -> Rank:
    """Fewest uses per token first; then more tokens, more bytes, least recently used."""
    density = table.uses[rows] / np.maximum(table.tokens[rows], 1)
    return (
        density.__getitem__,
        lambda places: -table.tokens[rows[places]],
        lambda places: -table.size_bytes[rows[places]],
        lambda places: table.used_at[rows[places]],
    )


def by_distance(table: Table, rows: Rows, distances: NDArray[np.float64]) -> Rank:
    """Most steps to execution first, by the agents' `distances`, one for each number; then least recently used."""
    steps = -distances[table.agent[rows]]
    return (steps.__getitem__, lambda places: table.used_at[rows[places]])


def at_once(steps: Steps) -> Rows:
    """Runs all steps without a pause."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Rows = end.value
            return found


def first(rank: Rank, sizes: Rows, need_bytes: float, most: int) -> Steps:
    """The fewest first places whose sizes add up to `need_bytes`, at most `most`; all places if they do not suffice.

    Returns places, int64, each once. The place that reaches the need or `most` comes last; the others are in no certain
    order beyond SORTED_WHOLE. Ties are ordered by place, lower first.
    """
    places = np.arange(len(sizes))
    taken: list[Rows] = []
    # Each round works on rows that all come after those in `taken`, and reduces them to a small part.
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
    """Amounts of each budget, taken or lacking; 0 or less: none."""

    bytes: int = 0
    tokens: int = 0
    entries: int = 0

    def __bool__(self) -> bool:
        return self.bytes > 0 or self.tokens > 0 or self.entries > 0

    def less(self, sizes: Rows, tokens: Rows) -> Amounts:
        """The amounts still lacking after these rows have gone."""
        return Amounts(self.bytes - exact_sum(sizes), self.tokens - exact_sum(tokens), self.entries - len(sizes))


def enough(sizes: Rows, tokens: Rows, needs: Amounts, spare_bytes: int, rounds: int = 8) -> Rows | None:
    """The fewest rows, in order, that meet every need and together are at most `spare_bytes`.

    A row that would exceed these bytes is left out, and smaller rows after it are tried, at most `rounds` times.

    Returns:
        Places, int64; None if these rows do not suffice.
    """
    places = np.arange(len(sizes))
    taken: list[Rows] = []
    spare = float(spare_bytes)
    for _ in range(rounds):
        if not needs:
            break
        # float64: sums of sizes that clients state may exceed 64 bits; they are exact up to 2**53.
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
    """Indices that sort `places`. Only equal values are compared by further criteria."""
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
    """The shortest beginning of sorted places that meets the need."""
    enough_at = int(np.searchsorted(np.cumsum(sizes[places], dtype=np.float64), need_bytes)) + 1
    return places[: min(enough_at, most)]


def _bounds(rank: Rank, places: Rows, sizes: Rows, need_bytes: float, most: int) -> tuple[int, int]:
    """Two places between which the end most likely lies, estimated from a sample."""
    sample = places[:: max(1, len(places) // _SAMPLE)]
    sample = sample[_sorted(rank, sample)]
    one_stands_for = len(places) / len(sample)
    total = np.cumsum(sizes[sample], dtype=np.float64) * one_stands_for
    end = min(int(np.searchsorted(total, need_bytes)), int(most / one_stands_for), len(sample) - 1)
    return int(sample[max(0, end - _MARGIN)]), int(sample[min(len(sample) - 1, end + _MARGIN)])


def _split(rank: Rank, places: Rows, pivot: int) -> tuple[Rows, Rows]:
    """The places up to the pivot, and the others."""
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
