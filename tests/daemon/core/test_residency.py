"""What of the ring is in memory: given back for a limit or for pressure, taken back, exchanged; and who has to go."""

from __future__ import annotations

import pytest

from tensord.daemon.core.effects import Punch
from tensord.daemon.core.events import RingGrown
from tensord.daemon.core.host_memory import Pressed
from tensord.daemon.core.recovery import Recovered
from tensord.ipc import messages
from tensord.shm.allocator import SpanAllocator
from tensord.shm.layout import SPAN_HEADER_BYTES

from .stand import SPAN, Stand, key

PAGE = 256
RING = 64 * PAGE
PAYLOAD = 4 * PAGE - SPAN_HEADER_BYTES  # with its header: four times PAGE


def full() -> Stand:
    """Sixteen entries of four times PAGE, the first the coldest, and nothing else. The pages are of PAGE / 4."""
    stand = Stand(RING, page_bytes=PAGE // 4)
    stand.join(1, 2)
    for number in range(16):
        assert stand.put(number, PAYLOAD) == "stored"
    assert stand.store.memory.ring.used_bytes == RING
    return stand


def limit(stand: Stand, limit_bytes: int) -> None:
    stand.send(2, messages.Limit(len(stand.answers[2]) + 1, limit_bytes))
    stand.settle()


def test_pressure_takes_the_coldest_and_no_more_than_it_needs() -> None:
    stand = full()
    stand.press(RING - 6 * PAGE)
    assert stand.stored() == set(range(2, 16))
    status = stand.store.status()
    assert status["evictions"] == {"pressure": 2}
    assert (status["resident_bytes"], status["withdrawn_bytes"]) == (RING - 6 * PAGE, 6 * PAGE)
    assert status["withdrawn_extents"] == 1
    assert status["pressed"]["resident_bytes_max"] == RING - 6 * PAGE
    assert stand.holds is not None
    assert (stand.holds.resident_bytes, stand.holds.wanted_bytes, stand.holds.settled) == (RING - 6 * PAGE, RING, True)
    stand.check()


def test_holes_are_given_back_before_any_entry_goes() -> None:
    stand = full()
    stand.send(1, messages.Evict(1, [key(5), key(9)]))
    stand.settle()
    stand.press(RING - 8 * PAGE)
    assert stand.stored() == set(range(16)) - {5, 9}
    assert stand.store.status()["evictions"] == {"explicit": 2}
    stand.check()


def test_no_entry_goes_while_holes_are_still_on_their_way_out() -> None:
    stand = Stand(200 * PAGE, page_bytes=PAGE)
    stand.join(1)
    for number in range(100):
        assert stand.put(number, 2 * PAGE - SPAN_HEADER_BYTES) == "stored"
    stand.send(1, messages.Evict(1, [key(number) for number in range(0, 100, 2)]))
    stand.settle()
    stand.press(110 * PAGE)
    assert stand.stored() == set(range(1, 100, 2))
    assert stand.store.status()["resident_bytes"] == 110 * PAGE
    stand.check()


def test_small_entries_go_with_their_neighbours_so_that_whole_pages_come_free() -> None:
    stand = Stand(RING, page_bytes=PAGE)
    stand.join(1)
    for number in range(64 * PAGE // SPAN):
        assert stand.put(number) == "stored"
    for number in range(0, 64, 2):
        stand.send(1, messages.Touch(1, [key(number)]))
    before = len(stand.stored())
    stand.press(RING - 8 * PAGE)
    status = stand.store.status()
    assert status["withdrawn_bytes"] == 8 * PAGE
    assert before - len(stand.stored()) <= 8 * PAGE // SPAN + 2, "entries went for pages that never came free"
    stand.check()


def test_a_limit_that_is_lifted_is_regrown() -> None:
    stand = full()
    limit(stand, 20 * PAGE)
    assert stand.store.status()["resident_bytes"] == 20 * PAGE
    assert stand.store.status()["evictions"] == {"capacity": 11}
    limit(stand, RING)
    status = stand.store.status()
    assert (status["resident_bytes"], status["withdrawn_extents"]) == (RING, 0)
    assert stand.put(100, RING - 5 * 4 * PAGE - SPAN_HEADER_BYTES) == "stored"
    assert stand.stored() == {11, 12, 13, 14, 15, 100}
    stand.check()


def test_a_put_that_a_raised_limit_has_room_for_costs_nobody_an_entry() -> None:
    stand = full()
    for number in range(0, 10, 2):
        stand.send(1, messages.Touch(1, [key(number)]))
    limit(stand, 20 * PAGE)
    survivors = {0, 2, 4, 6, 8}
    assert stand.stored() == survivors, "scattered, so that what comes back first are the gaps between them"
    limit(stand, 40 * PAGE)
    assert stand.store.memory.ring.largest_free_bytes < 16 * PAGE
    assert stand.put(100, 16 * PAGE - SPAN_HEADER_BYTES) == "stored"
    assert stand.stored() == survivors | {100}
    assert stand.store.status()["resident_bytes"] == 40 * PAGE
    stand.check()


def test_a_put_waits_for_pages_on_their_way_back_and_costs_nobody_an_entry() -> None:
    stand = full()
    limit(stand, 20 * PAGE)
    before = stand.stored()
    stand.send(2, messages.Limit(99, RING))
    stand.commit(1, 50, key(100), 16 * PAGE - SPAN_HEADER_BYTES)
    stand.part(1, 50, 16 * PAGE - SPAN_HEADER_BYTES, last=True)
    stand.settle()
    assert stand.ended(1, 50) == "stored"
    assert stand.stored() == before | {100}
    stand.check()


def test_the_lower_of_limit_and_pressure_counts() -> None:
    stand = full()
    limit(stand, 40 * PAGE)
    stand.press(20 * PAGE)
    assert stand.store.status()["resident_bytes"] == 20 * PAGE
    limit(stand, RING)
    assert stand.store.status()["resident_bytes"] == 20 * PAGE
    limit(stand, 30 * PAGE)
    stand.press(50 * PAGE)
    assert stand.store.status()["resident_bytes"] == 30 * PAGE
    stand.press()
    assert stand.store.status()["resident_bytes"] == 30 * PAGE
    assert stand.store.status()["pressed"] is None
    stand.check()


@pytest.mark.parametrize("size", [3, 7, 11, 16, 20])
def test_a_put_that_fits_the_limit_finds_room_between_withdrawn_pages(size: int) -> None:
    stand = full()
    for number in range(0, 16, 2):
        stand.send(1, messages.Touch(1, [key(number)]))
    limit(stand, 20 * PAGE)
    for number in range(100, 112):
        assert stand.put(number, size * PAGE - SPAN_HEADER_BYTES) == "stored"
        assert stand.store.status()["resident_bytes"] <= 20 * PAGE
        stand.check()


def test_the_limit_holds_at_every_moment_of_an_exchange() -> None:
    stand = full()
    for number in range(0, 16, 2):
        stand.send(1, messages.Touch(1, [key(number)]))
    limit(stand, 20 * PAGE)
    exchanges = 0
    stand.commit(1, 500, key(500), 18 * PAGE - SPAN_HEADER_BYTES)
    stand.part(1, 500, 18 * PAGE - SPAN_HEADER_BYTES, last=True)
    for _ in range(1000):
        assert stand.store.status()["resident_bytes"] <= 20 * PAGE
        if stand.scans:
            stand.scan()
        elif stand.punches:
            stand.punch()
        elif stand.allocations:
            exchanges += 1
            stand.allocate()
        elif stand.copies:
            stand.copy()
        else:
            break
        stand.go_on()
    assert stand.ended(1, 500) == "stored"
    assert exchanges > 0, "this is not the case that it is about"


def test_pinned_entries_are_passed_over() -> None:
    stand = full()
    views = [stand.pin(number) for number in (0, 1)]
    stand.send(1, messages.Pin(1, key(2), 100.0))
    stand.press(RING - 12 * PAGE)
    assert stand.stored() == {0, 1, 2, *range(6, 16)}
    stand.press(0)
    assert stand.stored() == {0, 1, 2}
    assert stand.store.status()["resident_bytes"] == 12 * PAGE
    assert stand.holds is not None and stand.holds.settled, "there is nothing more that it could do"
    stand.check()
    views.clear()
    stand.views.clear()
    stand.send(1, messages.Unpin(2, key(2)))
    stand.pass_time(10)
    assert stand.store.status()["resident_bytes"] == 0
    stand.check()


def test_memory_that_is_not_to_be_had_is_shown_and_asked_for_again() -> None:
    stand = full()
    limit(stand, 20 * PAGE)
    stand.short = True
    limit(stand, RING)
    status = stand.store.status()
    assert status["resident_bytes"] == 20 * PAGE
    assert "no memory is to be had" in status["regrow_error"]
    assert stand.holds is not None and stand.holds.settled
    for number in range(200, 205):
        assert stand.put(number, PAYLOAD) == "stored", "what is there serves all the same"
    timer = stand.store.next_timer()
    assert timer is not None
    stand.pass_time(100)
    assert stand.store.status()["withdrawn_bytes"] == RING - 20 * PAGE
    stand.check()
    stand.short = False
    stand.pass_time(31)
    status = stand.store.status()
    assert (status["resident_bytes"], status["regrow_error"]) == (RING, "")
    stand.check()


def test_in_an_emergency_what_is_idle_goes_and_what_is_held_stays() -> None:
    stand = full()
    stand.now = 40.0
    for number in (3, 7):
        stand.send(1, messages.Touch(1, [key(number)]))
    stand.pin(1)
    stand.send(1, messages.Pin(2, key(12), 100.0))
    stand.press(idle_s=30.0, refuse=True, reason="the host is at 97 %, and 96 % is the limit")
    assert stand.stored() == {1, 3, 7, 12}
    assert stand.store.status()["evictions"] == {"emergency": 12}
    assert stand.store.status()["withdrawn_bytes"] == 0, "what may stay in memory does"
    stand.press(16 * PAGE, refuse=True, reason="the host is at 97 %, and 96 % is the limit")
    assert stand.stored() == {1, 3, 7, 12}
    assert stand.store.status()["resident_bytes"] == 16 * PAGE
    stand.check()


def test_many_idle_entries_go_slice_by_slice() -> None:
    stand = Stand(1 << 18, max_entries=1000)
    stand.join(1)
    for number in range(700):
        assert stand.put(number) == "stored"
    stand.now = 40.0
    stand.do(Pressed(None, 30.0, refuse=True, reason="x"))
    assert stand.store.memory.scan_in_flight or len(stand.stored()) > 400, "one event, one slice"
    stand.go_on()
    stand.settle()
    assert stand.stored() == set()
    assert stand.store.status()["evictions"] == {"emergency": 700}
    assert stand.store.next_timer() is None


def test_puts_are_refused_in_an_emergency_and_accepted_after_it() -> None:
    stand = full()
    stand.begin(1, 900, key(900), PAYLOAD)
    stand.press(refuse=True, reason="the host is at 97 %, and 96 % is the limit")
    assert stand.put(901, PAYLOAD) == "UnderPressure"
    done = stand.answers[1][-2]
    assert isinstance(done, messages.Committed) and done.error is not None
    assert "97 %" in done.error.text and "96 %" in done.error.text
    assert stand.put(3, PAYLOAD) == "existed"
    assert stand.store.status()["refusals"]["UnderPressure"] >= 1
    stand.press()
    assert stand.put(901, PAYLOAD) == "stored"
    stand.check()


def test_a_put_over_the_limit_of_pressure_is_refused_with_under_pressure() -> None:
    stand = full()
    stand.press(8 * PAGE)
    assert stand.put(900, 12 * PAGE - SPAN_HEADER_BYTES) == "UnderPressure"
    assert stand.stored() == {14, 15}, "it costs nobody an entry"
    assert stand.put(901, 8 * PAGE - SPAN_HEADER_BYTES) == "stored"
    stand.check()


def test_pressure_that_goes_before_the_scan_spares_its_victims() -> None:
    stand = full()
    stand.do(Pressed(8 * PAGE))
    stand.go_on()
    assert stand.scans == 1
    stand.do(Pressed())
    stand.settle()
    assert stand.stored() == set(range(16))


def test_a_ring_that_grows_stays_within_what_may_be_in_memory() -> None:
    stand = Stand(RING, page_bytes=PAGE, grown_bytes=16 * PAGE)
    stand.join(1, 2)
    stand.press(20 * PAGE)
    for pages in (32, 48, 64):
        stand.grow(pages * PAGE, more=pages < 64)
        stand.settle()
        assert stand.store.status()["resident_bytes"] == 20 * PAGE
    assert stand.store.status()["withdrawn_extents"] == 1
    stand.press()
    assert stand.store.status()["resident_bytes"] == RING
    stand.check()


def test_pages_that_the_last_daemon_returned_are_taken_back_up_to_the_limit() -> None:
    stand = full()
    stand.press(40 * PAGE)
    left = stand.stored()
    missing = stand.store.memory.ring.withdrawn()
    records = [Recovered(slot.number, stand.headers.get(slot.offset), slot.published) for slot in stand.index.slots()]
    stand.store = stand.make(SpanAllocator(RING, PAGE // 4), epoch=2)
    stand.store.recover(records, stand.now, missing)
    stand.answers = {}
    stand.join(1)
    stand.short = True
    stand.grow(RING, more=False)
    stand.settle()
    assert stand.stored() == left
    assert stand.store.status()["resident_bytes"] == 40 * PAGE
    assert stand.store.status()["found_corrupt"] == 0
    stand.check()
    stand.short = False
    stand.pass_time(31)
    assert stand.store.status()["resident_bytes"] == RING
    assert stand.stored() == left
    stand.check()


def test_large_extents_are_punched_and_allocated_in_parts() -> None:
    ring_bytes = 160 << 20
    store = Stand(4096).make(SpanAllocator(0), 1)
    store.handle(Pressed(0), 0.0)
    effects = store.handle(RingGrown(ring_bytes, more=False), 0.0)
    sizes = [effect.size_bytes for effect in effects if isinstance(effect, Punch)]
    assert sizes == [64 << 20, 64 << 20, 32 << 20]


def test_a_chain_that_lies_within_one_page_leaves_with_the_page() -> None:
    stand = Stand(16 * SPAN, page_bytes=4 * SPAN)
    stand.join(1)
    assert stand.put(1) == stand.put(2, parent=key(1)) == stand.put(3, parent=key(2)) == "stored"
    stand.do(Pressed(0))
    for _ in range(20):
        stand.settle()
        stand.pass_time(1.0)
    assert stand.stored() == set()
    assert stand.holds is not None and stand.holds.resident_bytes == 0
    stand.check()
