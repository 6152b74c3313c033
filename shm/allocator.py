"""The allocator of the ring's bytes: spans, the holes between them, and withdrawn extents. It also proposes which spans
to free for a larger hole.

Owns: the map of the ring. Does not own: the ring's memory, nor keys, pins and policies; those come as arguments.

Allocation is best fit: the smallest hole that is large enough, the lowest of equals. A search is a bisection.
Neighbours are found in tables of starts and ends.

Invariants: spans, holes and withdrawn extents follow one another without gaps, so every byte belongs to exactly one of
them. No two holes touch, and no two withdrawn extents. Sizes and offsets are multiples of 64 bytes, those of withdrawn
extents whole pages, since the operating system gets these back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from .extents import Extents
from .layout import ALIGN_BYTES, PAGE_BYTES, RING_BYTES_MAX

LOOKS_MAX: Final = 256
"""Limit on holes smaller than two pages that one search for a whole page examines."""


@dataclass(frozen=True, slots=True)
class Window:
    """A range [low, high) of the ring that becomes free once `spans` are freed: their offsets, in the order chosen.

    `enough`: whether the range has the bytes asked for. If not, the limit on the number of spans was reached first.
    """

    spans: list[int]
    low: int
    high: int
    enough: bool


class SpanAllocator:
    """The map of a ring of `capacity_bytes`, initially empty. `page_bytes` is the unit of withdrawal."""

    def __init__(self, capacity_bytes: int, page_bytes: int = PAGE_BYTES) -> None:
        assert capacity_bytes % ALIGN_BYTES == 0 and 0 <= capacity_bytes <= RING_BYTES_MAX, capacity_bytes
        assert page_bytes % ALIGN_BYTES == 0, page_bytes
        self.page_bytes = page_bytes
        self._capacity_bytes = 0
        self._used_bytes = 0
        self._spans: dict[int, int] = {}
        self._span_at_end: dict[int, int] = {}
        self._holes = Extents()
        self._withdrawn = Extents(ordered=True)
        self._at = 0
        self.freed = 0
        """Counts the times that bytes became free. While it is unchanged, no hole has grown."""
        self.grow(capacity_bytes)

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def withdrawn_bytes(self) -> int:
        return self._withdrawn.total_bytes

    @property
    def withdrawn_count(self) -> int:
        return len(self._withdrawn)

    @property
    def free_bytes(self) -> int:
        """Total bytes of all holes."""
        return self._holes.total_bytes

    @property
    def largest_free_bytes(self) -> int:
        return self._holes.largest_bytes

    @property
    def span_count(self) -> int:
        return len(self._spans)

    @property
    def hole_count(self) -> int:
        return len(self._holes)

    def size_at(self, offset: int) -> int:
        """Bytes of the span that begins at `offset`."""
        return self._spans[offset]

    def is_free(self, offset: int) -> bool:
        """Whether a hole or a withdrawn extent begins at `offset`."""
        return offset in self._holes.sizes or offset in self._withdrawn.sizes

    def withdrawn(self) -> list[tuple[int, int]]:
        """(offset, bytes) of every withdrawn extent, in ascending order."""
        return sorted(self._withdrawn.sizes.items())

    def hole_before(self, offset: int) -> int | None:
        """Offset of the hole that ends at `offset`, or None."""
        return self._holes.starts.get(offset)

    def hole_bytes(self, offset: int) -> int:
        """Bytes of the hole that begins at `offset`; 0 if there is none."""
        return self._holes.sizes.get(offset, 0)

    def span_before(self, offset: int) -> int | None:
        """Offset of the span that ends at `offset`, or None."""
        return self._span_at_end.get(offset)

    def is_span(self, offset: int) -> bool:
        """Whether a span begins at `offset`."""
        return offset in self._spans

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
        offset = self._holes.best_fit(size_bytes)
        if offset is not None:
            self._take(offset, offset, size_bytes)
        return offset

    def take_hole(self, offset: int, size_bytes: int) -> bool:
        """Allocates a span at the beginning of the hole at `offset`.

        Returns:
            False, without a change, if no hole of at least `size_bytes` begins there.
        """
        if self.hole_bytes(offset) < size_bytes:
            return False
        self._take(offset, offset, size_bytes)
        return True

    def largest_holes(self, most: int) -> list[int]:
        """Offsets of the `most` largest holes, the largest first."""
        return self._holes.largest(most)

    def places(self, sizes: Iterable[int], low: int, high: int) -> list[int | None]:
        """Offsets for spans of these sizes, given the largest first, if `take_hole` allocates them one after the other
        outside [low, high). None for each size that fits nowhere."""
        return self._holes.fits(sizes, low, high)

    def take(self, offset: int, size_bytes: int) -> bool:
        """Allocates a span at a given offset, as a restarted daemon does for the spans that it finds.

        Fast if the offsets ascend from call to call.

        Returns:
            False, without a change, if any of the bytes are allocated, withdrawn or beyond the ring.
        """
        hole = self._hole_around(offset, size_bytes, ALIGN_BYTES)
        if hole is None:
            return False
        self._take(hole, offset, size_bytes)
        return True

    def free(self, offset: int) -> None:
        """Frees a span and merges it with the holes beside it."""
        size = self._spans.pop(offset)
        del self._span_at_end[offset + size]
        self._used_bytes -= size
        self._add_hole(offset, size)

    def grow(self, to_bytes: int) -> None:
        """Raises the capacity to `to_bytes`, by a hole at the end."""
        assert self._capacity_bytes <= to_bytes <= RING_BYTES_MAX, (self._capacity_bytes, to_bytes)
        assert to_bytes % ALIGN_BYTES == 0, to_bytes
        added = to_bytes - self._capacity_bytes
        start, self._capacity_bytes = self._capacity_bytes, to_bytes
        if added:
            self._add_hole(start, added)

    def withdraw(self, offset: int, size_bytes: int) -> bool:
        """Withdraws whole pages of a hole at a given offset. Fast if the offsets ascend from call to call.

        Returns:
            False, without a change, if any of the bytes are not free.
        """
        hole = self._hole_around(offset, size_bytes, self.page_bytes)
        if hole is None:
            return False
        self._holes.cut(hole, offset, size_bytes)
        self._withdrawn.add(offset, size_bytes)
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
        for rank in range(1, len(self._holes) + 1):
            hole, size = self._holes.ranked(-rank)
            if size < self.page_bytes or looks >= LOOKS_MAX:
                return None
            looks += size < 2 * self.page_bytes
            low, high = self._outside(hole, hole + size, spared)
            if low >= high:
                continue
            take = min(high - low, most_bytes)
            if high in self._withdrawn.sizes and low not in self._withdrawn.starts:
                low = high - take
            self._holes.cut(hole, low, take)
            self._withdrawn.add(low, take)
            return low, take
        return None

    def restore(self, offset: int, size_bytes: int) -> None:
        """Makes withdrawn bytes a hole again. The caller has allocated their pages again."""
        within = self._withdrawn.around(offset)
        assert within is not None, f"{offset} is not withdrawn"
        self._withdrawn.cut(within, offset, size_bytes)
        self._add_hole(offset, size_bytes)

    def restorable(self, most_bytes: int) -> tuple[int, int] | None:
        """Up to `most_bytes` of the smallest withdrawn extent, as the next bytes to restore. Few large extents remain.

        Returns:
            (offset, bytes), or None if nothing is withdrawn.
        """
        if not self._withdrawn:
            return None
        offset, size = self._withdrawn.ranked(0)
        take = min(size, most_bytes)
        return (offset if offset in self._holes.starts else offset + size - take), take

    def withdrawn_within(self, low: int, high: int) -> list[tuple[int, int]]:
        """(offset, bytes) of the withdrawn pages within [low, high), in order. No span may lie in that range."""
        found = []
        at = low
        while at < high:
            size = self._holes.sizes.get(at)
            if size is None:
                extent = self._withdrawn.around(at)
                assert extent is not None, f"a span stands at {at}"
                end = extent + self._withdrawn.sizes[extent]
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
        at_low = min(spare, self._withdrawn.sizes.get(low, 0))
        at_high = min(spare - at_low, high - self._withdrawn.starts.get(high, high))
        return low + at_low, high - at_high

    def window(
        self,
        around: int,
        size_bytes: int,
        may_go: Callable[[int], bool],
        warmth: Callable[[int], Any],
        spans_max: int,
        *,
        through: bool = False,
        take: Callable[[int], object] = lambda _: None,
    ) -> Window | None:
        """Chooses spans to free so that one hole of `size_bytes` forms around the block at offset `around`.

        The window grows by the colder of its two neighbouring spans, which is the one with the lower `warmth(offset)`.
        A span for which `may_go(offset)` is false ends the window on its side. A withdrawn extent ends it too, unless
        `through` is true; the caller then has to restore that extent. `take(offset)` is called for each chosen span
        before the next span is judged.

        Returns:
            The window, with `enough=False` if `spans_max` spans do not suffice. None if spans that may not go, or the
            ring's ends, leave too little between them.
        """
        spans = []
        if around in self._spans:
            if not may_go(around):
                return None
            spans.append(around)
            take(around)
        elif around in self._withdrawn.sizes and not through:
            return None
        low, high = self._widened(around, around + self._block_bytes(around), size_bytes, through=through)
        left_open = right_open = True
        while high - low < size_bytes:
            if len(spans) >= spans_max:
                return Window(spans, low, high, enough=False)
            left = self._span_at_end.get(low) if left_open else None
            right = high if right_open and high in self._spans else None
            left_open = left is not None and may_go(left)
            right_open = right is not None and may_go(right)
            if left is not None and left_open and (right is None or not right_open or warmth(left) < warmth(right)):
                spans.append(left)
                take(left)
                low, high = self._widened(left, high, size_bytes, through=through)
            elif right is not None and right_open:
                spans.append(right)
                take(right)
                low, high = self._widened(low, right + self._spans[right], size_bytes, through=through)
            else:
                return None
        return self._trimmed(spans, low, high, size_bytes, around)

    def widest_withdrawn(self, size_bytes: int) -> Window | None:
        """The range around the largest withdrawn extent that contains no span; None if it has fewer than
        `size_bytes`."""
        if not self._withdrawn:
            return None
        offset, _ = self._withdrawn.ranked(-1)
        return self.window(offset, size_bytes, lambda _: False, lambda _: 0, 1, through=True)

    def check_invariants(self) -> None:
        """Asserts the invariants of the module's docstring."""
        blocks = sorted([*self._spans.items(), *self._holes.sizes.items(), *self._withdrawn.sizes.items()])
        at = 0
        for offset, size in blocks:
            assert offset == at, f"the block at {offset} should begin at {at}"
            assert size > 0 and size % ALIGN_BYTES == 0
            at += size
        assert at == self._capacity_bytes
        assert sum(self._spans.values()) == self._used_bytes
        assert self._span_at_end == {o + size: o for o, size in self._spans.items()}
        self._holes.check_invariants()
        self._withdrawn.check_invariants()
        for offset, size in self._withdrawn.sizes.items():
            assert offset % self.page_bytes == size % self.page_bytes == 0, "a part of a page is withdrawn"
        assert self._used_bytes + self._holes.total_bytes + self.withdrawn_bytes == self._capacity_bytes

    def _take(self, hole: int, offset: int, size_bytes: int) -> None:
        self._holes.cut(hole, offset, size_bytes)
        self._spans[offset] = size_bytes
        self._span_at_end[offset + size_bytes] = offset
        self._used_bytes += size_bytes

    def _add_hole(self, offset: int, size_bytes: int) -> None:
        self._holes.add(offset, size_bytes)
        self.freed += 1

    def _hole_around(self, offset: int, size_bytes: int, unit_bytes: int) -> int | None:
        """Offset of the hole that contains [offset, offset + size_bytes); None if there is none, or if the range is not
        in units of `unit_bytes`."""
        if size_bytes <= 0 or size_bytes % unit_bytes or offset < 0 or offset % unit_bytes:
            return None
        if offset + size_bytes > self._capacity_bytes:
            return None
        at = self._block_around(offset)
        size = self._holes.sizes.get(at)
        return at if size is not None and offset + size_bytes <= at + size else None

    def _block_around(self, offset: int) -> int:
        """Offset of the block that contains `offset`. The search starts from the block that the last search found."""
        at = self._at if self._at <= offset and self._is_block(self._at) else 0
        while (end := at + self._block_bytes(at)) <= offset:
            at = end
        self._at = at
        return at

    def _is_block(self, offset: int) -> bool:
        return offset in self._spans or self.is_free(offset)

    def _block_bytes(self, offset: int) -> int:
        for sizes in (self._spans, self._holes.sizes, self._withdrawn.sizes):
            size = sizes.get(offset)
            if size is not None:
                return size
        raise KeyError(offset)

    def _widened(self, low: int, high: int, size_bytes: int, *, through: bool) -> tuple[int, int]:
        """The range extended by adjacent holes, and with `through` by adjacent withdrawn extents while it is too
        small."""
        kinds = (self._holes, self._withdrawn) if through else (self._holes,)
        while True:
            before = low, high
            for kind in kinds:
                low = kind.starts.get(low, low)
                high += kind.sizes.get(high, 0)
            if not through or high - low >= size_bytes or (low, high) == before:
                return low, high

    def _outside(self, low: int, high: int, spared: tuple[int, int]) -> tuple[int, int]:
        """The whole pages of the larger part of [low, high) outside `spared`."""
        page = self.page_bytes
        sides = ((low, min(high, spared[0])), (max(low, spared[1]), high)) if spared[0] < spared[1] else ((low, high),)
        parts = [(-(-begin // page) * page, end // page * page) for begin, end in sides]
        return max(parts, key=lambda part: part[1] - part[0])

    def _trimmed(self, spans: list[int], low: int, high: int, size_bytes: int, around: int) -> Window:
        """The window without spans at its edges that a later, larger span on the other side made unnecessary.

        The span at `around` stays in any case, as the coldest. Otherwise the next window would start there again and
        grow into its neighbours, which are the spans stored last.
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
