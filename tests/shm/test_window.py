"""Which spans a window takes; tests/shm/test_allocator.py compares windows with a list of cells."""

from __future__ import annotations

from tensord.shm.allocator import SpanAllocator
from tensord.shm.window import window_around

CELL = 64


def test_window_grows_towards_the_colder_neighbour() -> None:
    ring = SpanAllocator(10 * CELL)
    offsets = [ring.allocate(2 * CELL) for _ in range(5)]
    warmth = dict(zip(offsets, [9, 1, 0, 5, 2], strict=True))
    window = window_around(ring.map, 4 * CELL, 6 * CELL, lambda _: True, lambda o: warmth[o], 16)
    assert window is not None
    assert window.spans == [2 * CELL, 4 * CELL, 6 * CELL]


def test_the_coldest_entry_goes_even_if_its_neighbour_alone_would_suffice() -> None:
    ring = SpanAllocator(10 * CELL)
    small, large = ring.allocate(2 * CELL), ring.allocate(8 * CELL)
    assert (small, large) == (0, 2 * CELL)
    window = window_around(ring.map, 0, 8 * CELL, lambda _: True, lambda o: o, 16)
    assert window is not None
    assert sorted(window.spans) == [0, 2 * CELL]


def test_window_passes_over_spans_that_may_not_go() -> None:
    ring = SpanAllocator(10 * CELL)
    for _ in range(5):
        ring.allocate(2 * CELL)
    window = window_around(ring.map, 4 * CELL, 4 * CELL, lambda o: o != 2 * CELL, lambda o: o, 16)
    assert window is not None
    assert window.spans == [4 * CELL, 6 * CELL]
    assert window_around(ring.map, 4 * CELL, 8 * CELL, lambda o: o != 2 * CELL, lambda o: o, 16) is None


def test_a_window_cut_short_goes_on_from_its_hole() -> None:
    ring = SpanAllocator(64 * CELL)
    for _ in range(64):
        ring.allocate(CELL)
    around, rounds = 32 * CELL, 0
    while True:
        window = window_around(ring.map, around, 40 * CELL, lambda _: True, lambda o: o, 7)
        assert window is not None
        for offset in window.spans:
            ring.free(offset)
        around, rounds = window.low, rounds + 1
        if window.enough:
            break
    assert ring.largest_free_bytes == 40 * CELL
    assert rounds == 6
