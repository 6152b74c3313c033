"""What was evicted, or turned away, by the digest of its key: 25 bytes each, so many at most.

A table of buckets of WAYS places, in each the latest last; in a full bucket the first gives way. It grows by a bucket
at a time (linear hashing: Litwin, VLDB 1980), so that no step takes long.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

WAYS: Final = 8
GHOST_COLUMNS: Final = 6
PLACES_MIN: Final = 2048
"""Places from the start; a multiple of WAYS."""


class Ghost(NamedTuple):
    """What is remembered of one entry."""

    used_at: float
    uses: int
    traits: int
    agent: int
    weight: float


class Ghosts:
    """Ghosts by digest, which is not 0."""

    def __init__(self) -> None:
        self._digest, self._used_at = array("Q"), array("d")
        self._uses, self._traits, self._agent, self._weight = array("H"), array("B"), array("H"), array("f")
        for column in self._columns():
            column.frombytes(bytes(column.itemsize * PLACES_MIN))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def get(self, digest: int) -> Ghost | None:
        """What is remembered."""
        at = self._at(digest)
        return None if at is None else Ghost(*(column[at] for column in self._columns()[1:]))

    def pop(self, digest: int) -> Ghost | None:
        """What was remembered, and is so no more."""
        at = self._at(digest)
        if at is None:
            return None
        ghost = Ghost(*(column[at] for column in self._columns()[1:]))
        self._take(at)
        return ghost

    def add(self, digest: int, ghost: Ghost, most: int) -> int:
        """Remembers one of at most `most`, instead of what was remembered of that digest.

        Returns:
            The digest of what is forgotten for it; 0 for nothing.
        """
        if len(self._digest) + WAYS <= most:
            self._split()
        at = self._at(digest)
        if at is not None:
            self._take(at)
        return self._put(self._bucket(digest), (digest, *ghost))

    def packed(self) -> list[bytes]:
        """All of them; for `unpack`."""
        return [column.tobytes() for column in self._columns()]

    def unpack(self, columns: Sequence[bytes], most: int) -> None:
        """Remembers what `packed` gave, as far as there is room, instead of what was remembered.

        Raises:
            ValueError: it gave something else.
        """
        packed = [array(column.typecode, data) for column, data in zip(self._columns(), columns, strict=True)]
        places = len(packed[0])
        if len({len(column) for column in packed}) > 1 or places < PLACES_MIN or places % WAYS:
            raise ValueError("columns of unequal lengths, or no buckets")
        if places <= most:
            # Where each belongs follows from the number of places alone.
            for column, told in zip(self._columns(), packed, strict=True):
                column[:] = told
            self._count = places - self._digest.count(0)
            return
        while len(self._digest) + WAYS <= most:
            self._split()
        for digest, *ghost in zip(*packed, strict=True):
            if digest:
                self.add(digest, Ghost(*ghost), most)

    def check_invariants(self) -> None:
        """Asserts that each is where it is looked for."""
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
        """One bucket more: it takes from the one that had its digests before."""
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
        """Puts a ghost behind the others of the bucket. The digest of the one that gives way, or 0."""
        first, last = WAYS * bucket, WAYS * (bucket + 1) - 1
        forgotten = self._digest[first]
        self._count += not forgotten
        for column, value in zip(self._columns(), values, strict=True):
            column[first:last] = column[first + 1 : last + 1]
            column[last] = value
        return forgotten

    def _take(self, at: int) -> None:
        """Takes out what stands in that place; those before it move up."""
        first = at // WAYS * WAYS
        for column in self._columns():
            column[first + 1 : at + 1] = column[first:at]
            column[first] = 0
        self._count -= 1
