"""The map of the ring's bytes: spans, the holes between them, and withdrawn extents.

Here a block is any one of these three, as in an allocator. It is not a block of a cached sequence.

Owns: the tables that find a block by its start and by its end, and holes and withdrawn extents by size as well. Does
not own: the ring's memory, which hole a span takes (allocator.py), nor which spans to free for a larger hole
(window.py). Others read the tables; only the allocator changes them.

Invariants: spans, holes and withdrawn extents follow one another without gaps, so every byte belongs to exactly one of
them. No two holes touch, and no two withdrawn extents. Sizes and offsets are multiples of 64 bytes, those of withdrawn
extents whole pages, since the operating system gets these back.
"""

from __future__ import annotations

from .extents import Extents
from .layout import ALIGN_BYTES


class RingMap:
    """The map of a ring of 0 bytes. `page_bytes` is the unit of withdrawal."""

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.capacity_bytes = 0
        self.used_bytes = 0
        """Total bytes of all spans."""
        self.spans: dict[int, int] = {}
        """Offset → bytes."""
        self.span_at_end: dict[int, int] = {}
        """End → offset."""
        self.holes = Extents()
        self.withdrawn = Extents(ordered=True)
        self._at = 0

    def block_bytes(self, offset: int) -> int:
        """Bytes of the block that begins at `offset`. Raises KeyError if none does."""
        for sizes in (self.spans, self.holes.sizes, self.withdrawn.sizes):
            size = sizes.get(offset)
            if size is not None:
                return size
        raise KeyError(offset)

    def hole_around(self, offset: int, size_bytes: int, unit_bytes: int) -> int | None:
        """Offset of the hole that contains [offset, offset + size_bytes); None if there is none, or if the range is not
        in units of `unit_bytes`. Fast if the offsets ascend from call to call."""
        if size_bytes <= 0 or size_bytes % unit_bytes or offset < 0 or offset % unit_bytes:
            return None
        if offset + size_bytes > self.capacity_bytes:
            return None
        at = self._block_around(offset)
        size = self.holes.sizes.get(at)
        return at if size is not None and offset + size_bytes <= at + size else None

    def add_span(self, hole: int, offset: int, size_bytes: int) -> None:
        """Makes [offset, offset + size_bytes) of the hole at `hole` a span."""
        self.holes.cut(hole, offset, size_bytes)
        self.spans[offset] = size_bytes
        self.span_at_end[offset + size_bytes] = offset
        self.used_bytes += size_bytes

    def remove_span(self, offset: int) -> None:
        """Makes the span at `offset` a hole, merged with the holes beside it."""
        size = self.spans.pop(offset)
        del self.span_at_end[offset + size]
        self.used_bytes -= size
        self.holes.add(offset, size)

    def cut_span(self, offset: int, size_bytes: int) -> None:
        """Makes the bytes of the span at `offset` after its first `size_bytes` a hole, merged with the hole behind."""
        before = self.spans[offset]
        assert 0 < size_bytes < before and size_bytes % ALIGN_BYTES == 0, (size_bytes, before)
        del self.span_at_end[offset + before]
        self.spans[offset] = size_bytes
        self.span_at_end[offset + size_bytes] = offset
        self.used_bytes -= before - size_bytes
        self.holes.add(offset + size_bytes, before - size_bytes)

    def check_invariants(self) -> None:
        """Asserts the invariants of the module's docstring."""
        blocks = sorted([*self.spans.items(), *self.holes.sizes.items(), *self.withdrawn.sizes.items()])
        at = 0
        for offset, size in blocks:
            assert offset == at, f"the block at {offset} should begin at {at}"
            assert size > 0 and size % ALIGN_BYTES == 0
            at += size
        assert at == self.capacity_bytes
        assert sum(self.spans.values()) == self.used_bytes
        assert self.span_at_end == {o + size: o for o, size in self.spans.items()}
        self.holes.check_invariants()
        self.withdrawn.check_invariants()
        for offset, size in self.withdrawn.sizes.items():
            assert offset % self.page_bytes == size % self.page_bytes == 0, "a part of a page is withdrawn"
        assert self.used_bytes + self.holes.total_bytes + self.withdrawn.total_bytes == self.capacity_bytes

    def _block_around(self, offset: int) -> int:
        """Offset of the block that contains `offset`. The search starts from the block that the last search found."""
        at = self._at if self._at <= offset and self._is_block(self._at) else 0
        while (end := at + self.block_bytes(at)) <= offset:
            at = end
        self._at = at
        return at

    def _is_block(self, offset: int) -> bool:
        return offset in self.spans or offset in self.holes.sizes or offset in self.withdrawn.sizes
