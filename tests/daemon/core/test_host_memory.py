"""What of the ring is in memory: given back for a limit or for pressure, taken back; and which entries go for it."""

from __future__ import annotations

import pytest

from tensord.ipc.messages import control as messages
from tensord.shm.ring.layout import PAGE_BYTES, SPAN_HEADER_BYTES, span_bytes

from .stand import Make, Stand, key

RING = 64 * PAGE_BYTES
PAYLOAD = 4 * PAGE_BYTES - SPAN_HEADER_BYTES
STORED = set(range(15))


def full(make: Make) -> Stand:
    """Fifteen entries of four pages each, the first the coldest, and four free pages."""
    stand = make(RING)
    for number in STORED:
        assert stand.put(number, PAYLOAD) == "stored"
    return stand


def limit(stand: Stand, pages: int) -> None:
    stand.send(1, messages.Limit(stand.next_request(), pages * PAGE_BYTES))
    stand.settle()


def evict(stand: Stand, *numbers: int) -> None:
    stand.send(1, messages.Evict(stand.next_request(), [key(number) for number in numbers]))
    stand.settle()


def resident(stand: Stand) -> int:
    """The pages of the ring that are in memory."""
    return int(stand.store.status()["resident_bytes"]) // PAGE_BYTES


def test_pressure_takes_holes_then_the_coldest_and_no_more_than_it_needs_and_all_of_it_comes_again(make: Make) -> None:
    stand = full(make)
    evict(stand, 5, 9)
    stand.press(RING - 12 * PAGE_BYTES)
    assert stand.stored() == STORED - {5, 9} and resident(stand) == 52
    stand.press(RING - 18 * PAGE_BYTES)
    assert stand.stored() == STORED - {0, 1, 5, 9} and resident(stand) == 46
    assert stand.store.status()["evictions"] == {"explicit": 2, "pressure": 2}
    assert stand.holds is not None
    assert (stand.holds.resident_bytes, stand.holds.wanted_bytes, stand.holds.settled) == (46 * PAGE_BYTES, RING, True)
    stand.press()
    assert (resident(stand), stand.stored()) == (64, STORED - {0, 1, 5, 9})


@pytest.mark.parametrize("sizes", [(100,), (64, 64, 200, 1000, 64)])
def test_small_entries_go_with_their_neighbours_so_that_whole_pages_come_free(
    make: Make, sizes: tuple[int, ...]
) -> None:
    stand = make(RING, max_entries=1200)
    spans = [span_bytes(size) for size in sizes]
    numbers = range(RING * 9 // 10 * len(spans) // sum(spans))
    for number in numbers:
        assert stand.put(number, sizes[number % len(sizes)]) == "stored"
    stand.use(*numbers[::2])
    before = stand.stored()
    stand.press(RING - 16 * PAGE_BYTES)
    assert resident(stand) == 48
    gone = sum(spans[number % len(spans)] for number in before - stand.stored())
    assert gone <= 16 * PAGE_BYTES, "entries went for pages that never came free"


def test_no_entry_goes_whose_end_would_free_no_page(make: Make) -> None:
    stand = make(RING, max_entries=1200)
    numbers = range(RING * 9 // 10 // span_bytes(100))
    for number in numbers:
        assert stand.put(number, 100) == "stored"
    kept = numbers[::8]
    for number in kept:
        stand.send(1, messages.Pin(stand.next_request(), key(number), 50.0))
    stand.press(0)
    assert stand.stored() == {*numbers} and stand.holds is not None and stand.holds.settled
    for number in kept:
        stand.send(1, messages.Unpin(stand.next_request(), key(number)))
    stand.pass_time(10)
    assert stand.stored() == set() and resident(stand) == 0


def test_the_lower_of_limit_and_pressure_holds(make: Make) -> None:
    stand = full(make)
    limit(stand, 20)
    assert resident(stand) == 20 and set(stand.store.status()["evictions"]) == {"capacity"}
    for most, pressed, wanted in ((40, 30, 30), (64, 30, 30), (35, 50, 35), (35, None, 35), (64, None, 64)):
        limit(stand, most)
        stand.press(None if pressed is None else pressed * PAGE_BYTES)
        assert resident(stand) == wanted


def test_pinned_entries_are_passed_over_and_go_once_they_are_released(make: Make) -> None:
    stand = full(make)
    views = [stand.pin(number) for number in (0, 1)]
    stand.press(0)
    assert stand.stored() == {0, 1} and resident(stand) == 8
    assert stand.holds is not None and stand.holds.settled, "there is nothing more that it could do"
    scans = stand.store.counters.scans
    stand.pass_time(100)
    assert stand.store.counters.scans - scans < 100, "it looks again and again, ever more seldom"
    for view in views:
        stand.release(view)
    stand.pass_time(10)
    assert (resident(stand), stand.stored()) == (0, set())


@pytest.mark.parametrize("restarts", [False, True])
def test_memory_that_is_not_to_be_had_is_asked_for_again_and_no_entry_is_lost(make: Make, restarts: bool) -> None:
    stand = full(make)
    stand.press(40 * PAGE_BYTES)
    left, stand.short = stand.stored(), True
    if restarts:
        stand.restart(1, 2, 3)
    else:
        stand.press()
    stand.pass_time(100)
    assert (resident(stand), stand.stored()) == (40, left)
    assert stand.holds is not None and stand.holds.settled
    stand.short = False
    stand.pass_time(31)
    assert (resident(stand), stand.stored()) == (64, left)


def test_a_chain_that_lies_within_one_page_leaves_with_the_page(make: Make) -> None:
    stand = make(16 * PAGE_BYTES)
    for number in range(3):
        assert stand.put(number, parent=key(number - 1) if number else None) == "stored"
    stand.press(0)
    stand.pass_time(10)
    assert stand.stored() == set() and resident(stand) == 0


def test_a_ring_that_grows_stays_within_what_may_be_in_memory(make: Make) -> None:
    stand = make(2 * RING, grown_bytes=RING)
    stand.press(20 * PAGE_BYTES)
    stand.grow(2 * RING, more=False)
    stand.settle()
    assert resident(stand) == 20
    stand.press()
    assert resident(stand) == 128


def test_a_daemon_that_is_about_to_end_evicts_nothing_for_pages(make: Make) -> None:
    stand = full(make)
    stand.store.evict_only_for_puts()
    stand.press(RING // 2)
    assert stand.stored() == STORED
