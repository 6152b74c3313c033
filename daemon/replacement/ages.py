"""Time in requests, and how long entries stay unused: the input of the learned hazards (`hazards`).

The unit of the clock is the mean pause between recent requests. So entries do not age while there are no requests, and
state learned at one request rate is valid at any other.

Each use of a watched entry begins an age. The age runs until the entry's next use, also after an eviction. A sweep
looks at all ages at once. A tag (a hash of the key) decides which entries are watched, so an entry is in the sample at
every use. The sample is halved whenever more than WATCHED_MAX ages run: the spatial sampling of SHARDS (Waldspurger et
al., FAST 2015).

Owns: the clock and the running ages. Does not own the counts (`hazards`). Invariants: the clock never runs backwards;
one pause adds at most PAUSE_MAX. At most WATCHED_MAX + USES_AT_ONCE ages run, whatever the number of entries.
"""

from __future__ import annotations

from math import isfinite
from typing import Final

import numpy as np

from .hazards import buckets
from .known import Array
from .traits import Classes

PAUSES: Final = 256
"""The mean is over about this number of pauses."""
PAUSE_MAX: Final = 64.0
"""A longer pause counts as this many mean pauses."""
WATCHED_MAX: Final = 2048
USES_AT_ONCE: Final = 1024

PLACES: Final = 2 * (WATCHED_MAX + USES_AT_ONCE)


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
        """Restores the state from `learned`. The time since then is no pause. Raises ValueError or TypeError."""
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


class Ages:
    """The running ages: one place in a log of columns for each, in the order in which they began.

    The hazards of `classes` count the buckets that watched entries reach, and those in which some are used.
    """

    def __init__(self, classes: Classes) -> None:
        self._classes, self._hazards = classes, classes.hazards
        self._running: dict[int, int] = {}
        """By tag: its place in the log."""
        self._mask = 0
        self._end = 0
        self._tags = np.zeros(PLACES, np.uint32)
        self._began = np.zeros(PLACES)
        self._traits = np.zeros(PLACES, np.uint8)
        self._agents = np.zeros(PLACES, np.uint16)
        self._passed = np.zeros(PLACES, np.int64)
        """Buckets that the age has reached."""
        self._runs = np.zeros(PLACES, np.bool_)

    def expect(self, count: int) -> None:
        """So many entries come at once: the sample is to be no larger than WATCHED_MAX with all of them."""
        while not self._running and count // (self._mask + 1) > WATCHED_MAX:
            self._mask = 2 * self._mask + 1

    def use(self, tags: Array, traits: Array, agents: Array, times: Array, again: Array) -> None:
        """Takes uses of entries, which have these traits from now on, in the order of their times.

        `again`: the use ends the running age and is counted. Otherwise the use counts as a part of the last use, and
        only restarts the age. So does a second use of an entry among these.
        """
        for first in range(0, len(tags), USES_AT_ONCE):
            part = slice(first, first + USES_AT_ONCE)
            seen = np.flatnonzero(tags[part] & self._mask == 0) + first
            if len(seen):
                self._use(tags[seen], traits[seen], agents[seen], times[seen], again[seen])

    def _use(self, tags: Array, traits: Array, agents: Array, times: Array, again: Array) -> None:
        count = len(tags)
        if self._end + count > PLACES or len(self._running) > WATCHED_MAX:
            self._compact()
        running = self._running
        names, end = tags.tolist(), self._end
        old = np.array([running.get(tag, -1) for tag in names])
        self._runs[old[old >= 0]] = False
        running.update(zip(names, range(end, end + count), strict=True))
        new = slice(end, end + count)
        self._tags[new], self._traits[new], self._agents[new] = tags, traits, agents
        self._began[new], self._passed[new], self._runs[new] = times, 0, True
        self._end += count
        if len(set(names)) < count:
            # Only the last use of an entry begins an age, and only the first one ends one.
            self._runs[new] = np.array([running[tag] for tag in names]) == np.arange(end, end + count)
            _, firsts = np.unique(tags, return_index=True)
            first = np.zeros(count, np.bool_)
            first[firsts] = True
            again = again & first
        ended = (old >= 0) & again
        if ended.any():
            old = old[ended]
            at = buckets(times[ended] - self._began[old])
            self._pass_to(old, at)
            self._hazards.used(self._classes.of(self._traits[old], self._agents[old]), at)

    def forget(self, tags: Array) -> None:
        """Ends the ages of entries that are gone for good."""
        for tag in tags[tags & self._mask == 0].tolist():
            place = self._running.pop(tag, None)
            if place is not None:
                self._runs[place] = False

    def sweep(self, now: float) -> None:
        """Reports the entries that have reached further buckets since the last sweep."""
        runs = np.flatnonzero(self._runs[: self._end])
        self._pass_to(runs, buckets(now - self._began[runs]))

    def _pass_to(self, places: Array, at: Array) -> None:
        """Reports the buckets up to `at` that these ages have reached and that were not reported yet."""
        passed = self._passed[places]
        further = np.flatnonzero(passed <= at)
        if not len(further):
            return
        places, passed = places[further], passed[further]
        counts = at[further] + 1 - passed
        self._passed[places] = passed + counts
        ends = np.cumsum(counts)
        reached = np.arange(ends[-1]) + np.repeat(passed - ends + counts, counts)
        of, agents = np.repeat(self._traits[places], counts), np.repeat(self._agents[places], counts)
        self._hazards.reached(self._classes.of(of, agents), reached)

    def _compact(self) -> None:
        """Removes ended ages. Halves the sample while too many ages run."""
        while len(self._running) > WATCHED_MAX:
            self._mask = 2 * self._mask + 1
            for tag in [tag for tag in self._running if tag & self._mask]:
                self._runs[self._running.pop(tag)] = False
        runs = np.flatnonzero(self._runs[: self._end])
        for column in (self._tags, self._began, self._traits, self._agents, self._passed):
            column[: len(runs)] = column[runs]
        self._end = len(runs)
        self._runs[: self._end], self._runs[self._end :] = True, False
        self._running = dict(zip(self._tags[: self._end].tolist(), range(self._end), strict=True))
