"""The ring's map against a plain list of 64-byte cells."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tensord.shm.allocator import SpanAllocator
from tensord.shm.window import widest_withdrawn, window_around

CELL = 64
PAGE = 4 * CELL
GONE = -2


class RingAgainstCells(RuleBasedStateMachine):
    """Each cell holds the offset of the span that owns it, GONE where it is withdrawn, or None."""

    @initialize(cells=st.integers(0, 40))
    def start(self, cells: int) -> None:
        self.ring = SpanAllocator(cells * CELL, PAGE)
        self.cells: list[int | None] = [None] * cells

    def holes(self) -> list[tuple[int, int]]:
        """(offset, bytes) of every maximal run of free cells."""
        found: list[tuple[int, int]] = []
        start = None
        for i, owner in enumerate([*self.cells, -1]):
            if owner is None and start is None:
                start = i
            elif owner is not None and start is not None:
                found.append((start * CELL, (i - start) * CELL))
                start = None
        return found

    def extents(self) -> list[tuple[int, int]]:
        """(offset, bytes) of every maximal run of withdrawn cells."""
        found: list[tuple[int, int]] = []
        for i, owner in enumerate(self.cells):
            if owner == GONE:
                if found and sum(found[-1]) == i * CELL:
                    found[-1] = (found[-1][0], found[-1][1] + CELL)
                else:
                    found.append((i * CELL, CELL))
        return found

    def spans(self) -> dict[int, int]:
        owned = [owner for owner in self.cells if owner is not None and owner != GONE]
        return {owner: owned.count(owner) * CELL for owner in owned}

    def paint(self, offset: int, size: int, owner: int | None) -> None:
        first = offset // CELL
        self.cells[first : first + size // CELL] = [owner] * (size // CELL)

    @rule(cells=st.integers(1, 12))
    def allocate_takes_the_best_fit(self, cells: int) -> None:
        fits = [(size, offset) for offset, size in self.holes() if size >= cells * CELL]
        offset = self.ring.allocate(cells * CELL)
        assert offset == (min(fits)[1] if fits else None)
        if offset is not None:
            self.paint(offset, cells * CELL, offset)

    @rule(at=st.integers(0, 45), cells=st.integers(0, 8))
    def take_succeeds_only_on_free_cells(self, at: int, cells: int) -> None:
        free = 0 < cells <= len(self.cells) - at and not any(owner is not None for owner in self.cells[at : at + cells])
        assert self.ring.take(at * CELL, cells * CELL) == free
        if free:
            self.paint(at * CELL, cells * CELL, at * CELL)

    @precondition(lambda self: self.spans())
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset, size = data.draw(st.sampled_from(sorted(self.spans().items())))
        self.ring.free(offset)
        self.paint(offset, size, None)

    @precondition(lambda self: any(size > CELL for size in self.spans().values()))
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        spans = sorted((offset, size) for offset, size in self.spans().items() if size > CELL)
        offset, size = data.draw(st.sampled_from(spans))
        left = data.draw(st.integers(1, size // CELL - 1)) * CELL
        self.ring.cut(offset, left)
        self.paint(offset + left, size - left, None)

    @rule(at=st.integers(0, 12), pages=st.integers(1, 3))
    def withdraw_succeeds_only_on_free_pages(self, at: int, pages: int) -> None:
        cells = self.cells[at * 4 : (at + pages) * 4]
        free = len(cells) == pages * 4 and not any(owner is not None for owner in cells)
        assert self.ring.withdraw(at * PAGE, pages * PAGE) == free
        if free:
            self.paint(at * PAGE, pages * PAGE, GONE)

    @rule(pages=st.integers(1, 6), low=st.integers(0, 45), cells=st.integers(0, 12))
    def withdrawing_some_takes_whole_pages_and_spares_what_is_to_be_spared(
        self, pages: int, low: int, cells: int
    ) -> None:
        spared = (low * CELL, (low + cells) * CELL)
        taken = self.ring.withdraw_some(pages * PAGE, spared)
        if taken is None:
            whole = [self.cells[i : i + 4] for i in range(0, len(self.cells) - 3, 4)]
            assert cells or [None] * 4 not in whole, "there was a page"
            return
        offset, size = taken
        assert 0 < size <= pages * PAGE and offset % PAGE == size % PAGE == 0
        assert offset >= spared[1] or offset + size <= spared[0] or not cells
        assert set(self.cells[offset // CELL : (offset + size) // CELL]) == {None}
        self.paint(offset, size, GONE)

    @rule(pages=st.integers(1, 6))
    def what_is_restored_is_a_hole_again_the_smallest_extent_first(self, pages: int) -> None:
        piece = self.ring.restorable(pages * PAGE)
        extents = self.extents()
        assert (piece is None) == (not extents)
        if piece is not None:
            offset, size = piece
            smallest = min(size for _, size in extents)
            assert size == min(smallest, pages * PAGE)
            assert set(self.cells[offset // CELL : (offset + size) // CELL]) == {GONE}
            self.ring.restore(offset, size)
            self.paint(offset, size, None)

    @rule(cells=st.integers(1, 20))
    def a_window_through_what_is_withdrawn_says_what_to_take_back(self, cells: int) -> None:
        window = widest_withdrawn(self.ring.map, cells * CELL)
        if window is None:
            return
        assert window.enough and not window.spans
        low, high = self.ring.narrowed(window.low, window.high, cells * CELL)
        assert window.low <= low and high <= window.high and high - low >= cells * CELL
        back = self.ring.withdrawn_within(low, high)
        for offset, size in back:
            assert size > 0 and offset % PAGE == size % PAGE == 0
            self.ring.restore(offset, size)
            self.paint(offset, size, None)
        assert set(self.cells[low // CELL : high // CELL]) == {None}

    @rule(cells=st.integers(0, 12))
    def grow(self, cells: int) -> None:
        self.cells += [None] * cells
        self.ring.grow(len(self.cells) * CELL)

    @precondition(lambda self: self.spans())
    @rule(data=st.data(), cells=st.integers(1, 20), spans_max=st.integers(1, 9))
    def window_opens_the_room_it_promises(self, data: st.DataObject, cells: int, spans_max: int) -> None:
        spans = self.spans()
        around = data.draw(st.sampled_from(sorted([*spans, *dict(self.holes())])))
        stays = data.draw(st.sets(st.sampled_from(sorted(spans))))
        window = window_around(self.ring.map, around, cells * CELL, lambda o: o not in stays, lambda o: -o, spans_max)
        reach = self.reach(around, stays)
        if window is None:
            assert reach < cells * CELL
            return
        assert len(window.spans) == len(set(window.spans)) <= max(spans_max, 1)
        assert not stays & set(window.spans)
        assert window.enough or len(window.spans) >= spans_max
        assert window.high - window.low >= cells * CELL or not window.enough
        for offset in window.spans:
            self.ring.free(offset)
            self.paint(offset, spans[offset], None)
        left = self.cells[window.low // CELL : window.high // CELL]
        assert left == [None] * ((window.high - window.low) // CELL), "something else stands in it"
        if window.enough and window.spans:
            assert around in window.spans or around not in spans, "the coldest is spared"
            within = [offset for offset in window.spans if offset != around] or [around]
            for offset in {min(within), max(within)} - {around}:
                below = offset - window.low
                above = window.high - offset - spans[offset]
                assert max(below, above) < cells * CELL, "a span at the edge went for nothing"

    def reach(self, around: int, stays: set[int]) -> int:
        """Bytes between the nearest spans that stay, left and right of `around`."""
        if around in stays:
            return 0
        low = high = around // CELL
        stays = stays | {GONE}
        while low > 0 and self.cells[low - 1] not in stays:
            low -= 1
        while high < len(self.cells) and self.cells[high] not in stays:
            high += 1
        return (high - low) * CELL

    @invariant()
    def agrees_with_the_cells(self) -> None:
        if not hasattr(self, "ring"):
            return
        self.ring.check_invariants()
        sizes = [size for _, size in self.holes()]
        assert self.ring.capacity_bytes == len(self.cells) * CELL
        assert self.ring.used_bytes == sum(self.spans().values())
        assert self.ring.largest_free_bytes == max(sizes, default=0)
        assert self.ring.hole_count == len(sizes)
        assert self.ring.span_count == len(self.spans())
        assert self.ring.withdrawn() == self.extents()
        assert self.ring.withdrawn_bytes == self.cells.count(GONE) * CELL
        assert self.ring.withdrawn_count == len(self.extents())


TestRingAgainstCells = RingAgainstCells.TestCase
TestRingAgainstCells.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_an_empty_spared_range_changes_nothing() -> None:
    ring = SpanAllocator(PAGE, PAGE)
    assert ring.withdraw_some(PAGE, (CELL, CELL)) == (0, PAGE)
