"""Which bytes of the ring are taken: spans, the holes between them, and which spans to free to open a larger hole.

Owns the map of the ring, not its memory, and knows nothing of keys, pins or policies: those come as arguments.
Spans and holes alternate without gaps: every byte belongs to exactly one of them, and no two holes touch. Sizes and
offsets are multiples of 64 bytes.

Best fit: the smallest hole that is large enough, the lowest of equals. The holes stand in one sorted list of
`bytes << 48 | offset`, so a search is a bisection, and a change moves at most 8 bytes a hole (some 20 µs at 100,000
holes); neighbours are found through the tables of where blocks begin and end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .layout import ALIGN_BYTES, RING_BYTES_MAX

_OFFSET_BITS = 48
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch [low, high) of the ring in which only `spans` (offsets, in the order chosen) stand in the way.

    `enough` says whether it has the bytes asked for, or only as many as the allowed number of spans could give.
    """

    spans: list[int]
    low: int
    high: int
    enough: bool


class Ring:
    """The map of a ring of `capacity_bytes`, empty at first."""

    def __init__(self, capacity_bytes: int) -> None:
        assert capacity_bytes % ALIGN_BYTES == 0 and 0 <= capacity_bytes <= RING_BYTES_MAX, capacity_bytes
        self._capacity_bytes = 0
        self._used_bytes = 0
        self._spans: dict[int, int] = {}
        self._span_at_end: dict[int, int] = {}
        self._holes: dict[int, int] = {}
        self._hole_at_end: dict[int, int] = {}
        self._by_size: list[int] = []
        self.grow(capacity_bytes)

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def largest_free_bytes(self) -> int:
        return self._by_size[-1] >> _OFFSET_BITS if self._by_size else 0

    @property
    def span_count(self) -> int:
        return len(self._spans)

    @property
    def hole_count(self) -> int:
        return len(self._holes)

    def size_at(self, offset: int) -> int:
        """Bytes of the span at `offset`."""
        return self._spans[offset]

    def allocate(self, size_bytes: int) -> int | None:
        """Takes a span in the hole that fits best.

        Returns:
            Its offset, or None where no hole is large enough.
        """
        assert size_bytes > 0 and size_bytes % ALIGN_BYTES == 0, size_bytes
        at = bisect_left(self._by_size, size_bytes << _OFFSET_BITS)
        if at == len(self._by_size):
            return None
        offset = self._by_size[at] & _OFFSET_MASK
        self._take(offset, offset, size_bytes)
        return offset

    def take(self, offset: int, size_bytes: int) -> bool:
        """Takes a span at a given place, as a restarted daemon does with those that it finds.

        Returns:
            False, and nothing is changed, where any of its bytes are taken or beyond the ring.
        """
        if size_bytes <= 0 or size_bytes % ALIGN_BYTES or offset < 0 or offset % ALIGN_BYTES:
            return False
        # The hole around an offset is found by size order only; recovery builds the map once, so the walk is shared
        # with `_hole_around`, which begins at the nearest known edge.
        hole = self._hole_around(offset)
        if hole is None or hole + self._holes[hole] < offset + size_bytes:
            return False
        self._take(hole, offset, size_bytes)
        return True

    def free(self, offset: int) -> None:
        """Gives a span back; it grows together with the holes beside it."""
        raise NotImplementedError

    def grow(self, to_bytes: int) -> None:
        """Adds bytes at the end, up to a capacity of `to_bytes`."""
        raise NotImplementedError

    def _take(self, hole: int, offset: int, size_bytes: int) -> None:
        raise NotImplementedError

    def _hole_around(self, offset: int) -> int | None:
        raise NotImplementedError
