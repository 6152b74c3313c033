"""The table of generations of invalidated namespaces, in the index segment. The daemon writes it; clients read it.

    count, 0 │ tag, generation, uid │ tag, generation, uid │ …        (words of 8 bytes)

The count's word and each generation's word hold the number in the lower half and a check in the upper half: the CRC-32
of the tag followed by the number. One store writes both halves, so a kill cannot separate them. `uid` is the user who
invalidated the namespace first; the table entry counts against that user's quota.

Invariants: a generation only rises. A table entry never moves and is never removed, so the table stays valid for every
later daemon of the same memory. A namespace without a table entry was never invalidated, and keys of all its
generations are valid.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from mmap import mmap
from typing import Final
from zlib import crc32

import numpy as np

from ...errors import Invalidated, LayoutMismatch, LimitReached
from ..ring.layout import GENERATION_BYTES, NAMESPACE_TAG_BYTES, IndexGeometry
from .keys import GENERATION_MAX, generation_of, shortened

_TABLE_AT: Final = 2 * 8
_CHECK_SHIFT: Final = 32
_NUMBER: Final = (1 << _CHECK_SHIFT) - 1


class GenerationReader:
    """A client's view of the table, over a read-only mapping of the index segment."""

    __slots__ = ("_capacity", "_count_at", "_first", "_memory", "_words")

    def __init__(self, memory: mmap, geometry: IndexGeometry) -> None:
        self._memory = memory
        self._words = memoryview(memory).cast("Q")
        self._count_at = geometry.generations_at >> 3
        self._first = geometry.generations_at + _TABLE_AT
        self._capacity = geometry.namespaces_max

    def current(self, tag: bytes) -> int:
        """The namespace's present generation; 0 if it was never invalidated."""
        # SYNC POINT: the count is loaded before the entries, which were stored before the count; x86-64 keeps both
        # orders.
        end = self._first + min(self._words[self._count_at] & _NUMBER, self._capacity) * GENERATION_BYTES
        at = self._memory.find(tag, self._first, end)
        while at >= 0:
            if not (at - self._first) % GENERATION_BYTES:
                return self._words[(at >> 3) + 1] & GENERATION_MAX
            at = self._memory.find(tag, at + 1, end)
        return 0

    def refusal(self, key: bytes) -> Invalidated | None:
        """The reason why nothing can be stored under the key any more; None if its generation is current."""
        return _refusal(key, self.current(key[:NAMESPACE_TAG_BYTES]))


class GenerationWriter:
    """The daemon's side, the only writer of the table."""

    def __init__(self, memory: memoryview | mmap | bytearray, geometry: IndexGeometry) -> None:
        """Takes over the table of an earlier daemon, or a new one (`create`). Raises LayoutMismatch: the table is
        damaged. Without it, results of old weights could pass as those of new weights."""
        self._memory = memoryview(memory).cast("B")
        self._words = self._memory.cast("Q")
        self._count_at = geometry.generations_at >> 3
        self._first = geometry.generations_at + _TABLE_AT
        self._capacity = geometry.namespaces_max
        self._at: dict[bytes, int] = {}  # by namespace tag: the index of the word with its generation
        self.of_uid: Counter[int] = Counter()
        """Number of table entries by uid, each entry counted for the user who invalidated the namespace first."""
        count = self._words[self._count_at]
        known = self._find()
        # The count may be one less than the entries: a daemon was killed before it counted its last entry. That daemon
        # had not answered the request yet.
        if not any(count == _checked(counted) for counted in (known, known - 1) if counted >= 0):
            should = f"{count & _NUMBER} entries of at most {self._capacity}"
            raise LayoutMismatch(
                f"the table of generations of namespaces is damaged: it should have {should}, but the entries found do "
                "not match this count; free the memory with `tensorctl purge --instance NAME`"
            )
        self._words[self._count_at] = _checked(known)

    def _find(self) -> int:
        """Registers the entries, and returns their number; -1 if one is invalid or misplaced."""
        words = np.frombuffer(self._memory, "u8", self._capacity * GENERATION_BYTES >> 3, self._first)
        used = np.flatnonzero(words.reshape(self._capacity, -1)[:, 1]).tolist()
        for number in used:
            at = self._first + number * GENERATION_BYTES
            tag, word = bytes(self._memory[at : at + NAMESPACE_TAG_BYTES]), self._words[(at >> 3) + 1]
            if number != len(self._at) or tag in self._at or word != _checked(word & GENERATION_MAX, tag):
                return -1
            self._register(tag, (at >> 3) + 1)
        return len(used)

    @staticmethod
    def create(memory: memoryview | mmap | bytearray, geometry: IndexGeometry) -> None:
        """Initialises zeroed memory as an empty table."""
        struct.pack_into("=Q", memory, geometry.generations_at, _checked(0))

    def __len__(self) -> int:
        """Number of namespaces that were ever invalidated."""
        return len(self._at)

    def current(self, tag: bytes) -> int:
        """The namespace's present generation; 0 if it was never invalidated."""
        at = self._at.get(tag)
        return 0 if at is None else self._words[at] & GENERATION_MAX

    def __contains__(self, tag: bytes) -> bool:
        """Whether the namespace was ever invalidated, and so has an entry."""
        return tag in self._at

    def tags(self) -> Iterator[bytes]:
        """The namespaces that were ever invalidated."""
        return iter(self._at)

    def is_past(self, key: bytes) -> bool:
        """Whether the key's generation is older than its namespace's present one."""
        return generation_of(key) < self.current(key[:NAMESPACE_TAG_BYTES])

    def refusal(self, key: bytes) -> Invalidated | None:
        """The reason why nothing can be stored under the key any more; None if its generation is current."""
        at = self._at.get(key[:NAMESPACE_TAG_BYTES])
        return None if at is None else _refusal(key, self._words[at] & GENERATION_MAX)

    def raise_to(self, tag: bytes, generation: int, uid: int = 0) -> None:
        """Raises the namespace's generation to `generation`, visible to every process at once. `uid`: the user who
        asks; counted if this is the namespace's first invalidation. Raises LimitReached if the table is full, or
        `generation` is over GENERATION_MAX."""
        if generation > GENERATION_MAX:
            raise LimitReached(
                f"the namespace is at its last generation, {GENERATION_MAX}: give the new weights another revision"
            )
        at = self._at.get(tag)
        if at is not None:
            assert generation > self.current(tag), f"generation {self.current(tag)} is followed by {generation}"
            self._words[at] = _checked(generation, tag)
            return
        if len(self._at) >= self._capacity:
            raise LimitReached(
                f"{self._capacity} namespaces were invalidated, and the memory has room for no more: give the new "
                "weights another revision; or end daemon and clients, and free the memory with "
                "`tensorctl purge --instance NAME`"
            )
        place = self._first + len(self._at) * GENERATION_BYTES
        self._memory[place : place + NAMESPACE_TAG_BYTES] = tag
        self._words[(place >> 3) + 1] = _checked(generation, tag)
        self._words[(place >> 3) + 2] = uid
        # SYNC POINT: the count is stored last, so that clients, and the next daemon after a kill at any instruction,
        # see complete entries only; x86-64 keeps stores in order. ARM needs a release store here.
        self._words[self._count_at] = _checked(len(self._at) + 1)
        self._register(tag, (place >> 3) + 1)

    def check_invariants(self) -> None:
        assert self._words[self._count_at] & _NUMBER == len(self._at) <= self._capacity
        for tag, at in self._at.items():
            assert bytes(self._memory[(at - 1) * 8 : at * 8]) == tag
            assert self.current(tag) > 0
        assert self.of_uid.total() == len(self._at)

    def _register(self, tag: bytes, at: int) -> None:
        self._at[tag] = at
        self.of_uid[self._words[at + 1]] += 1


def _checked(number: int, tag: bytes = b"") -> int:
    """A table word: `number` in the lower half, its CRC-32 in the upper half."""
    return crc32(tag + number.to_bytes(4, "little")) << _CHECK_SHIFT | number


def _refusal(key: bytes, current: int) -> Invalidated | None:
    made_at = generation_of(key)
    if made_at >= current:
        return None
    return Invalidated(
        f"the key {shortened(key)} is of generation {made_at}, and its namespace is at generation {current} since its "
        "weights have changed: no entry is stored under it any more. Compute without sharing, or restart with "
        "Client.current(namespace), called before the new weights are loaded"
    )
