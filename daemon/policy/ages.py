"""Measures how long entries stay unused: the input of the learned hazards (`hazards`).

Each use of a watched entry begins an age. The age runs until the entry's next use, also after an eviction. The ages are
kept in the order in which they began. For each bucket of age, a position in that order marks the ages that have reached
the bucket. A sweep only moves these positions forward.

Only a sample of the entries is watched. The digest of the key decides, so an entry is in the sample at every use. The
sample is halved whenever more than WATCHED_MAX ages run: the spatial sampling of SHARDS (Waldspurger et al., FAST
2015).

Owns: the running ages. Does not own the counts (`hazards`).

Invariant: at most WATCHED_MAX ages run, and about as many ended ones are kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from .hazards import BOUNDS, BUCKETS, bucket

WATCHED_MAX: Final = 2048

Counted = Callable[[int, int, int], None]
"""(traits, agent, bucket)"""
CountedMany = Callable[[int, int, int, int], None]
"""(traits, agent, bucket, number of entries)"""


@dataclass(slots=True, eq=False)
class Age:
    """The time since the last use of an entry, which was at `began` by the policy's clock. `passed`: the number of
    buckets that the age has reached."""

    digest: int
    traits: int
    agent: int
    began: float
    passed: int = 0
    ended: bool = False


class Ages:
    """The running ages.

    `reached` is called for each bucket that watched entries reach, `used` for the bucket in which one is used.
    """

    def __init__(self, reached: CountedMany, used: Counted) -> None:
        self._reached = reached
        self._used = used
        self._running: dict[int, Age] = {}
        self._log: list[Age] = []
        self._places = [0] * BUCKETS
        self._mask = 0

    def __len__(self) -> int:
        return len(self._running)

    def use(self, digest: int, traits: int, agent: int, now: float, *, again: bool) -> None:
        """Takes a use of an entry, which has these traits from now on.

        `again`: the use ends the running age and is counted. Otherwise the use counts as a part of the last use, and
        only restarts the age.
        """
        if digest & self._mask:
            return
        age = self._running.get(digest)
        if age is not None:
            if again:
                at = bucket(now - age.began)
                self._pass_to(age, at)
                self._used(age.traits, age.agent, at)
            age.ended = True
        age = self._running[digest] = Age(digest, traits, agent, now)
        self._log.append(age)

    def forget(self, digest: int) -> None:
        """Ends the age of an entry that is gone for good."""
        age = self._running.pop(digest, None)
        if age is not None:
            age.ended = True

    def sweep(self, now: float) -> None:
        """Reports the entries that have reached further buckets since the last sweep."""
        log, places = self._log, self._places
        reached: dict[tuple[int, int, int], int] = {}
        for at in range(BUCKETS):
            latest = now - BOUNDS[at - 1] if at else now
            place = places[at]
            while place < len(log) and log[place].began <= latest:
                age = log[place]
                if age.passed == at and not age.ended:
                    age.passed += 1
                    like = (age.traits, age.agent, at)
                    reached[like] = reached.get(like, 0) + 1
                place += 1
            if place == 0:
                break
            places[at] = place
        for like, count in reached.items():
            self._reached(*like, count)
        if len(self._running) > WATCHED_MAX or len(log) > 2 * len(self._running) + 512:
            self._compact()

    def _pass_to(self, age: Age, at: int) -> None:
        """Reports all buckets up to `at` that no sweep has reported yet."""
        while age.passed <= at:
            self._reached(age.traits, age.agent, age.passed, 1)
            age.passed += 1

    def _compact(self) -> None:
        """Removes ended ages. Halves the sample while too many ages run."""
        while len(self._running) > WATCHED_MAX:
            self._mask = 2 * self._mask + 1
            for digest in [digest for digest in self._running if digest & self._mask]:
                self.forget(digest)
        self._log = [age for age in self._log if not age.ended]
        # Older ages have passed at least as many buckets.
        self._places = [bisect_left(self._log, -at, key=lambda age: -age.passed) for at in range(BUCKETS)]
