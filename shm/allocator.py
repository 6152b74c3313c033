"""The allocator of the ring's bytes: takes spans from holes, frees them, and withdraws and restores pages.

Owns: all changes of the ring's map. Does not own: the map's tables (ring_map.py), the search for spans to free for a
larger hole (window.py), the ring's memory, nor keys, pins and policies.

Allocation is best fit: the smallest hole that is large enough, the lowest of equals. A search is a bisection.
Neighbours are found in tables of starts and ends.

Invariants: those of the map. `freed` rises whenever bytes become free.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from .layout import ALIGN_BYTES, PAGE_BYTES, RING_BYTES_MAX
from .ring_map import RingMap

LOOKS_MAX: Final = 256
"""Limit on holes smaller than two pages that one search for a whole page examines."""


class SpanAllocator:
    """Allocates in a ring of `capacity_bytes`, initially one hole. `page_bytes` is the unit of withdrawal."""

    def __init__(self, capacity_bytes: int, page_bytes: int = PAGE_BYTES) -> None:
        assert capacity_bytes % ALIGN_BYTES == 0 and 0 <= capacity_bytes <= RING_BYTES_MAX, capacity_bytes
        assert page_bytes % ALIGN_BYTES == 0, page_bytes
        self.page_bytes = page_bytes
        self.map = RingMap(page_bytes)
        """For reading."""
        self.freed = 0
        """Counts the times that bytes became free. While it is unchanged, no hole has grown."""
        self.grow(capacity_bytes)

    @property
    def capacity_bytes(self) -> int:
        return self.map.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self.map.used_bytes

    @property
    def withdrawn_bytes(self) -> int:
        return self.map.withdrawn.total_bytes

    @property
    def withdrawn_count(self) -> int:
        return len(self.map.withdrawn)

    @property
    def free_bytes(self) -> int:
        """Total bytes of all holes."""
        return self.map.holes.total_bytes

    @property
    def largest_free_bytes(self) -> int:
        return self.map.holes.largest_bytes

    @property
    def span_count(self) -> int:
        return len(self.map.spans)

    @property
    def hole_count(self) -> int:
        return len(self.map.holes)

    def size_at(self, offset: int) -> int:
        """Bytes of the span that begins at `offset`."""
        return self.map.spans[offset]

    def is_free(self, offset: int) -> bool:
        """Whether a hole or a withdrawn extent begins at `offset`."""
        return offset in self.map.holes.sizes or offset in self.map.withdrawn.sizes

    def withdrawn(self) -> list[tuple[int, int]]:
        """(offset, bytes) of every withdrawn extent, in ascending order."""
        return sorted(self.map.withdrawn.sizes.items())

    def hole_before(self, offset: int) -> int | None:
        """Offset of the hole that ends at `offset`, or None."""
        return self.map.holes.starts.get(offset)

    def hole_bytes(self, offset: int) -> int:
        """Bytes of the hole that begins at `offset`; 0 if there is none."""
        return self.map.holes.sizes.get(offset, 0)

    def span_before(self, offset: int) -> int | None:
        """Offset of the span that ends at `offset`, or None."""
        return self.map.span_at_end.get(offset)

    def is_span(self, offset: int) -> bool:
        """Whether a span begins at `offset`."""
        return offset in self.map.spans

    def pages_in(self, low: int, high: int) -> int:
        """Total bytes of the whole pages within [low, high)."""
        page = self.page_bytes
        return max(0, high // page * page - -(-low // page) * page)

    def allocate(self, size_bytes: int) -> int | None:
        """Allocates a span in the hole that fits best.

        Returns:
            The span's offset, or None if no hole is large enough.
        """
        assert size_bytes > 0 and size_bytes % ALIGN_BYTES == 0, size_bytes
        offset = self.map.holes.best_fit(size_bytes)
        if offset is not None:
            self.map.add_span(offset, offset, size_bytes)
        return offset

    def take_hole(self, offset: int, size_bytes: int) -> bool:
        """Allocates a span at the beginning of the hole at `offset`.

        Returns:
            False, without a change, if no hole of at least `size_bytes` begins there.
        """
        if self.hole_bytes(offset) < size_bytes:
            return False
        self.map.add_span(offset, offset, size_bytes)
        return True

    def largest_holes(self, most: int) -> list[int]:
        """Offsets of the `most` largest holes, the largest first."""
        return self.map.holes.largest(most)

    def places(self, sizes: Iterable[int], low: int, high: int) -> list[int | None]:
        """Offsets for spans of these sizes, given the largest first, if `take_hole` allocates them one after the other
        outside [low, high). None for each size that fits nowhere."""
        return self.map.holes.fits(sizes, low, high)

    def take(self, offset: int, size_bytes: int) -> bool:
        """Allocates a span at a given offset, as a restarted daemon does for the spans that it finds.

        Fast if the offsets ascend from call to call.

        Returns:
            False, without a change, if any of the bytes are allocated, withdrawn or beyond the ring.
        """
        hole = self.map.hole_around(offset, size_bytes, ALIGN_BYTES)
        if hole is None:
            return False
        self.map.add_span(hole, offset, size_bytes)
        return True

    def free(self, offset: int) -> None:
        """Frees a span and merges it with the holes beside it."""
        self.map.remove_span(offset)
        self.freed += 1

    def cut(self, offset: int, size_bytes: int) -> None:
        """Frees all bytes of a span but its first `size_bytes`."""
        self.map.cut_span(offset, size_bytes)
        self.freed += 1

    def grow(self, to_bytes: int) -> None:
        """Raises the capacity to `to_bytes`, by a hole at the end."""
        assert self.map.capacity_bytes <= to_bytes <= RING_BYTES_MAX, (self.map.capacity_bytes, to_bytes)
        assert to_bytes % ALIGN_BYTES == 0, to_bytes
        added = to_bytes - self.map.capacity_bytes
        start, self.map.capacity_bytes = self.map.capacity_bytes, to_bytes
        if added:
            self._add_hole(start, added)

    def withdraw(self, offset: int, size_bytes: int) -> bool:
        """Withdraws whole pages of a hole at a given offset. Fast if the offsets ascend from call to call.

        Returns:
            False, without a change, if any of the bytes are not free.
        """
        hole = self.map.hole_around(offset, size_bytes, self.page_bytes)
        if hole is None:
            return False
        self.map.holes.cut(hole, offset, size_bytes)
        self.map.withdrawn.add(offset, size_bytes)
        return True

    def withdraw_some(self, most_bytes: int, spared: tuple[int, int] = (0, 0)) -> tuple[int, int] | None:
        """Withdraws up to `most_bytes` in whole pages from the largest hole, if possible next to a withdrawn extent.

        Args:
            spared: a range [low, high) in which nothing is withdrawn.

        Returns:
            (offset, bytes), or None if no examined hole has a whole page outside `spared`. At most LOOKS_MAX holes
            smaller than two pages are examined.
        """
        looks = 0
        for rank in range(1, len(self.map.holes) + 1):
            hole, size = self.map.holes.ranked(-rank)
            if size < self.page_bytes or looks >= LOOKS_MAX:
                return None
            looks += size < 2 * self.page_bytes
            low, high = self._outside(hole, hole + size, spared)
            if low >= high:
                continue
            take = min(high - low, most_bytes)
            if high in self.map.withdrawn.sizes and low not in self.map.withdrawn.starts:
                low = high - take
            self.map.holes.cut(hole, low, take)
            self.map.withdrawn.add(low, take)
            return low, take
        return None

    def restore(self, offset: int, size_bytes: int) -> None:
        """Makes withdrawn bytes a hole again. The caller has allocated their pages again."""
        within = self.map.withdrawn.around(offset)
        assert within is not None, f"{offset} is not withdrawn"
        self.map.withdrawn.cut(within, offset, size_bytes)
        self._add_hole(offset, size_bytes)

    def restorable(self, most_bytes: int) -> tuple[int, int] | None:
        """Up to `most_bytes` of the smallest withdrawn extent, as the next bytes to restore. Few large extents remain.

        Returns:
            (offset, bytes), or None if nothing is withdrawn.
        """
        if not self.map.withdrawn:
            return None
        offset, size = self.map.withdrawn.ranked(0)
        take = min(size, most_bytes)
        return (offset if offset in self.map.holes.starts else offset + size - take), take

    def withdrawn_within(self, low: int, high: int) -> list[tuple[int, int]]:
        """(offset, bytes) of the withdrawn pages within [low, high), in order. No span may lie in that range."""
        found = []
        at = low
        while at < high:
            size = self.map.holes.sizes.get(at)
            if size is None:
                extent = self.map.withdrawn.around(at)
                assert extent is not None, f"a span lies at {at}"
                end = extent + self.map.withdrawn.sizes[extent]
                page = self.page_bytes
                first, last = at // page * page, min(end, -(-high // page) * page)
                found.append((first, last - first))
                at = end
            else:
                at += size
        return found

    def narrowed(self, low: int, high: int, size_bytes: int) -> tuple[int, int]:
        """[low, high) without those withdrawn pages at its edges that `size_bytes` do not need."""
        page = self.page_bytes
        spare = (high - low - size_bytes) // page * page
        at_low = min(spare, self.map.withdrawn.sizes.get(low, 0))
        at_high = min(spare - at_low, high - self.map.withdrawn.starts.get(high, high))
        return low + at_low, high - at_high

    def check_invariants(self) -> None:
        """Asserts the invariants of the map."""
        self.map.check_invariants()

    def _add_hole(self, offset: int, size_bytes: int) -> None:
        self.map.holes.add(offset, size_bytes)
        self.freed += 1

    def _outside(self, low: int, high: int, spared: tuple[int, int]) -> tuple[int, int]:
        """The whole pages of the larger part of [low, high) outside `spared`."""
        page = self.page_bytes
        sides = ((low, min(high, spared[0])), (max(low, spared[1]), high)) if spared[0] < spared[1] else ((low, high),)
        parts = [(-(-begin // page) * page, end // page * page) for begin, end in sides]
        return max(parts, key=lambda part: part[1] - part[0])
