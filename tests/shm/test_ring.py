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

from tensord.shm.ring import Ring

CELL = 64


class RingAgainstCells(RuleBasedStateMachine):
    """Each cell holds the offset of the span that owns it, or None."""

    @initialize(cells=st.integers(0, 40))
    def start(self, cells: int) -> None:
        self.ring = Ring(cells * CELL)
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

    def spans(self) -> dict[int, int]:
        owned = [owner for owner in self.cells if owner is not None]
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
        free = 0 < cells <= len(self.cells) - at and not any(
            owner is not None for owner in self.cells[at : at + cells]
        )
        assert self.ring.take(at * CELL, cells * CELL) == free
        if free:
            self.paint(at * CELL, cells * CELL, at * CELL)

    @precondition(lambda self: self.spans())
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset, size = data.draw(st.sampled_from(sorted(self.spans().items())))
        self.ring.free(offset)
        self.paint(offset, size, None)

    @rule(cells=st.integers(0, 12))
    def grow(self, cells: int) -> None:
        self.cells += [None] * cells
        self.ring.grow(len(self.cells) * CELL)

    @precondition(lambda self: self.spans())
    @rule(data=st.data(), cells=st.integers(1, 20), spans_max=st.integers(1, 9))
    def window_opens_the_room_it_promises(
        self, data: st.DataObject, cells: int, spans_max: int
    ) -> None:
        spans = self.spans()
        around = data.draw(st.sampled_from(sorted([*spans, *dict(self.holes())])))
        stays = data.draw(st.sets(st.sampled_from(sorted(spans))))
        window = self.ring.window(
            around, cells * CELL, lambda o: o not in stays, lambda o: -o, spans_max
        )
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


TestRingAgainstCells = RingAgainstCells.TestCase
TestRingAgainstCells.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)


def test_window_grows_towards_the_colder_neighbour() -> None:
    ring = Ring(10 * CELL)
    offsets = [ring.allocate(2 * CELL) for _ in range(5)]
    warmth = dict(zip(offsets, [9, 1, 0, 5, 2], strict=True))
    window = ring.window(4 * CELL, 6 * CELL, lambda _: True, lambda o: warmth[o], 16)
    assert window is not None
    assert window.spans == [2 * CELL, 4 * CELL, 6 * CELL]


def test_the_coldest_goes_though_its_neighbour_alone_would_be_room_enough() -> None:
    ring = Ring(10 * CELL)
    small, large = ring.allocate(2 * CELL), ring.allocate(8 * CELL)
    assert (small, large) == (0, 2 * CELL)
    window = ring.window(0, 8 * CELL, lambda _: True, lambda o: o, 16)
    assert window is not None
    assert sorted(window.spans) == [0, 2 * CELL]


def test_window_passes_over_spans_that_may_not_go() -> None:
    ring = Ring(10 * CELL)
    for _ in range(5):
        ring.allocate(2 * CELL)
    window = ring.window(4 * CELL, 4 * CELL, lambda o: o != 2 * CELL, lambda o: o, 16)
    assert window is not None
    assert window.spans == [4 * CELL, 6 * CELL]
    assert ring.window(4 * CELL, 8 * CELL, lambda o: o != 2 * CELL, lambda o: o, 16) is None


def test_a_window_cut_short_goes_on_from_its_hole() -> None:
    ring = Ring(64 * CELL)
    for _ in range(64):
        ring.allocate(CELL)
    around, rounds = 32 * CELL, 0
    while True:
        window = ring.window(around, 40 * CELL, lambda _: True, lambda o: o, 7)
        assert window is not None
        for offset in window.spans:
            ring.free(offset)
        around, rounds = window.low, rounds + 1
        if window.enough:
            break
    assert ring.largest_free_bytes == 40 * CELL
    assert rounds == 6
