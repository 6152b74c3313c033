"""What of the ring is in memory: given back for a limit or for pressure, taken back; and which entries go for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tensord.daemon.forms.effects import SaveRemote
from tensord.daemon.forms.events import LimitsChanged, Pressed, Tick
from tensord.daemon.remote.writes import DEMOTION_S
from tensord.errors import TensordError, TierFull, TierTimedOut
from tensord.ipc.messages import control as messages
from tensord.shm.ring.layout import PAGE_BYTES, SPAN_HEADER_BYTES, span_bytes

from .blocks import block
from .stand import Stand, key, with_clients

RING = 64 * PAGE_BYTES
PAYLOAD = 4 * PAGE_BYTES - SPAN_HEADER_BYTES
STORED = set(range(15))


def full() -> Stand:
    """Fifteen entries of four pages each, the first the coldest, and four free pages."""
    stand = with_clients(RING)
    for number in STORED:
        assert stand.put(number, PAYLOAD) == "stored"
    return stand


def limit(stand: Stand, pages: int) -> None:
    stand.send(1, messages.Limit(stand.next_request(), pages * PAGE_BYTES))
    stand.settle()


def resident(stand: Stand) -> int:
    """The pages of the ring that are in memory."""
    return int(stand.store.status()["resident_bytes"]) // PAGE_BYTES


def test_pressure_takes_holes_then_the_coldest_and_no_more_than_it_needs_and_all_of_it_comes_again() -> None:
    stand = full()
    stand.evict(5, 9)
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
def test_small_entries_go_with_their_neighbours_so_that_whole_pages_come_free(sizes: tuple[int, ...]) -> None:
    stand = with_clients(RING, max_entries=1200)
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


def test_no_entry_goes_whose_end_would_free_no_page() -> None:
    stand = with_clients(RING, max_entries=1200)
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


def test_a_stretch_for_a_large_entry_may_have_more_pages_of_the_system_in_it_than_there_are_entries() -> None:
    stand, gone, kept = with_clients(24 * PAGE_BYTES), {1, 3, 7, 9, 13, 15, 19, 21}, {5, 11, 17}
    for number in range(24):
        assert stand.put(number, PAGE_BYTES - SPAN_HEADER_BYTES) == "stored"
    stand.evict(*gone)
    limit(stand, 16)
    stand.evict(*{*range(24)} - gone - kept)
    assert resident(stand) == 16 and stand.stored() == kept
    assert stand.put(100, 10 * PAGE_BYTES - SPAN_HEADER_BYTES) == "stored"
    assert resident(stand) == 16 and len(stand.stored() & kept) == 2


def test_the_lower_of_limit_and_pressure_holds() -> None:
    stand = full()
    limit(stand, 20)
    assert resident(stand) == 20 and set(stand.store.status()["evictions"]) == {"capacity"}
    for most, pressed, wanted in ((40, 30, 30), (64, 30, 30), (35, 50, 35), (35, None, 35), (64, None, 64)):
        limit(stand, most)
        stand.press(None if pressed is None else pressed * PAGE_BYTES)
        assert resident(stand) == wanted


def test_pinned_entries_are_passed_over_and_go_once_they_are_released() -> None:
    stand = full()
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
def test_memory_that_is_not_to_be_had_is_asked_for_again_and_no_entry_is_lost(restarts: bool) -> None:
    stand = full()
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


def test_a_chain_that_lies_within_one_page_leaves_with_the_page() -> None:
    stand = with_clients(16 * PAGE_BYTES)
    for number in range(3):
        assert stand.put(number, parent=key(number - 1) if number else None) == "stored"
    stand.press(0)
    stand.pass_time(10)
    assert stand.stored() == set() and resident(stand) == 0


def test_a_ring_that_grows_stays_within_what_may_be_in_memory() -> None:
    stand = with_clients(2 * RING, grown_bytes=RING)
    stand.press(20 * PAGE_BYTES)
    stand.grow(2 * RING, more=False)
    stand.settle()
    assert resident(stand) == 20
    stand.press()
    assert resident(stand) == 128


# ---- with a remote store, to which entries that go for memory are written first

SMALL_RING = 16 * PAGE_BYTES
PAGE = PAGE_BYTES - SPAN_HEADER_BYTES
QUEUE: dict[str, Any] = {"remote_s": 2.0, "remote_writes": True}


def full_of_pages(**limits: Any) -> Stand:
    """Fifteen entries of a page each, whose costs nobody knows, the first the coldest. One page is free."""
    stand = with_clients(SMALL_RING, **{**QUEUE, **limits})
    for number in (99, *range(15)):
        assert stand.put(number, PAGE) == "stored"
    stand.evict(99)
    assert not stand.remote and stand.stored() == STORED
    stand.store.counters.evictions.clear()
    return stand


def give_back(stand: Stand, pages: int) -> None:
    """The governor wants so many pages. Nothing that follows is carried out yet, but for the page that is free."""
    stand.do(Pressed(SMALL_RING - pages * PAGE_BYTES))
    stand.go_on()
    free_pages_go(stand)


def free_pages_go(stand: Stand) -> None:
    while stand.punches:
        stand.punch()


def keys(*numbers: int) -> set[bytes]:
    return set(map(key, numbers))


def written(stand: Stand) -> set[bytes]:
    """The keys that are being written."""
    return {write.key for write, _ in stand.writes if isinstance(write, SaveRemote)}


@pytest.mark.parametrize("how", ["pressure", "limit", "reload"])
def test_what_is_evicted_for_memory_is_written_before_it_goes(how: str) -> None:
    stand = full_of_pages()
    if how == "pressure":
        give_back(stand, 3)
    elif how == "limit":
        stand.send(2, messages.Limit(1, SMALL_RING - 3 * PAGE_BYTES))
    else:
        stand.do(LimitsChanged(replace(stand.limits, max_bytes=SMALL_RING - 3 * PAGE_BYTES)))
    free_pages_go(stand)
    assert not stand.scans and written(stand) == keys(0)
    assert stand.stored() == STORED, "they serve while they are written"
    assert stand.holds is None or not stand.holds.settled
    stand.settle()
    assert set(stand.remote) == keys(0, 1)
    assert stand.stored() == STORED - {0, 1}
    status = stand.store.status()
    assert status["remote"] == {"written": 2, "demoted": 2}
    assert status["evictions"] == {"pressure" if how == "pressure" else "capacity": 2}
    assert status["resident_bytes"] == SMALL_RING - 3 * PAGE_BYTES
    stand.press()
    stand.send(1, messages.RequestClaim(1, key(0), 30.0))
    assert stand.last().answer == "wait"
    stand.settle()
    assert stand.last().answer == "hit" and stand.find(key(0)) is not None, "it comes back"


def test_children_and_blocks_of_sequences_go_at_once_and_their_root_is_written() -> None:
    stand = with_clients(SMALL_RING, **QUEUE)
    assert stand.put(1, PAGE) == "stored"
    assert stand.put(2, PAGE, parent=key(1)) == "stored"
    assert stand.put_block(block([1])) == "stored"
    give_back(stand, 16)
    assert written(stand) == keys(1)
    stand.settle()
    assert not stand.stored()
    assert set(stand.remote) == keys(1)


def test_memory_is_held_up_no_longer_than_its_deadline() -> None:
    stand = full_of_pages()
    give_back(stand, 5)
    reading = len(written(stand))
    stand.now = DEMOTION_S - 0.01
    stand.do(Tick())
    assert (stand.scans, stand.stored()) == (0, STORED)
    stand.now = DEMOTION_S
    assert stand.store.next_timer() == DEMOTION_S
    stand.go_on()
    assert stand.scans
    stand.scan()
    free_pages_go(stand)
    # What a thread reads stays, whatever for.
    assert len(stand.stored()) <= 15 - (4 - reading)
    stand.settle()
    assert stand.store.status()["resident_bytes"] == SMALL_RING - 5 * PAGE_BYTES


@pytest.mark.parametrize(
    ("error", "pages", "unwritten", "later"),
    [(TierFull("full"), 5, {0, 1, 2, 3}, set()), (TierTimedOut("slow"), 3, {0}, {1})],
)
def test_an_entry_whose_write_fails_goes_unwritten_and_a_full_store_holds_nothing_up(
    error: TensordError, pages: int, unwritten: set[int], later: set[int]
) -> None:
    stand = full_of_pages()
    give_back(stand, pages)
    stand.write_remote(error=error)
    assert bool(stand.writes) == bool(later) != bool(stand.scans)
    stand.settle()
    assert stand.stored() == STORED - unwritten - later
    assert set(stand.remote) == keys(*later)
    counted = stand.store.status()["remote"]
    assert (counted["write_failed"], counted.get("dropped", 0)) == (1, len(unwritten) - 1)
