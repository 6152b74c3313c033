"""What of the ring is in memory: given back for a limit or for pressure, taken back, exchanged; and who has to go."""

from __future__ import annotations

from random import Random

import pytest

from tensord.daemon.host_memory.page_victims import PageVictims
from tensord.daemon.store.table import ENDED, LIVE
from tensord.shm.lanes.records import NO_KEY
from tensord.shm.ring.layout import SPAN_HEADER_BYTES, span_bytes

from ..store.rows import key_of
from .host import Host

PAGE = 256
RING = 64 * PAGE
PAYLOAD = 4 * PAGE - SPAN_HEADER_BYTES
SMALL = span_bytes(100)


def full() -> Host:
    """Sixteen entries of four times PAGE, the first the coldest, and nothing else. The pages are of PAGE / 4."""
    host = Host(RING, page_bytes=PAGE // 4)
    for number in range(16):
        assert host.store.put(key_of(number), PAYLOAD, now=number / 100)
    host.settle()
    return host


def resident(host: Host) -> int:
    return host.host.residency.resident_bytes // PAGE


def test_pressure_takes_the_coldest_and_no_more_than_it_needs_and_what_was_given_back_comes_again() -> None:
    host = full()
    host.press(RING - 6 * PAGE)
    assert host.gone == [(0, "pressure"), (1, "pressure")]
    assert resident(host) == 58 and len(host.host.withdrawn.rows) == 1
    assert host.holds is not None
    assert (host.holds.resident_bytes, host.holds.wanted_bytes, host.holds.settled) == (RING - 6 * PAGE, RING, True)
    host.press()
    assert (resident(host), host.stored(), host.host.withdrawn.rows) == (64, set(range(2, 16)), {})
    assert host.host.residency.unrestricted and host.store.holes.largest_bytes == 8 * PAGE


def test_holes_are_given_back_before_any_entry_goes() -> None:
    host = full()
    host.end([5, 9])
    host.press(RING - 8 * PAGE)
    assert host.stored() == set(range(16)) - {5, 9} and resident(host) == 56
    assert host.gave_up, "free places that are kept ready to be lent"


def test_no_entry_goes_while_holes_are_still_on_their_way_out() -> None:
    host = Host(200 * PAGE, page_bytes=PAGE)
    for number in range(100):
        host.store.put(key_of(number), 2 * PAGE - SPAN_HEADER_BYTES)
    host.end(range(0, 100, 2))
    host.press(110 * PAGE)
    assert host.stored() == set(range(1, 100, 2)) and resident(host) == 110


def test_small_entries_go_with_their_neighbours_so_that_whole_pages_come_free() -> None:
    host = Host(RING, page_bytes=PAGE)
    count = len(host.store.fill(now=0.5))
    host.use(*range(0, count, 2))
    host.press(RING - 8 * PAGE)
    assert host.host.withdrawn.size_bytes == 8 * PAGE
    assert len(host.gone) <= 8 * PAGE // SMALL + 2, "entries went for pages that never came free"


def test_a_lowered_limit_counts_as_capacity_and_the_lower_of_limit_and_pressure_holds() -> None:
    host = full()
    host.limit(20 * PAGE)
    assert resident(host) == 20 and {reason for _, reason in host.gone} == {"capacity"} and len(host.gone) == 11
    for limit, press, most in ((40, 30, 30), (64, 30, 30), (35, 50, 35), (35, None, 35), (64, None, 64)):
        host.budget.max_bytes = limit * PAGE
        host.press(None if press is None else press * PAGE)
        assert resident(host) == most
        assert host.budget.resident_bytes_max == (most * PAGE if most < 64 else None)


def test_pinned_entries_are_passed_over_and_go_once_they_are_released() -> None:
    host = full()
    host.pin(0, 1)
    host.store.spans.hold(host.row(2))
    host.press(RING - 12 * PAGE)
    assert host.stored() == {0, 1, 2, *range(6, 16)}
    host.press(0)
    assert host.stored() == {0, 1, 2} and resident(host) == 12
    assert host.host.stuck and host.holds is not None and host.holds.settled, "there is nothing more that it could do"
    host.pass_time(100)
    assert host.scans < 100, "it looks again and again, ever more seldom"
    host.store.pinned.clear()
    host.pass_time(10)
    assert host.stored() == {2}
    host.store.spans.release(host.row(2))
    host.pass_time(10)
    assert (resident(host), host.stored()) == (0, set())


def test_memory_that_is_not_to_be_had_is_shown_and_asked_for_again() -> None:
    host = full()
    host.limit(20 * PAGE)
    host.short = True
    host.limit(RING)
    assert resident(host) == 20 and "no memory is to be had" in host.host.residency.error
    assert host.holds is not None and host.holds.settled
    host.pass_time(100)
    assert resident(host) == 20
    host.short = False
    host.pass_time(31)
    assert (resident(host), host.host.residency.error) == (64, "")


def test_a_chain_that_lies_within_one_page_leaves_with_the_page() -> None:
    host = Host(16 * SMALL, page_bytes=4 * SMALL)
    for number in (1, 2, 3):
        assert host.store.put(key_of(number), parent=key_of(number - 1) if number > 1 else NO_KEY)
    host.press(0)
    host.pass_time(10)
    assert host.stored() == set() and resident(host) == 0


def test_a_daemon_that_is_about_to_end_evicts_nothing_for_pages() -> None:
    host = full()
    host.host.only_for_puts = True
    host.press(RING // 2)
    assert host.stored() == set(range(16))


def test_a_ring_that_grows_stays_within_what_may_be_in_memory() -> None:
    host = Host(RING, page_bytes=PAGE)
    host.press(20 * PAGE)
    for pages in (80, 96):
        host.store.holes.grow(pages * PAGE)
        host.settle()
        assert resident(host) == 20
    assert len(host.host.withdrawn.rows) == 1
    host.budget.max_bytes = 96 * PAGE
    host.press()
    assert resident(host) == 96


def test_pages_that_the_last_daemon_returned_are_taken_back_up_to_the_limit() -> None:
    host = full()
    host.press(40 * PAGE)
    left = host.stored()
    after = host.store.restarted()
    found = after.recovery(missing=host.host.withdrawn.within(0, RING)).run()
    again = Host(RING, page_bytes=PAGE // 4, store=after)
    again.short = True
    again.settle()
    assert (again.stored(), resident(again), found.corrupt) == (left, 40, 0)
    again.short = False
    again.pass_time(31)
    assert (again.stored(), resident(again)) == (left, 64)


@pytest.mark.parametrize("size", [5, 9, 16, 20])
def test_an_exchange_makes_room_between_withdrawn_pages_and_the_limit_holds_at_every_moment(size: int) -> None:
    host = full()
    host.use(*range(0, 16, 2))
    host.limit(20 * PAGE)
    for number in sorted(host.stored())[: -(-size // 4)]:
        host.end([number])
    host.settle()
    residency, table = host.host.residency, host.store.table
    where = host.host.withdrawn.widest(size * PAGE)
    assert (where is not None and host.store.holes.largest_bytes < size * PAGE) or size == 5
    assert where is not None
    residency.exchange(*where, size * PAGE)
    host.follow()
    while host.step():
        assert resident(host) <= 20
    assert residency.exchange_progress() == "done"
    row = host.store.holes.take(size * PAGE, ENDED)
    assert row and table.states[row] != LIVE
    residency.drop_exchange()
    host.store.holes.free(row)
    host.settle()
    assert resident(host) == 20


def test_withdrawn_pages_stay_together() -> None:
    host = Host(RING, page_bytes=PAGE)
    withdrawn, holes = host.host.withdrawn, host.store.holes
    first = holes.take(10 * PAGE, ENDED)
    assert withdrawn.withdraw_some(54 * PAGE, (0, 0)) == (10 * PAGE, 54 * PAGE)
    assert withdrawn.restorable(4 * PAGE) == (60 * PAGE, 4 * PAGE)
    holes.free(first)
    assert withdrawn.withdraw_some(2 * PAGE, (0, 0)) == (8 * PAGE, 2 * PAGE) and len(withdrawn.rows) == 1
    assert withdrawn.restorable(4 * PAGE) == (8 * PAGE, 4 * PAGE), "beside the hole"
    withdrawn.restore(20 * PAGE, 3 * PAGE)
    assert withdrawn.within(0, RING) == [(8 * PAGE, 12 * PAGE), (23 * PAGE, 41 * PAGE)]
    withdrawn.check_invariants()
    holes.check_invariants()


@pytest.mark.parametrize("seed", range(5))
def test_the_pages_that_victims_free_are_counted_right(seed: int) -> None:
    random = Random(seed)
    host = Host(RING, page_bytes=PAGE)
    store, number = host.store, 0
    while store.put(key_of(number), random.randrange(1, 500)):
        number += 1
    host.end(random.sample(range(number), number // 4))
    store.scan()

    def free() -> int:
        holes = [store.holes.ranked(rank) for rank in range(len(store.holes))]
        starts = [(store.table.end(before), size) for before, size in holes]
        return sum(host.host.withdrawn.pages_in(start, start + size) for start, size in starts)

    rows = [host.row(each) for each in host.stored()]
    warm = {row: random.random() for row in rows}
    held = set(random.sample(rows, len(rows) // 5))
    victims = PageVictims(
        store.table, store.holes, host.host.withdrawn, lambda row, _: row not in held, warm.__getitem__, 256
    )
    for row in sorted(warm, key=warm.__getitem__):
        if row not in held and victims.freed_bytes < 12 * PAGE:
            victims.add(row, 12 * PAGE - victims.freed_bytes)
    assert victims.freed_bytes > 0
    before = free()
    store.spans.end(list(victims.rows), "explicit")
    store.scan()
    assert free() - before == victims.freed_bytes
