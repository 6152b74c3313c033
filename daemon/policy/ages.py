"""Who grows how old without a use: what the learned hazards (`hazards`) count.

Every use of something that is watched begins an age; it goes on, also after an eviction, until the next use. Ages begun
lie in order of time, and for each bucket a place in that order says who has reached it; so all that is done is to move
those places on.

Only a sample is watched (by the digest of its key, so that it is the same at every use), halved whenever more than
WATCHED_MAX ages run: the spatial sampling of SHARDS (Waldspurger et al., FAST 2015).

Owns: the ages that run. Bounded by WATCHED_MAX, and as many again that have ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from .hazards import BOUNDS, BUCKETS, bucket

WATCHED_MAX: Final = 2048

Told = Callable[[int, int, int], None]
"""(traits, agent, bucket)"""


@dataclass(slots=True, eq=False)
class Age:
    """Since `began` (by the policy's clock) it was not used; it has `passed` into so many buckets."""

    digest: int
    traits: int
    agent: int
    began: float
    passed: int = 0
    ended: bool = False


class Ages:
    """Ages that run. `reached` is told of each bucket that a watched thing comes to, `used` of that of its use."""

    def __init__(self, reached: Told, used: Told) -> None:
        self._reached = reached
        self._used = used
        self._running: dict[int, Age] = {}
        self._log: list[Age] = []
        self._places = [0] * BUCKETS
        self._mask = 0

    def __len__(self) -> int:
        return len(self._running)

    def use(self, digest: int, traits: int, agent: int, now: float, *, again: bool) -> None:
        """A use of something, which is of those traits from now on. `again`: it ends the age that runs; else that was
        part of the same use."""
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
        """The thing is gone for good."""
        age = self._running.pop(digest, None)
        if age is not None:
            age.ended = True

    def sweep(self, now: float) -> None:
        """Counts who has grown older since."""
        log, places, reached = self._log, self._places, self._reached
        for at in range(BUCKETS):
            latest = now - BOUNDS[at - 1] if at else now
            place = places[at]
            while place < len(log) and log[place].began <= latest:
                age = log[place]
                if age.passed == at and not age.ended:
                    age.passed += 1
                    reached(age.traits, age.agent, at)
                place += 1
            if place == 0:
                break
            places[at] = place
        if len(self._running) > WATCHED_MAX or len(log) > 2 * len(self._running) + 512:
            self._compact()

    def _pass_to(self, age: Age, at: int) -> None:
        """The thing is seen in bucket `at`, whether the places came by or not."""
        while age.passed <= at:
            self._reached(age.traits, age.agent, age.passed)
            age.passed += 1

    def _compact(self) -> None:
        """Lets go of ages that have ended, and of half of them where too many run."""
        while len(self._running) > WATCHED_MAX:
            self._mask = 2 * self._mask + 1
            for digest in [digest for digest in self._running if digest & self._mask]:
                self.forget(digest)
        self._log = [age for age in self._log if not age.ended]
        # The older, the further passed.
        self._places = [bisect_left(self._log, -at, key=lambda age: -age.passed) for at in range(BUCKETS)]
