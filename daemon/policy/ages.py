"""Who grows how old without a use: what the learned hazards (`hazards`) count.

Every use of something that is watched begins an age; it goes on, also after an eviction, until the next use or until
what is remembered of the thing is forgotten. Ages begun lie in order of time, and for each bucket a place in that order
says who has reached it; so all that is done is to move those places on.

Only a sample is watched (by the hash of its key, so that it is the same at every use), halved whenever more than
WATCHED_MAX ages run: the spatial sampling of SHARDS (Waldspurger et al., FAST 2015).

Owns: the ages that run. Bounded by WATCHED_MAX, and as many again that have ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar
from zlib import crc32

from .hazards import BOUNDS, BUCKETS

WATCHED_MAX: Final = 2048

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Age(Generic[T]):
    """Since `began` (by the policy's clock) `of` was not used. It has `passed` into so many buckets."""

    of: T
    began: float
    hash: int
    passed: int = 0
    ended: bool = False


class Ages(Generic[T]):
    """Ages that run. `reached` is told of each bucket that a watched thing comes to."""

    def __init__(self, reached: Callable[[T, int], None]) -> None:
        self._reached = reached
        self._log: list[Age[T]] = []
        self._places = [0] * BUCKETS
        self._running = 0
        self._mask = 0

    def __len__(self) -> int:
        return self._running

    def begin(self, of: T, key: bytes, now: float) -> Age[T] | None:
        """A use; None where the thing is not watched."""
        number = crc32(key)
        if number & self._mask:
            return None
        age = Age(of, now, number)
        self._log.append(age)
        self._running += 1
        return age

    def pass_to(self, age: Age[T], at: int) -> None:
        """The thing is seen in bucket `at`, whether the places came by or not."""
        while age.passed <= at:
            self._reached(age.of, age.passed)
            age.passed += 1

    def end(self, age: Age[T]) -> None:
        """The next use has come, or never will."""
        if not age.ended:
            age.ended = True
            self._running -= 1

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
                    reached(age.of, at)
                place += 1
            if place == 0:
                break
            places[at] = place
        if self._running > WATCHED_MAX or len(log) > 2 * self._running + 512:
            self._compact()

    def _compact(self) -> None:
        """Lets go of ages that have ended, and of half of them where too many run."""
        while self._running > WATCHED_MAX:
            self._mask = 2 * self._mask + 1
            for age in self._log:
                if age.hash & self._mask:
                    self.end(age)
        self._log = [age for age in self._log if not age.ended]
        # The older, the further passed.
        self._places = [bisect_left(self._log, -at, key=lambda age: -age.passed) for at in range(BUCKETS)]
