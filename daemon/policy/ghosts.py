"""Remembers evicted and refused entries (ghosts) by the digest of their keys, in 25 bytes each.

Owns: a bounded hash table of buckets with WAYS places each. A bucket is ordered by time, the latest last; a full bucket
drops its first. Does not own the meaning of the fields (`hazard`).

The digests are in one array and the packed ghosts in another, so that a bucket moves up in two copies.

Invariants: a digest is in the table at most once, in its bucket. The table grows by one bucket at a time (linear
hashing: Litwin, VLDB 1980), so no step takes long.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

WAYS: Final = 8
GHOST_COLUMNS: Final = 2
PLACES_MIN: Final = 2048
"""The number of places at the start; a multiple of WAYS."""
_PACKED: Final = Struct("<dHBHf")
_EMPTY: Final = bytes(_PACKED.size)


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
        self._digest = array("Q", [0]) * PLACES_MIN
        self._packed = bytearray(_EMPTY * PLACES_MIN)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def get(self, digest: int) -> Ghost | None:
        """The ghost of the digest; None if there is none."""
        at = self._at(digest)
        return None if at is None else Ghost._make(_PACKED.unpack_from(self._packed, at * _PACKED.size))

    def pop(self, digest: int) -> Ghost | None:
        """Removes and returns the ghost of the digest; None if there is none."""
        at = self._at(digest)
        return None if at is None else Ghost._make(_PACKED.unpack(self._take(at)))

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
        return self._put(self._bucket(digest), digest, _PACKED.pack(*ghost))

    def packed(self) -> list[bytes]:
        """The digests and the ghosts as bytes, for `unpack`."""
        return [self._digest.tobytes(), bytes(self._packed)]

    def unpack(self, columns: Sequence[bytes], most: int) -> None:
        """Replaces the table by the one from `packed`, as far as `most` places allow.

        Raises:
            ValueError: `columns` are not columns of `packed`.
        """
        digests, ghosts = array("Q", columns[0]), columns[1]
        places = len(digests)
        if len(ghosts) != places * _PACKED.size or places < PLACES_MIN or places % WAYS:
            raise ValueError("columns of unequal lengths, or an impossible number of places")
        if places <= most:
            # The place of a ghost depends only on the number of places, so the columns can be copied.
            self._digest, self._packed = digests, bytearray(ghosts)
            self._count = places - digests.count(0)
            return
        while len(self._digest) + WAYS <= most:
            self._split()
        for digest, ghost in zip(digests, _PACKED.iter_unpack(ghosts), strict=True):
            if digest:
                self.add(digest, Ghost._make(ghost), most)

    def check_invariants(self) -> None:
        """Asserts that each ghost is in its bucket, once."""
        digests = [digest for digest in self._digest if digest]
        assert len(digests) == len(set(digests)) == self._count
        assert all(digest == 0 or self._at(digest) == at for at, digest in enumerate(self._digest))

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
        self._digest.frombytes(bytes(WAYS * self._digest.itemsize))
        self._packed += _EMPTY * WAYS
        for at in range(WAYS * old, WAYS * (old + 1)):
            digest = self._digest[at]
            if digest and self._bucket(digest) == many:
                self._put(many, digest, self._take(at))

    def _put(self, bucket: int, digest: int, packed: bytes) -> int:
        """Appends a ghost to a bucket. Returns the digest of the ghost that is dropped, or 0."""
        first, last, size = WAYS * bucket, WAYS * (bucket + 1) - 1, _PACKED.size
        forgotten = self._digest[first]
        self._count += not forgotten
        self._digest[first:last] = self._digest[first + 1 : last + 1]
        self._digest[last] = digest
        self._packed[first * size : (last + 1) * size] = self._packed[(first + 1) * size : (last + 1) * size] + packed
        return forgotten

    def _take(self, at: int) -> bytes:
        """Removes the ghost in that place and returns it, packed. Those before it in the bucket move up."""
        first, size = at // WAYS * WAYS, _PACKED.size
        packed = bytes(self._packed[at * size : (at + 1) * size])
        self._digest[first + 1 : at + 1] = self._digest[first:at]
        self._digest[first] = 0
        self._packed[first * size : (at + 1) * size] = _EMPTY + self._packed[first * size : at * size]
        self._count -= 1
        return packed
