"""Learns how likely an entry is used again, from its class and its age (the time since its last use).

For each class (defined by the caller) and each bucket of age there are two counts: the entries that reached this age
without a use, and those of them that were used before they left the bucket. Both counts are halved every HALF_LIFE_USES
uses. Their quotient is a discrete hazard (Kaplan and Meier, 1958). An entry that is evicted or forgotten meanwhile just
stops being counted (it is censored). A class with few counts borrows from wider classes.

The policy needs the best rate at which keeping an entry can pay from now on:

    index(a) = max over b > a of P(used by age b | not used by age a) / E(time kept until then | not used by age a)

This is Gittins' index (J. C. Gittins, "Bandit processes and dynamic allocation indices", J. R. Stat. Soc. B 41, 1979).
Without the maximum it is the hit density of LHD (Beckmann, Chen, Cidon, NSDI 2018). The index is smoothed so that it
rises to one peak and falls after it. So the coldest entry of a class is either its oldest or its youngest.

Owns: the counts, and the indices derived from them. Does not own ages (`ages`) nor the meaning of classes (`hazard`).

Invariants: memory is bounded by the number of classes, which the caller bounds. After `peak` an index does not rise,
before it an index does not fall.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

BOUNDS: Final = [2 ** (k / 2 - 4) for k in range(60)]
"""The ages at which the buckets 1, 2, ... begin, in mean pauses (`ages.Clock`). The last begins at 47 million."""
BUCKETS: Final = len(BOUNDS) + 1
HALF_LIFE_USES: Final = 1 << 17
BORROWED: Final = 3.0
"""The weight of the wider class's share in a class's share, as a number of entries."""
UNUSED_ODDS: Final = 0.5
USED_ODDS: Final = 2.0
"""The initial odds of a further use for a new class, relative to all entries. UNUSED_ODDS: for entries not used since
their put. USED_ODDS: for used entries; the class of uses (`often`) is added, which is 1 higher for each doubling of the
uses. If each doubling doubled the odds, entries that were used often long ago would stay, and new entries in use would
evict each other."""
_UNKNOWN: Final = np.array([0.6] + [0.25] * (BUCKETS - 1))
"""The initial share of entries used in each bucket. With it the rate falls with age, as in least recently used, also
from the first bucket to the second, which is narrower."""

STALE_DEVIATIONS: Final = 4.0
"""Uses this many standard deviations below the expected number are not due to chance."""
STALE_SHARE: Final = 0.1
"""The share of its counts that a class keeps when its uses stay below the expected number."""
EXPECTED_MAX: Final = 200.0
"""After this number of expected uses, the comparison of expected and counted uses starts again."""
REFRESHED_COUNTS: Final = 8
REFRESHED_SHARE: Final = 1 / 128
"""The index of a class is refreshed after REFRESHED_COUNTS counts, or this share of its entries if that is more, or
later."""
KNOWN_MIN: Final = 8.0
"""The number of entries of a class that must have reached an age before their share is reported to users."""

_EDGES: Final = np.array([0.0, *BOUNDS, 2 * BOUNDS[-1]])
_WIDTHS: Final = np.diff(_EDGES)
_NARROWER: Final = [1.0, *np.minimum(_WIDTHS[1:] / _WIDTHS[:-1], 1.0).tolist()]
"""The width of each bucket relative to the one before, at most 1."""

_FIRST: Final = 1023 - 9
"""The biased exponent of the squared age before which bucket 1 does not begin: BOUNDS[0] ** 2 is 2 ** -8."""

Name = tuple[int, ...]
Floats = npt.NDArray[np.float64]


def bucket(age: float) -> int:
    """The bucket of an age."""
    return bisect_right(BOUNDS, age)


def buckets(ages: Floats) -> npt.NDArray[np.int64]:
    """The bucket of each age; that of a negative age is 0. The exponent of its square numbers the buckets."""
    squared = np.square(np.maximum(ages, 0.0))
    found: npt.NDArray[np.int64] = np.minimum(np.maximum((squared.view(np.int64) >> 52) - _FIRST, 0), BUCKETS - 1)
    return found


def _nothing() -> list[float]:
    return [0.0] * BUCKETS


@dataclass(slots=True, eq=False)
class Row:
    """One class.

    `index`: by bucket. From `peak` on it does not rise. `number`: classes are numbered in the order of their creation.
    `wider`: the class that it borrows from; its odds of a use are taken as `odds` times those of the wider class.
    `unused`: a class of entries that were not used since their put.
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
    """The number of counts since the index was last refreshed."""
    shares: list[float] = field(default_factory=_nothing)
    expected: float = 0.0
    seen: float = 0.0
    """Recent uses: expected from the shares (`expected`), and counted (`seen`)."""
    is_steady: bool = True
    """True if missing uses are significant. For entries of agents they are not, because their uses come in bursts."""

    def decay(self, uses: int) -> None:
        """Decays the counts for the uses since the last decay."""
        self.keep(0.5 ** ((uses - self.counted_at) / HALF_LIFE_USES))
        self.counted_at = uses

    def keep(self, share: float) -> None:
        """Reduces the counts to a share."""
        self.reached = [count * share for count in self.reached]
        self.used = [count * share for count in self.used]

    def forget_if_stale(self) -> None:
        """Reduces the counts to STALE_SHARE if far fewer uses came than expected: the entries in use have changed."""
        if self.is_steady and self.expected - self.seen > STALE_DEVIATIONS * (self.expected + 1) ** 0.5:
            self.keep(STALE_SHARE)
            if self.wider is not None:
                self.wider.keep(STALE_SHARE)
        elif self.expected < EXPECTED_MAX:
            return
        self.expected = self.seen = 0.0

    def share(self) -> Floats:
        """For each bucket, the share of the entries that reached it that were used in it."""
        before = _UNKNOWN if self.wider is None else self.wider.share()
        if self.odds != 1:
            before = self.odds * before / (1 - before + self.odds * before)
        if self.unused:
            return self._no_better_later(before)
        used = np.array(self.used) + BORROWED * before
        return np.minimum(used / (np.array(self.reached) + BORROWED), 0.999)

    def _no_better_later(self, before: Floats) -> Floats:
        """`share` for unused entries: the share of an age that few have reached is at most that of the age before.

        Unused entries grow only as old as the cache lets them. If the unreached ages beyond that had the initial share,
        young entries would be the farthest from these ages, and new entries would be evicted first.
        """
        found: list[float] = []
        expected = 1.0
        for reached, used, prior, narrower in zip(self.reached, self.used, before.tolist(), _NARROWER, strict=True):
            expected = min((used + BORROWED * min(prior, expected * narrower)) / (reached + BORROWED), 0.999)
            found.append(expected)
        return np.array(found)

    def comes_back(self, at: int) -> float | None:
        """The share of the class's entries, still unused in bucket `at`, that were used later.

        If too few entries of the class have reached `at`, the share is that of a wider class. None if too few entries
        of any class have.
        """
        if self.reached[at] < KNOWN_MIN:
            return None if self.wider is None else self.wider.comes_back(at)
        unused = 1.0
        for reached, used in zip(self.reached[at:], self.used[at:], strict=True):
            if reached < KNOWN_MIN:
                break
            unused *= 1 - used / reached
        return 1 - unused

    def refresh(self) -> None:
        """Computes `index` from the counts."""
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
    """The index at the start of each bucket.

    Let F be the share used by an age, and T the mean time kept until then. The index is the steepest slope from (T, F)
    at the age to (T, F) at a later age. The number of survivors cancels out.
    """
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
    """The nearest non-increasing sequence (pool adjacent violators: Ayer et al., 1955)."""
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
    """The rows of all classes. A refresh takes the row that has changed most since its last refresh.

    `index` and `peak` have a line for each row, by the row's number. The arrays are replaced when they have to grow.
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
        """The class of entries with the class `often` of uses, an agent in `state`, and the further traits `more`.

        While the class has few counts, it borrows from the wider class of `often` and `state`. That class borrows from
        the class of all entries, with odds of a use that depend on `often`, times `odds` for the state.
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

    def reached(self, row: Row, at: int, count: int) -> None:
        """Counts `count` entries of the class that have reached bucket `at`."""
        row.changes += count
        row.expected += count * row.shares[at]
        above: Row | None = row
        while above is not None:
            above.reached[at] += count
            above = above.wider

    def used(self, row: Row, at: int) -> None:
        """Counts an entry of the class that was used in bucket `at`, which it had reached."""
        row.changes += 1
        row.seen += 1
        above: Row | None = row
        while above is not None:
            above.used[at] += 1
            above = above.wider

    def refresh_one(self) -> bool:
        """Refreshes the row that has changed most since its last refresh. False if none has changed enough."""
        row = max(self.by_number, key=_changed, default=None)
        if row is None or _changed(row) < 1:
            return False
        self._refresh(row)
        return True

    def counts(self) -> list[tuple[Name, bytes]]:
        """The counts by class, for `learn`."""
        for row in self.by_number:
            row.decay(self.uses)
        return [(name, np.array([row.reached, row.used]).tobytes()) for name, row in self._rows.items()]

    def learn(self, name: Name, counts: bytes) -> None:
        """Restores the counts of an existing class. Ignores an unknown class.

        Raises:
            ValueError: the counts are invalid.
        """
        row = self._rows.get(name)
        if row is None:
            return
        reached, used = np.frombuffer(counts).reshape(2, BUCKETS)
        if not (np.isfinite(reached).all() and (used >= 0).all() and (reached >= 0).all()):
            raise ValueError("counts that are negative or not finite")
        row.reached, row.used = reached.tolist(), used.tolist()
        self._refresh(row)

    def _refresh(self, row: Row) -> None:
        above: Row | None = row
        while above is not None:
            above.decay(self.uses)
            above = above.wider
        row.forget_if_stale()
        row.refresh()
        self.index[row.number], self.peak[row.number] = row.index, row.peak


def _changed(row: Row) -> float:
    """The counts since the last refresh, relative to the number after which the row is refreshed."""
    return row.changes / max(REFRESHED_COUNTS, REFRESHED_SHARE * row.reached[0])
