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

Owns: the counts, and the indices derived from them. Does not own ages (`ages`) nor the meaning of classes (`traits`).
Invariant: after `peak` an index does not rise, before it an index does not fall.
"""

from __future__ import annotations

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
Ints = npt.NDArray[np.int64]


def buckets(ages: Floats) -> Ints:
    """The bucket of each age; that of a negative age is 0. The exponent of its square numbers the buckets."""
    squared = np.square(np.maximum(ages, 0.0))
    found: Ints = np.minimum(np.maximum((squared.view(np.int64) >> 52) - _FIRST, 0), BUCKETS - 1)
    return found


class Hazards:
    """The counts and indices of all classes, a line for each, by the class's number.

    `index`: by bucket; from `peak` on it does not rise. `most`: the most classes. Lines that were never written take no
    memory.
    """

    def __init__(self, most: int) -> None:
        self._numbers: dict[Name, int] = {}
        self._names: list[Name] = []
        self.index: Floats = np.zeros((most, BUCKETS))
        self.peak: Ints = np.zeros(most, np.int64)
        self.uses = 0
        self._reached: Floats = np.zeros((most, BUCKETS))
        self._used: Floats = np.zeros((most, BUCKETS))
        self._shares: Floats = np.zeros((most, BUCKETS))
        self._wider: Ints = np.full(most, -1, np.int64)
        """The class that a class borrows from, whose odds of a use times `_odds` are taken."""
        self._odds: Floats = np.ones(most)
        self._counted_at: Ints = np.zeros(most, np.int64)
        self._changes: Floats = np.zeros(most)
        """Counts since the index was last refreshed."""
        self._expected: Floats = np.zeros(most)
        self._seen: Floats = np.zeros(most)
        """Recent uses: expected from the shares, and counted."""

    def number(self, often: int, state: int, more: int, odds: float = 1.0) -> int:
        """The class of entries with the class `often` of uses, an agent in `state`, and the further traits `more`.

        While the class has few counts, it borrows from the wider class of `often` and `state`. That class borrows from
        the class of all entries, with odds of a use that depend on `often`, times `odds` for the state.
        """
        found = self._numbers.get((often, state, more))
        if found is None:
            odds *= USED_ODDS + often if often else UNUSED_ODDS
            wide = self._number((often, state), self._number((), -1), odds)
            found = self._number((often, state, more), wide)
        return found

    def reached(self, classes: Ints, at: Ints) -> None:
        """Counts entries of these classes that have reached these buckets."""
        np.add.at(self._changes, classes, 1)
        np.add.at(self._expected, classes, self._shares[classes, at])
        self._count(self._reached, classes, at)

    def used(self, classes: Ints, at: Ints) -> None:
        """Counts entries of these classes that were used in these buckets, which they had reached."""
        np.add.at(self._changes, classes, 1)
        np.add.at(self._seen, classes, 1)
        self._count(self._used, classes, at)

    def refresh_one(self) -> bool:
        """Refreshes the class that has changed most since its last refresh. False if none has changed enough."""
        count = len(self._numbers)
        if not count:
            return False
        after = np.maximum(REFRESHED_COUNTS, REFRESHED_SHARE * self._reached[:count, 0])
        changed = self._changes[:count] / after
        number = int(changed.argmax())
        if changed[number] < 1:
            return False
        self._refresh(number)
        return True

    def comes_back(self, number: int, at: int) -> float | None:
        """The share of the class's entries, still unused in bucket `at`, that were used later.

        If too few entries of the class have reached `at`, the share is that of a wider class. None if too few entries
        of any class have.
        """
        while number >= 0 and self._reached[number, at] < KNOWN_MIN:
            number = int(self._wider[number])
        if number < 0:
            return None
        reached, used = self._reached[number, at:], self._used[number, at:]
        few = np.flatnonzero(reached < KNOWN_MIN)
        last = int(few[0]) if len(few) else len(reached)
        return float(1 - np.prod(1 - used[:last] / reached[:last]))

    def counts(self) -> list[tuple[Name, bytes]]:
        """The counts by class, for `learn`."""
        for number in self._numbers.values():
            self._decay(number)
        return [
            (name, self._reached[number].tobytes() + self._used[number].tobytes())
            for name, number in self._numbers.items()
        ]

    def learn(self, name: Name, counts: bytes) -> None:
        """Restores the counts of an existing class; ignores an unknown one. Raises ValueError if they are invalid."""
        number = self._numbers.get(name)
        if number is None:
            return
        reached, used = np.frombuffer(counts).reshape(2, BUCKETS)
        if not (np.isfinite(reached).all() and (used >= 0).all() and (reached >= 0).all()):
            raise ValueError("counts that are negative or not finite")
        self._reached[number], self._used[number] = reached, used
        self._refresh(number)

    def _number(self, name: Name, wider: int, odds: float = 1.0) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._numbers)
            self._names.append(name)
            self._wider[number], self._odds[number], self._counted_at[number] = wider, odds, self.uses
            self._refresh(number)
        return number

    def _count(self, counts: Floats, classes: Ints, at: Ints) -> None:
        # Every class has two wider ones.
        for _ in range(3):
            np.add.at(counts, (classes, at), 1)
            classes = self._wider[classes]

    def _decay(self, number: int) -> None:
        share = 0.5 ** ((self.uses - int(self._counted_at[number])) / HALF_LIFE_USES)
        self._keep(number, share)
        self._counted_at[number] = self.uses

    def _keep(self, number: int, share: float) -> None:
        self._reached[number] *= share
        self._used[number] *= share

    def _forget_if_stale(self, number: int) -> None:
        """Reduces the counts to STALE_SHARE if far fewer uses came than expected: the entries in use have changed."""
        expected, seen = float(self._expected[number]), float(self._seen[number])
        # Missing uses of agents' entries are not significant: their uses come in bursts.
        of_agents = any(self._names[number][1:2])
        if not of_agents and expected - seen > STALE_DEVIATIONS * (expected + 1) ** 0.5:
            self._keep(number, STALE_SHARE)
            if self._wider[number] >= 0:
                self._keep(int(self._wider[number]), STALE_SHARE)
        elif expected < EXPECTED_MAX:
            return
        self._expected[number] = self._seen[number] = 0.0

    def _share(self, number: int) -> Floats:
        """For each bucket, the share of the entries that reached it that were used in it."""
        wider, odds = int(self._wider[number]), float(self._odds[number])
        before = _UNKNOWN if wider < 0 else self._share(wider)
        if odds != 1:
            before = odds * before / (1 - before + odds * before)
        reached, used = self._reached[number], self._used[number]
        if self._names[number][:1] == (0,):
            return _no_better_later(reached, used, before)
        share: Floats = np.minimum((used + BORROWED * before) / (reached + BORROWED), 0.999)
        return share

    def _refresh(self, number: int) -> None:
        above = number
        while above >= 0:
            self._decay(above)
            above = int(self._wider[above])
        self._forget_if_stale(number)
        self._changes[number] = 0
        share = self._shares[number] = self._share(number)
        index, weights = _gittins(share), (self._reached[number] + 0.01).tolist()
        peak, values = int(index.argmax()), index.tolist()
        young = _falling(values[peak::-1], weights[peak::-1])
        smooth = [*young[:0:-1], *_falling(values[peak:], weights[peak:])]
        self.index[number] = smooth
        self.peak[number] = smooth.index(max(smooth))


def _no_better_later(reached: Floats, used: Floats, before: Floats) -> Floats:
    """The shares for unused entries: that of an age that few have reached is at most that of the age before.

    Unused entries grow only as old as the cache lets them. If the unreached ages beyond that had the initial share,
    young entries would be the farthest from these ages, and new entries would be evicted first.
    """
    found: list[float] = []
    expected = 1.0
    columns = (reached.tolist(), used.tolist(), before.tolist(), _NARROWER)
    for reach, use, prior, narrower in zip(*columns, strict=True):
        expected = min((use + BORROWED * min(prior, expected * narrower)) / (reach + BORROWED), 0.999)
        found.append(expected)
    return np.array(found)


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
