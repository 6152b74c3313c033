"""Remembers evicted and refused entries (ghosts) by tags of 32 bits, in 14 bytes each, in batches.

Owns: a bounded hash table of buckets with WAYS places each, as columns. A full bucket drops the ghost that was added
first. Does not own the meaning of the fields (`hazard`).

Invariants: a tag is in the table at most once, in its bucket. The table grows by a few buckets at a time (linear
hashing: Litwin, VLDB 1980), so no step takes long: a bucket's ghosts keep their ways when it is split. The columns are
as long as they may ever get; pages that were never written take no memory. Two keys may have one tag: in a table of a
million ghosts, one new key in 4,000 is taken for another. It then begins with that one's history.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from .known import Array

WAYS: Final = 8
PLACES_MIN: Final = 2048
"""The number of places at the start: a power of two."""
STEPS: Final = 64.0
"""Times are kept in steps of 1/STEPS mean pause, modulo 2 ** 32 steps."""
USES_MAX: Final = 65_535


class GhostsFound(NamedTuple):
    """The remembered states of some entries, as columns. `there`: which of them are remembered."""

    there: Array
    unused: Array
    uses: Array
    gaps: Array
    agents: Array


class Ghosts:
    """Ghosts by tag. A tag is never 0. `most`: the most places that the table will ever have."""

    def __init__(self, most: int) -> None:
        self._buckets = PLACES_MIN // WAYS
        self._buckets_max = max(self._buckets, most // WAYS)
        kinds = ("u4", "u4", "u2", "u1", "u2")
        self._columns = [np.zeros(self._buckets_max * WAYS, kind) for kind in kinds]
        self._tags, self._times, self._uses, self._gaps, self._agents = self._columns
        self._next = np.zeros(self._buckets_max, np.uint8)

    @property
    def places(self) -> int:
        return self._buckets * WAYS

    def find(self, tags: Array, now: Array | float, *, take: bool = False) -> GhostsFound:
        """The ghosts of the tags, and the times since their uses. `take`: removes them."""
        buckets = self._bucket(tags)
        same = self._tags.reshape(-1, WAYS)[buckets] == tags[:, None]
        there = same.any(axis=1)
        at = (buckets * WAYS + same.argmax(axis=1))[there]
        unused, uses, gaps, agents = (np.zeros(len(tags), kind) for kind in ("f8", "i8", "i8", "i8"))
        if len(at):
            steps = np.broadcast_to(np.asarray(now * STEPS, np.float64), len(tags))[there].astype(np.int64)
            unused[there] = ((steps - self._times[at]) & 0xFFFF_FFFF) / STEPS
            uses[there], gaps[there], agents[there] = self._uses[at], self._gaps[at], self._agents[at]
            if take:
                self._tags[at] = 0
        return GhostsFound(there, unused, uses, gaps, agents)

    def add(self, tags: Array, used_at: Array, uses: Array, gaps: Array, agents: Array, most: int) -> Array:
        """Adds ghosts, or replaces those of the same tags. The table grows to at most `most` places. Returns the tags
        of the ghosts that were dropped."""
        self._grow(len(tags), most // WAYS)
        times = (used_at * STEPS).astype(np.int64) & 0xFFFF_FFFF
        uses = np.minimum(uses, USES_MAX)
        dropped: list[Array] = []
        buckets = self._bucket(tags)
        left = np.arange(len(tags))
        while len(left):
            # One ghost for each bucket at a time.
            some, first = np.unique(buckets[left], return_index=True)
            now = left[first]
            left = np.delete(left, first)
            lines = self._tags.reshape(-1, WAYS)[some]
            same, empty = lines == tags[now, None], lines == 0
            known, full = same.any(axis=1), ~empty.any(axis=1)
            ways = np.where(known, same.argmax(axis=1), np.where(full, self._next[some], empty.argmax(axis=1)))
            places = some * WAYS + ways
            gone = full & ~known
            self._next[some[gone]] = (ways[gone] + 1) % WAYS
            dropped.append(self._tags[places[gone]])
            self._tags[places], self._times[places], self._uses[places] = tags[now], times[now], uses[now]
            self._gaps[places], self._agents[places] = gaps[now], agents[now]
        return np.concatenate(dropped) if dropped else tags[:0]

    def saved(self) -> list[bytes]:
        """The columns as bytes, for `restore`."""
        return [column[: self.places].tobytes() for column in self._columns]

    def restore(self, columns: Sequence[bytes], most: int) -> None:
        """Adds the ghosts of `saved`, as far as `most` places allow. Raises ValueError if they are not of `saved`."""
        tags, times, uses, gaps, agents = (
            np.frombuffer(saved, column.dtype) for saved, column in zip(columns, self._columns, strict=True)
        )
        if len({len(column) for column in (tags, times, uses, gaps, agents)}) > 1:
            raise ValueError("columns of unequal lengths")
        there = np.flatnonzero(tags)
        while self._buckets < min(most // WAYS, self._buckets_max):
            self._grow(self._buckets, most // WAYS)
        self.add(tags[there], times[there] / STEPS, uses[there], gaps[there], agents[there], most)

    def check_invariants(self) -> None:
        """Asserts that each ghost is in its bucket, once."""
        places = np.flatnonzero(self._tags)
        tags = self._tags[places]
        assert len(tags) == len(set(tags.tolist()))
        assert (self._bucket(tags) == places // WAYS).all() and not self._tags[self.places :].any()

    def _bucket(self, tags: Array) -> Array:
        doubled = 1 << (self._buckets - 1).bit_length()
        buckets = (tags & (doubled - 1)).astype(np.int64)
        return np.where(buckets < self._buckets, buckets, buckets - doubled // 2)

    def _grow(self, some: int, most: int) -> None:
        """Splits up to `some` buckets: each new one takes its ghosts from the one that had their tags before."""
        many = self._buckets
        bit = 1 << (many.bit_length() - 1)
        count = min(some, 2 * bit - many, min(most, self._buckets_max) - many)
        if count <= 0:
            return
        old, new = slice(many - bit, many - bit + count), slice(many, many + count)
        columns = [column.reshape(-1, WAYS) for column in self._columns]
        moves = columns[0][old] & bit != 0
        for column in columns:
            column[new] = np.where(moves, column[old], 0)
        columns[0][old][moves] = 0
        self._next[new] = self._next[old]
        self._buckets += count
