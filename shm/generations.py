"""The generations of invalidated namespaces, in the index segment: written by the daemon, read by clients as they are.

    count, 0 │ tag, generation, uid │ tag, generation, uid │ …        (words of 8 bytes)

The count's and a generation's word have the number in their lower half, and its check in the upper one: the CRC-32 of
the number, behind the tag. One store writes both, so that a kill leaves none without the other. The uid is whoever
invalidated the namespace first, for whose quota the entry counts.

Owns the table. Does not own who may raise a generation, nor what happens to entries of a past one.

Invariants: a generation only rises; an entry of the table never moves and never goes, so that the table survives every
daemon of the memory; a namespace without an entry was never invalidated: all generations of it are welcome.
"""

from __future__ import annotations

import struct
from collections import Counter
from mmap import mmap
from typing import Final
from zlib import crc32

import numpy as np

from ..errors import Invalidated, LayoutMismatch, LimitReached
from .keys import GENERATION_MAX, generation_of
from .layout import GENERATION_BYTES, NAMESPACE_TAG_BYTES, IndexGeometry

_TABLE_AT: Final = 2 * 8
_CHECK_SHIFT: Final = 32
_NUMBER: Final = (1 << _CHECK_SHIFT) - 1


class GenerationReader:
    """The table as a client sees it, over a (read-only) mapping of the index segment."""

    __slots__ = ("_count_at", "_first", "_memory", "_most", "_words")

    def __init__(self, memory: mmap, geometry: IndexGeometry) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("Q")
        self._count_at = geometry.generations_at >> 3
        self._first = geometry.generations_at + _TABLE_AT
        self._most = geometry.namespaces_max

    def current(self, tag: bytes) -> int:
        """The namespace's generation now; 0 if it was never invalidated."""
        # SYNC POINT: the count is loaded before the entries, which were stored before it; x86-64 keeps both in order.
        end = self._first + min(self._words[self._count_at] & _NUMBER, self._most) * GENERATION_BYTES
        at = self._memory.find(tag, self._first, end)
        while at >= 0:
            if not (at - self._first) % GENERATION_BYTES:
                return self._words[(at >> 3) + 1] & GENERATION_MAX
            at = self._memory.find(tag, at + 1, end)
        return 0

    def refusal(self, key: bytes) -> Invalidated | None:
        """Why nothing is stored under the key any more; None if its generation is not past."""
        return _refusal(key, self.current(key[:NAMESPACE_TAG_BYTES]))


class GenerationWriter:
    """The daemon's side: the only one that changes the table."""

    def __init__(self, memory: memoryview | mmap | bytearray, geometry: IndexGeometry) -> None:
        """Takes over the table as a former daemon left it.

        Raises:
            LayoutMismatch: it is damaged. Without it, results of old weights could be taken for those of new ones.
        """
        self._memory = memoryview(memory).cast("B")
        self._words = self._memory.cast("Q")
        self._count_at = geometry.generations_at >> 3
        self._first = geometry.generations_at + _TABLE_AT
        self._most = geometry.namespaces_max
        # Where each namespace's generation stands, as the number of its word.
        self._at: dict[bytes, int] = {}
        self.of_uid: Counter[int] = Counter()
        """How many namespaces each uid invalidated first."""
        count = self._words[self._count_at]
        known = self._find()
        # A daemon that was killed before it counted its last entry: nobody was told, and nobody is harmed.
        if not any(count == _checked(counted) for counted in (known, known - 1) if counted >= 0):
            raise LayoutMismatch(
                f"the table of generations of namespaces is damaged: its count says {count & _NUMBER}, with room for "
                f"{self._most}, and its entries say otherwise; free the memory with `tensorctl purge --instance NAME`"
            )
        self._words[self._count_at] = _checked(known)

    def _find(self) -> int:
        """Makes the sound entries known that stand before the first which is none. Returns how many; -1 if there are
        others behind."""
        words = np.frombuffer(self._memory, "u8", self._most * GENERATION_BYTES >> 3, self._first)
        used = np.flatnonzero(words.reshape(self._most, -1)[:, 1]).tolist()
        for number in used:
            at = self._first + number * GENERATION_BYTES
            tag, word = bytes(self._memory[at : at + NAMESPACE_TAG_BYTES]), self._words[(at >> 3) + 1]
            if number != len(self._at) or tag in self._at or word != _checked(word & GENERATION_MAX, tag):
                return -1
            self._know(tag, (at >> 3) + 1)
        return len(used)

    @staticmethod
    def create(memory: memoryview | mmap | bytearray, geometry: IndexGeometry) -> None:
        """Makes zeroed memory a table without entries."""
        struct.pack_into("=Q", memory, geometry.generations_at, _checked(0))

    def __len__(self) -> int:
        """How many namespaces were ever invalidated."""
        return len(self._at)

    def current(self, tag: bytes) -> int:
        """The namespace's generation now; 0 if it was never invalidated."""
        at = self._at.get(tag)
        return 0 if at is None else self._words[at] & GENERATION_MAX

    def __contains__(self, tag: bytes) -> bool:
        """Whether the namespace was ever invalidated, so that it has its entry."""
        return tag in self._at

    def is_past(self, key: bytes) -> bool:
        """Whether the key was made before its namespace was last invalidated."""
        return generation_of(key) < self.current(key[:NAMESPACE_TAG_BYTES])

    def refusal(self, key: bytes) -> Invalidated | None:
        """Why nothing is stored under the key any more; None if its generation is not past."""
        at = self._at.get(key[:NAMESPACE_TAG_BYTES])
        return None if at is None else _refusal(key, self._words[at] & GENERATION_MAX)

    def raise_to(self, tag: bytes, generation: int, uid: int = 0) -> None:
        """The namespace is at `generation` from now on, for every process that looks. `uid`: whoever says so.

        Raises:
            LimitReached: as many namespaces as the table holds were invalidated before, or there is no such
                generation.
        """
        if generation > GENERATION_MAX:
            raise LimitReached(
                f"the namespace is at its last generation, {GENERATION_MAX}: give the new weights another revision"
            )
        at = self._at.get(tag)
        if at is not None:
            assert generation > self.current(tag), f"generation {self.current(tag)} is followed by {generation}"
            self._words[at] = _checked(generation, tag)
            return
        if len(self._at) >= self._most:
            raise LimitReached(
                f"{self._most} namespaces were invalidated, and namespaces_max was {self._most} when the memory was "
                "made: give the new weights another revision; or end daemon and clients, free the memory with "
                "`tensorctl purge --instance NAME`, and raise namespaces_max"
            )
        place = self._first + len(self._at) * GENERATION_BYTES
        self._memory[place : place + NAMESPACE_TAG_BYTES] = tag
        self._words[(place >> 3) + 1] = _checked(generation, tag)
        self._words[(place >> 3) + 2] = uid
        # SYNC POINT: last, so that clients, and the next daemon wherever we are killed, see whole entries only; x86-64
        # keeps stores in order. ARM needs a release store here.
        self._words[self._count_at] = _checked(len(self._at) + 1)
        self._know(tag, (place >> 3) + 1)

    def check_invariants(self) -> None:
        """Asserts that the table says what is known here."""
        assert self._words[self._count_at] & _NUMBER == len(self._at) <= self._most
        for tag, at in self._at.items():
            assert bytes(self._memory[(at - 1) * 8 : at * 8]) == tag
            assert self.current(tag) > 0
        assert self.of_uid.total() == len(self._at)

    def _know(self, tag: bytes, at: int) -> None:
        self._at[tag] = at
        self.of_uid[self._words[at + 1]] += 1


def _checked(number: int, tag: bytes = b"") -> int:
    """The number with its check."""
    return crc32(tag + number.to_bytes(4, "little")) << _CHECK_SHIFT | number


def _refusal(key: bytes, current: int) -> Invalidated | None:
    made_at = generation_of(key)
    if made_at >= current:
        return None
    return Invalidated(
        f"the key {key.hex()[:16]}… is of generation {made_at}, and its namespace is at generation {current} since its "
        "weights have changed: nothing is stored under it any more. Compute without sharing; or start again with "
        "Client.current(namespace), called before the new weights are loaded"
    )
