"""Remembers evicted and refused entries (ghosts) by the digest of their keys, in 25 bytes each.

Owns: a bounded hash table of buckets with WAYS places each. A bucket is ordered by time, the latest last; a full bucket
drops its first. Does not own the meaning of the fields (`hazard`).

Invariants: a digest is in the table at most once, in its bucket. The table grows by one bucket at a time (linear
hashing: Litwin, VLDB 1980), so no step takes long.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

WAYS: Final = 8
GHOST_COLUMNS: Final = 6
PLACES_MIN: Final = 2048
"""The number of places at the start; a multiple of WAYS."""


class Ghost(NamedTuple):
    """The remembered state of one entry."""

    used_at: float
    uses: int
    traits: int
    agent: int
    weight: float


class Ghosts:
    """Ghosts by digest. A digest is never 0."""

    def __init__(self) -> None:
        self._digest, self._used_at = array("Q"), array("d")
        self._uses, self._traits, self._agent, self._weight = array("H"), array("B"), array("H"), array("f")
        for column in self._columns():
            column.frombytes(bytes(column.itemsize * PLACES_MIN))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def get(self, digest: int) -> Ghost | None:
        """The ghost of the digest; None if there is none."""
        at = self._at(digest)
        return None if at is None else Ghost(*(column[at] for column in self._columns()[1:]))

    def pop(self, digest: int) -> Ghost | None:
        """Removes and returns the ghost of the digest; None if there is none."""
        at = self._at(digest)
        if at is None:
            return None
        ghost = Ghost(*(column[at] for column in self._columns()[1:]))
        self._take(at)
        return ghost

    def add(self, digest: int, ghost: Ghost, most: int) -> int:
        """Adds a ghost, or replaces the ghost of that digest. The table grows to at most `most` places.

        Returns:
            The digest of the ghost that was dropped for it; 0 if none was.
        """
        if len(self._digest) + WAYS <= most:
            self._split()
        at = self._at(digest)
        if at is not None:
            self._take(at)
        return self._put(self._bucket(digest), (digest, *ghost))

    def packed(self) -> list[bytes]:
        """All columns as bytes, for `unpack`."""
        return [column.tobytes() for column in self._columns()]

    def unpack(self, columns: Sequence[bytes], most: int) -> None:
        """Replaces the table by the one from `packed`, as far as `most` places allow.

        Raises:
            ValueError: `columns` are not columns of `packed`.
        """
        packed = [array(column.typecode, data) for column, data in zip(self._columns(), columns, strict=True)]
        places = len(packed[0])
        if len({len(column) for column in packed}) > 1 or places < PLACES_MIN or places % WAYS:
            raise ValueError("columns of unequal lengths, or an impossible number of places")
        if places <= most:
            # The place of a ghost depends only on the number of places, so the columns can be copied.
            for column, values in zip(self._columns(), packed, strict=True):
                column[:] = values
            self._count = places - self._digest.count(0)
            return
        while len(self._digest) + WAYS <= most:
            self._split()
        for digest, *ghost in zip(*packed, strict=True):
            if digest:
                self.add(digest, Ghost(*ghost), most)

    def check_invariants(self) -> None:
        """Asserts that each ghost is in its bucket, once."""
        digests = [digest for digest in self._digest if digest]
        assert len(digests) == len(set(digests)) == self._count
        assert all(digest == 0 or self._at(digest) == at for at, digest in enumerate(self._digest))

    def _columns(self) -> tuple[array[Any], ...]:
        return self._digest, self._used_at, self._uses, self._traits, self._agent, self._weight

    def _bucket(self, digest: int) -> int:
        many = len(self._digest) // WAYS
        doubled = 1 << (many - 1).bit_length()
        bucket = digest & (doubled - 1)
        return bucket if bucket < many else bucket - doubled // 2

    def _at(self, digest: int) -> int | None:
        first = WAYS * self._bucket(digest)
        places = self._digest[first : first + WAYS]
        return first + places.index(digest) if digest in places else None

    def _split(self) -> None:
        """Adds one bucket. It takes its ghosts from the bucket that had their digests before."""
        many = len(self._digest) // WAYS
        old = many - (1 << (many.bit_length() - 1))
        for column in self._columns():
            column.frombytes(bytes(column.itemsize * WAYS))
        for at in range(WAYS * old, WAYS * (old + 1)):
            if self._digest[at] and self._bucket(self._digest[at]) == many:
                values = tuple(column[at] for column in self._columns())
                self._take(at)
                self._put(many, values)

    def _put(self, bucket: int, values: tuple[Any, ...]) -> int:
        """Appends a ghost to a bucket. Returns the digest of the ghost that is dropped, or 0."""
        first, last = WAYS * bucket, WAYS * (bucket + 1) - 1
        forgotten = self._digest[first]
        self._count += not forgotten
        for column, value in zip(self._columns(), values, strict=True):
            column[first:last] = column[first + 1 : last + 1]
            column[last] = value
        return forgotten

    def _take(self, at: int) -> None:
        """Removes the ghost in that place. Those before it in the bucket move up."""
        first = at // WAYS * WAYS
        for column in self._columns():
            column[first + 1 : at + 1] = column[first:at]
            column[first] = 0
        self._count -= 1
