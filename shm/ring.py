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

    def is_hole(self, offset: int) -> bool:
        """Whether a hole begins at `offset`."""
        return offset in self._holes

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

        Quick where the offsets come in ascending order.

        Returns:
            False, and nothing is changed, where any of its bytes are taken or beyond the ring.
        """
        if size_bytes <= 0 or size_bytes % ALIGN_BYTES or offset < 0 or offset % ALIGN_BYTES:
            return False
        last = self._hole_at_end.get(self._capacity_bytes)
        holes = self._holes if last is None or offset < last else (last,)
        for hole in holes:
            if hole <= offset and offset + size_bytes <= hole + self._holes[hole]:
                self._take(hole, offset, size_bytes)
                return True
        return False

    def free(self, offset: int) -> None:
        """Gives a span back; it grows together with the holes beside it."""
        size = self._spans.pop(offset)
        del self._span_at_end[offset + size]
        self._used_bytes -= size
        self._add_hole(offset, size)

    def grow(self, to_bytes: int) -> None:
        """Adds bytes at the end, up to a capacity of `to_bytes`."""
        assert self._capacity_bytes <= to_bytes <= RING_BYTES_MAX, (self._capacity_bytes, to_bytes)
        assert to_bytes % ALIGN_BYTES == 0, to_bytes
        added = to_bytes - self._capacity_bytes
        start, self._capacity_bytes = self._capacity_bytes, to_bytes
        if added:
            self._add_hole(start, added)

    def window(
        self,
        around: int,
        size_bytes: int,
        may_go: Callable[[int], bool],
        warmth: Callable[[int], Any],
        spans_max: int,
    ) -> Window | None:
        """Spans to free so that `size_bytes` lie free in one piece at `around`, the offset of a span or of a hole.

        Of the two neighbours the colder is taken next, `warmth(offset)` being lower; one that may not go closes its
        side.

        Returns:
            The window, or None where spans that may not go, or the ring's ends, leave too little between them.
        """
        spans = []
        if around in self._spans:
            if not may_go(around):
                return None
            spans.append(around)
        low, high = self._widened(around, around + self._block_bytes(around))
        left_open = right_open = True
        while high - low < size_bytes:
            if len(spans) >= spans_max:
                return Window(spans, low, high, enough=False)
            left = self._span_at_end.get(low) if left_open else None
            right = high if right_open and high in self._spans else None
            left_open = left is not None and may_go(left)
            right_open = right is not None and may_go(right)
            if left is not None and left_open and (
                right is None or not right_open or warmth(left) < warmth(right)
            ):
                spans.append(left)
                low, high = self._widened(left, high)
            elif right is not None and right_open:
                spans.append(right)
                low, high = self._widened(low, right + self._spans[right])
            else:
                return None
        return self._trimmed(spans, low, high, size_bytes, around)

    def check_invariants(self) -> None:
        """Asserts what the module's docstring promises."""
        blocks = sorted([*self._spans.items(), *self._holes.items()])
        at = 0
        hole_before = False
        for offset, size in blocks:
            assert offset == at, f"the block at {offset} should begin at {at}"
            assert size > 0 and size % ALIGN_BYTES == 0
            is_hole = offset in self._holes
            assert not (is_hole and hole_before), f"two holes touch at {offset}"
            hole_before = is_hole
            at += size
        assert at == self._capacity_bytes
        assert sum(self._spans.values()) == self._used_bytes
        assert self._span_at_end == {o + size: o for o, size in self._spans.items()}
        assert self._hole_at_end == {o + size: o for o, size in self._holes.items()}
        assert self._by_size == sorted(size << _OFFSET_BITS | o for o, size in self._holes.items())

    def _take(self, hole: int, offset: int, size_bytes: int) -> None:
        hole_bytes = self._holes[hole]
        self._remove_hole(hole)
        self._spans[offset] = size_bytes
        self._span_at_end[offset + size_bytes] = offset
        self._used_bytes += size_bytes
        if offset > hole:
            self._add_hole(hole, offset - hole)
        rest = hole + hole_bytes - (offset + size_bytes)
        if rest:
            self._add_hole(offset + size_bytes, rest)

    def _add_hole(self, offset: int, size: int) -> None:
        before = self._hole_at_end.get(offset)
        if before is not None:
            size += self._holes[before]
            offset = before
            self._remove_hole(before)
        after = offset + size
        if after in self._holes:
            size += self._holes[after]
            self._remove_hole(after)
        self._holes[offset] = size
        self._hole_at_end[offset + size] = offset
        insort(self._by_size, size << _OFFSET_BITS | offset)

    def _remove_hole(self, offset: int) -> None:
        size = self._holes.pop(offset)
        del self._hole_at_end[offset + size]
        del self._by_size[bisect_left(self._by_size, size << _OFFSET_BITS | offset)]

    def _block_bytes(self, offset: int) -> int:
        size = self._spans.get(offset)
        return self._holes[offset] if size is None else size

    def _widened(self, low: int, high: int) -> tuple[int, int]:
        """The stretch with the holes at its edges."""
        return self._hole_at_end.get(low, low), high + self._holes.get(high, 0)

    def _trimmed(self, spans: list[int], low: int, high: int, size_bytes: int, around: int) -> Window:
        """Without spans at the edges that turned out to be unneeded, once a large one was taken on the other side.

        The one it began with goes all the same: it is the coldest. Were it spared, the next window would begin there
        again, and find beside it what was stored last.
        """
        spans = sorted(spans)
        while spans and high - (spans[0] + self._spans[spans[0]]) >= size_bytes:
            low = spans[0] + self._spans[spans[0]]
            del spans[0]
        while spans and spans[-1] - low >= size_bytes:
            high = spans.pop()
        if around in self._spans and around not in spans:
            spans.append(around)
        return Window(spans, low, high, enough=True)
