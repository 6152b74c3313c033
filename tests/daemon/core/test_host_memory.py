"""What of the ring is in memory: given back for a limit or for pressure, taken back; and which entries go for it."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest

from tensord.daemon.host_memory.page_victims import PageVictims
from tensord.daemon.host_memory.withdrawn import pages_in
from tensord.daemon.store.table import LIVE
from tensord.ipc.messages import control as messages
from tensord.shm.ring.layout import PAGE_BYTES, SPAN_HEADER_BYTES

from .stand import SPAN, Make, Stand, key

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


def test_small_entries_go_with_their_neighbours_so_that_whole_pages_come_free(make: Make) -> None:
    stand = make(RING, max_entries=1200)
    numbers = range(RING // SPAN * 9 // 10)
    for number in numbers:
        assert stand.put(number) == "stored"
    stand.use(*numbers[::2])
    before = len(stand.stored())
    stand.press(RING - 16 * PAGE_BYTES)
    assert resident(stand) == 48
    assert before - len(stand.stored()) <= 16 * PAGE_BYTES // SPAN, "entries went for pages that never came free"


@pytest.mark.parametrize("seed", range(12))
def test_entries_that_go_for_pages_free_as_many_as_they_are_counted_for(make: Make, seed: int) -> None:
    chance = random.Random(seed)
    stand = make(RING, max_entries=1200)
    sizes = [chance.choice([64, 64, 200, 1000, 4000, 9000]) for _ in range(chance.randrange(20, 60))]
    for number, size in enumerate(sizes):
        assert stand.put(number, size) == "stored"
    evict(stand, *chance.sample(range(len(sizes)), len(sizes) // 4))
    parts = stand.store.parts
    table = parts.table
    rows = [row for row in table.in_order() if table.states[row] == LIVE]
    warmth = {row: chance.random() for row in rows}
    kept = set(chance.sample(rows, len(rows) // 10))
    found = PageVictims(table, parts.holes, lambda row, _: row not in kept, warmth.__getitem__, 256)
    for row in chance.sample(rows, len(rows)):
        if row not in kept and found.freed_bytes < 12 * PAGE_BYTES:
            found.add(row, 4 * PAGE_BYTES)

    def free(gone: Collection[int]) -> list[int]:
        """Bytes of whole pages between each two entries that stay."""
        begins, between = 0, []
        for row in table.in_order():
            if row not in gone:
                between.append(pages_in(begins, table.offsets[row]))
                begins = table.end(row)
        return [*between, pages_in(begins, RING)]

    assert found.freed_bytes == sum(free(found.rows)) - sum(free(()))
    for row in found.rows:
        first, last = row, row
        while table.prevs[first] in found.rows:
            first = table.prevs[first]
        while table.nexts[last] in found.rows:
            last = table.nexts[last]
        group = [each for each in found.rows if table.offsets[first] <= table.offsets[each] <= table.offsets[last]]
        assert sum(free(group)) > sum(free(())), "a group that frees no page"


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
