"""Time in requests, and how long entries stay unused: the input of the learned hazards (`hazards`).

The unit of the clock is the mean pause between recent requests. So entries do not age while there are no requests, and
state learned at one request rate is valid at any other.

Each use of a watched entry begins an age. The age runs until the entry's next use, also after an eviction. The ages are
kept in the order in which they began. For each bucket of age, a position in that order marks the ages that have reached
the bucket. A sweep only moves these positions forward. Only a sample of the entries is watched. A tag (a hash of the
key) decides, so an entry is in the sample at every use. The sample is halved whenever more than WATCHED_MAX ages run:
the spatial sampling of SHARDS (Waldspurger et al., FAST 2015).

Owns: the clock and the running ages. Does not own the counts (`hazards`).

Invariants: the clock never runs backwards; one pause adds at most PAUSE_MAX. About WATCHED_MAX ages run at most, and
about as many ended ones are kept, whatever the number of entries.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Final

import numpy as np

from .hazards import BOUNDS, BUCKETS, bucket
from .window import Array

PAUSES: Final = 256
"""The mean is over about this number of pauses."""
PAUSE_MAX: Final = 64.0
"""A longer pause counts as this many mean pauses."""
WATCHED_MAX: Final = 2048
USES_AT_ONCE: Final = 1024

Counted = Callable[[int, int, int], None]
"""(traits, agent, bucket)"""
CountedMany = Callable[[int, int, int, int], None]
"""(traits, agent, bucket, number of entries)"""


class Clock:
    """`now`: the time since the start, in mean pauses."""

    def __init__(self) -> None:
        self.now = 0.0
        self._at: float | None = None
        self._mean_s = 0.0
        self._seen = 0

    def learned(self) -> list[float]:
        """The clock's state, for `learn`."""
        return [self.now, self._mean_s, self._seen]

    def learn(self, state: list[float]) -> None:
        """Restores the state from `learned`. The time since then does not count as a pause.

        Raises:
            ValueError, TypeError: `state` is not a state of a clock.
        """
        now, mean_s, seen = map(float, state)
        if not (isfinite(now) and isfinite(mean_s) and now >= 0 and mean_s >= 0 and 0 <= seen <= PAUSES):
            raise ValueError("not a state of the clock")
        self.now, self._mean_s, self._seen, self._at = now, mean_s, int(seen), None

    def pass_to(self, at: float) -> float:
        """Sets the time to `at` seconds of a steady clock, and returns `now`. A time not after the last one counts as
        no pause."""
        pause_s = 0.0 if self._at is None else at - self._at
        self._at = at if self._at is None else max(self._at, at)
        if pause_s <= 0:
            return self.now
        mean_s = self._mean_s or pause_s
        pause_s = min(pause_s, PAUSE_MAX * mean_s)
        self.now += pause_s / mean_s
        self._seen = min(self._seen + 1, PAUSES)
        self._mean_s = mean_s + (pause_s - mean_s) / self._seen
        return self.now


@dataclass(slots=True, eq=False)
class Age:
    """The time since the last use of an entry, which was at `began` by the policy's clock. `passed`: the number of
    buckets that the age has reached."""

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

    def use(self, tags: Array, traits: Array, agents: Array, times: Array, again: Array) -> None:
        """Takes uses of entries, which have these traits from now on, in the order of their times.

        `again`: the use ends the running age and is counted. Otherwise the use counts as a part of the last use, and
        only restarts the age. So does a second use of an entry among these.
        """
        for first in range(0, len(tags), USES_AT_ONCE):
            part = slice(first, first + USES_AT_ONCE)
            seen = np.flatnonzero(tags[part] & self._mask == 0)
            if len(seen):
                columns = (tags, traits, agents, times, again)
                self._use(*(column[part][seen].tolist() for column in columns))
            if len(self._running) > WATCHED_MAX:
                self._compact()

    def _use(
        self, tags: list[int], traits: list[int], agents: list[int], times: list[float], again: list[bool]
    ) -> None:
        running, log = self._running, self._log
        used: set[int] = set()
        for tag, of, agent, now, counts in zip(tags, traits, agents, times, again, strict=True):
            age = running.get(tag)
            if age is not None:
                if counts and tag not in used:
                    at = bucket(now - age.began)
                    self._pass_to(age, at)
                    self._used(age.traits, age.agent, at)
                age.ended = True
            used.add(tag)
            age = running[tag] = Age(of, agent, now)
            log.append(age)

    def forget(self, tags: Array) -> None:
        """Ends the ages of entries that are gone for good."""
        for tag in tags[tags & self._mask == 0].tolist():
            age = self._running.pop(tag, None)
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
        if len(log) > 2 * len(self._running) + 512:
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
            for tag in [tag for tag in self._running if tag & self._mask]:
                self._running.pop(tag).ended = True
        self._log = [age for age in self._log if not age.ended]
        # Older ages have passed at least as many buckets.
        self._places = [bisect_left(self._log, -at, key=lambda age: -age.passed) for at in range(BUCKETS)]
