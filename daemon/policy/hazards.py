"""How likely something is used again soon, by how long ago it was used last: learned from what happens.

For each class of things (whatever the caller tells apart) and each bucket of age there are two counts: how many things
became so old without a use, and how many of those were used before they left the bucket. Both are forgotten by half
every HALF_LIFE_USES uses. Their quotient is a discrete hazard (Kaplan and Meier, 1958), so what is evicted or forgotten
meanwhile only stops being counted; a class of which little is known borrows from wider ones.

What is wanted is not the hazard but the best rate at which keeping can pay from now on,

    index(a) = max over b > a of P(used by age b | not used by age a) / E(time kept until then | not used by age a),

Gittins' index (J. C. Gittins, "Bandit processes and dynamic allocation indices", J. R. Stat. Soc. B 41, 1979); without
the maximum it is the hit density of LHD (Beckmann, Chen, Cidon, NSDI 2018). It is made to rise to one peak and to fall
after it, so that of each class either the oldest or the youngest is the coldest.

Owns: counts, and the indices that follow. Bounded by the number of classes, which is the caller's to bound.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

BOUNDS: Final = [2 ** (k / 2 - 4) for k in range(60)]
"""Ages at which the buckets 1, 2, ... begin, in mean pauses (`clock`); the last begins at 47 millions of them."""
BUCKETS: Final = len(BOUNDS) + 1
HALF_LIFE_USES: Final = 1 << 17
BORROWED: Final = 3.0
"""How many things' worth of a wider class's experience a class begins with."""
UNUSED_ODDS: Final = 0.5
USED_ODDS: Final = 2.0
"""Before anything is known of a class, its things' odds of being used against those of all: of what nobody has used
since it was put; and of what was used, with one more for each doubling of its uses. With odds that double as well, what
was used often long ago would stay, and new things that all are in use would push each other out."""
_UNKNOWN: Final = np.array([0.6] + [0.25] * (BUCKETS - 1))
"""The share that is used in a bucket before anything is known: so that the rate falls with age as it does in least
recently used, also from the first bucket, which is wider than the second."""

SURPRISE: Final = 4.0
"""So many standard deviations fewer uses than expected are no chance."""
DOUBTED: Final = 0.1
"""What is left of the counts of a class whose uses fail to come."""
EXPECTED_MAX: Final = 200.0
"""After so many uses expected their number is compared anew."""
KNOWN_MIN: Final = 8.0
"""Of a class, so many things must have reached an age before a share of them is told to people."""

_EDGES: Final = np.array([0.0, *BOUNDS, 2 * BOUNDS[-1]])
_WIDTHS: Final = np.diff(_EDGES)
_NARROWER: Final = [1.0, *np.minimum(_WIDTHS[1:] / _WIDTHS[:-1], 1.0).tolist()]
"""What a bucket's width is of the one before, where it is narrower."""

Name = tuple[int, ...]
Floats = npt.NDArray[np.float64]


def bucket(age: float) -> int:
    """The bucket of an age."""
    return bisect_right(BOUNDS, age)


def _nothing() -> list[float]:
    return [0.0] * BUCKETS


@dataclass(slots=True, eq=False)
class Row:
    """One class. `index`: by bucket; from `peak` on it does not rise. `number`: in the order in which classes came.

    `wider`: the class that it borrows from, taking the odds of being used for `odds` times as high as there.
    `unused`: of things that nobody has used since they were put.
    """

    number: int
    wider: Row | None
    odds: float = 1.0
    unused: bool = False
    reached: list[float] = field(default_factory=_nothing)
    used: list[float] = field(default_factory=_nothing)
    index: list[float] = field(default_factory=_nothing)
    peak: int = 0
    counted_at: int = 0
    changes: int = 0
    """Things counted since the index was brought in line."""
    shares: list[float] = field(default_factory=_nothing)
    expected: float = 0.0
    seen: float = 0.0
    """Uses lately: by the shares, and in truth."""
    is_steady: bool = True
    """Whether uses that fail to come tell something: agents' come in bursts."""

    def decay(self, uses: int) -> None:
        """Forgets what the uses since the last time make it forget."""
        self.keep(0.5 ** ((uses - self.counted_at) / HALF_LIFE_USES))
        self.counted_at = uses

    def keep(self, share: float) -> None:
        """Forgets all but a share of what was counted."""
        self.reached = [count * share for count in self.reached]
        self.used = [count * share for count in self.used]

    def doubt(self) -> None:
        """Forgets most of what was counted where uses fail to come: what is in use has changed."""
        if self.is_steady and self.expected - self.seen > SURPRISE * (self.expected + 1) ** 0.5:
            self.keep(DOUBTED)
            if self.wider is not None:
                self.wider.keep(DOUBTED)
        elif self.expected < EXPECTED_MAX:
            return
        self.expected = self.seen = 0.0

    def share(self) -> Floats:
        """By bucket, the share of those that reached it that were used in it."""
        before = _UNKNOWN if self.wider is None else self.wider.share()
        if self.odds != 1:
            before = self.odds * before / (1 - before + self.odds * before)
        if self.unused:
            return self._no_better_later(before)
        used = np.array(self.used) + BORROWED * before
        return np.minimum(used / (np.array(self.reached) + BORROWED), 0.999)

    def _no_better_later(self, before: Floats) -> Floats:
        """The same, where an age that few have reached is taken for no better than the one before it.

        What was put and is not used grows no older than the cache lets it. Were ages beyond that expected to be as good
        as anything unknown, the young would have the longest way to go there, and what was just put would go first.
        """
        found: list[float] = []
        expected = 1.0
        for reached, used, prior, narrower in zip(self.reached, self.used, before.tolist(), _NARROWER, strict=True):
            expected = min((used + BORROWED * min(prior, expected * narrower)) / (reached + BORROWED), 0.999)
            found.append(expected)
        return np.array(found)

    def comes_back(self, at: int) -> float | None:
        """The share of its things that were used again, of those that were still unused in bucket `at`; of a wider
        class where too few of its own came so far; None where too few of any did."""
        if self.reached[at] < KNOWN_MIN:
            return None if self.wider is None else self.wider.comes_back(at)
        unused = 1.0
        for reached, used in zip(self.reached[at:], self.used[at:], strict=True):
            if reached < KNOWN_MIN:
                break
            unused *= 1 - used / reached
        return 1 - unused

    def refresh(self) -> None:
        """Brings `index` in line with what was counted."""
        self.changes = 0
        share = self.share()
        self.shares = share.tolist()
        index, reached = _gittins(share), self.reached
        peak = int(np.argmax(index))
        values = index.tolist()
        weights = [count + 0.01 for count in reached]
        young = _falling(values[peak::-1], weights[peak::-1])
        self.index = [*young[:0:-1], *_falling(values[peak:], weights[peak:])]
        self.peak = self.index.index(max(self.index))


def _gittins(share: Floats) -> Floats:
    """The index at each bucket's beginning. With F the share used by an age, and T the mean time kept until then, it is
    the steepest slope from (T, F) at the age to a later one: the survivors' number cancels out."""
    survive = np.concatenate(([1.0], np.cumprod(1 - share)))
    kept = survive[:-1] * _WIDTHS * (1 - share / 2)
    time = np.concatenate(([0.0], np.cumsum(kept)))
    gained = survive[:-1, None] - survive[None, 1:]
    took = time[None, 1:] - time[:-1, None]
    later = _LATER & (took > 0)
    slopes = np.divide(gained, took, out=np.zeros_like(took), where=later)
    best: Floats = slopes.max(axis=1)
    return best


_LATER: Final = np.triu(np.ones((BUCKETS, BUCKETS), bool))


def _falling(values: list[float], weights: list[float]) -> list[float]:
    """The nearest sequence that does not rise (pool adjacent violators: Ayer et al., 1955)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        many = 1
        while pools and pools[-1][0] < value:
            other, heavy, count = pools.pop()
            value = (other * heavy + value * weight) / (heavy + weight)
            weight, many = weight + heavy, many + count
        pools.append((value, weight, many))
    return [value for value, _, many in pools for _ in range(many)]


class Hazards:
    """Rows by class, each refreshed when most was counted of it since the last time.

    `index` and `peak` have a line for each row, by its number; other arrays from time to time.
    """

    def __init__(self) -> None:
        self._rows: dict[Name, Row] = {}
        self.by_number: list[Row] = []
        self.index: Floats = np.zeros((64, BUCKETS))
        self.peak = np.zeros(64, np.int64)
        self.uses = 0

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, often: int, state: int, more: int, odds: float = 1.0) -> Row:
        """The class of what was used 2 ** `often` times or so, whose agent is in `state`, and which is `more` besides.

        As long as little is known of it, it is taken for like others with `often` and `state`; and these for like all,
        with the odds of being used that follow from `often`, and `odds` times those because of `state`.
        """
        row = self._rows.get((often, state, more))
        if row is None:
            unused = often == 0
            odds *= UNUSED_ODDS if unused else USED_ODDS + often
            wide = self._row((often, state), self._row((), None), odds, unused)
            row = self._row((often, state, more), wide, 1.0, unused)
            row.is_steady = state == 0
        return row

    def _row(self, name: Name, wider: Row | None, odds: float = 1.0, unused: bool = False) -> Row:
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = Row(len(self._rows), wider, odds, unused, counted_at=self.uses)
            self.by_number.append(row)
            if row.number == len(self.index):
                self.index = np.concatenate([self.index, np.zeros_like(self.index)])
                self.peak = np.concatenate([self.peak, np.zeros_like(self.peak)])
            self._refresh(row)
        return row

    def reached(self, row: Row, at: int) -> None:
        """Something of the class became so old as to be in bucket `at`."""
        row.changes += 1
        row.expected += row.shares[at]
        above: Row | None = row
        while above is not None:
            above.reached[at] += 1
            above = above.wider

    def used(self, row: Row, at: int) -> None:
        """Something of the class was used in bucket `at`, which it had reached."""
        row.changes += 1
        row.seen += 1
        above: Row | None = row
        while above is not None:
            above.used[at] += 1
            above = above.wider

    def refresh_one(self) -> None:
        """Brings the row up to date of which most was counted since the last time."""
        if self.by_number:
            self._refresh(max(self.by_number, key=_changes))

    def counts(self) -> list[tuple[Name, bytes]]:
        """What was counted, by class; for `learn`."""
        for row in self.by_number:
            row.decay(self.uses)
        return [(name, np.array([row.reached, row.used]).tobytes()) for name, row in self._rows.items()]

    def learn(self, name: Name, counts: bytes) -> None:
        """What `counts` told of a class that there is. A ValueError where it is none."""
        row = self._rows.get(name)
        if row is None:
            return
        reached, used = np.frombuffer(counts).reshape(2, BUCKETS)
        if not (np.isfinite(reached).all() and (used >= 0).all() and (reached >= 0).all()):
            raise ValueError("counts below 0")
        row.reached, row.used = reached.tolist(), used.tolist()
        self._refresh(row)

    def _refresh(self, row: Row) -> None:
        above: Row | None = row
        while above is not None:
            above.decay(self.uses)
            above = above.wider
        row.doubt()
        row.refresh()
        self.index[row.number], self.peak[row.number] = row.index, row.peak


def _changes(row: Row) -> int:
    return row.changes
