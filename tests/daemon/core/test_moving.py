"""Entries that move so that a put fits: nothing warm goes for it, nothing that is held moves, and nothing is lost."""

from __future__ import annotations

import pytest

from tensord.daemon.core.entries import SpanEntry
from tensord.daemon.core.events import Accessed
from tensord.daemon.core.moving import BURST_S, ROUND_S, TIME_SHARE, MovingTime
from tensord.daemon.policy.registry import POLICIES
from tensord.errors import Corrupt
from tensord.ipc import messages
from tensord.shm.layout import SPAN_HEADER_BYTES

from .stand import SPAN, Make, Stand, key
from .test_recovery import restart

LARGE = 2 * SPAN - SPAN_HEADER_BYTES


def holed(make: Make) -> Stand:
    """Eight entries side by side, of which 1 and 5 were evicted: two holes with warm entries between them."""
    stand = make(8 * SPAN)
    for number in range(8):
        stand.put(number, tokens=number)
    stand.send(1, evict(1, 5))
    stand.settle()
    return stand


def evict(*numbers: int) -> messages.Evict:
    return messages.Evict(99, [key(number) for number in numbers])


def entry_of(stand: Stand, number: int) -> SpanEntry:
    entry = stand.store.memory.entries.find(key(number))
    assert entry is not None
    return entry


def content_of(stand: Stand, number: int) -> bytes:
    view = stand.find(key(number))
    assert view is not None, f"{number} is not there"
    return view.content


def begin(stand: Stand, number: int, payload_bytes: int = LARGE) -> None:
    """A put of which everything has come, and nothing that follows from it was done but scans."""
    stand.commit(1, 500 + number, key(number), payload_bytes)
    stand.part(1, 500 + number, payload_bytes, last=True)
    while stand.scans:
        stand.scan()


def several_moves(make: Make) -> Stand:
    """A put for which several entries begin to move. Every other one of 32 entries was evicted."""
    stand = make(32 * SPAN)
    for number in range(32):
        stand.put(number)
    stand.send(1, evict(*range(1, 32, 2)))
    stand.settle()
    begin(stand, 40, 8 * SPAN - SPAN_HEADER_BYTES)
    assert len(stand.moves) > 2
    return stand


def test_one_scan_frees_what_all_the_moves_of_a_round_have_left(make: Make) -> None:
    stand = several_moves(make)
    before = stand.store.status()["scans"]
    while len(stand.moves) > 1:
        stand.move()
        assert not stand.scans
    stand.move()
    stand.scan()
    assert stand.store.status()["scans"] == before + 1
    assert stand.store.status()["retired_bytes"] == 0
    stand.settle()
    assert stand.ended(1, 540) == "stored"
    assert stand.store.status()["evictions"] == {"explicit": 16}


def test_what_moves_have_left_is_freed_though_the_last_of_them_fails(make: Make) -> None:
    stand = several_moves(make)
    while len(stand.moves) > 1:
        stand.move()
    stand.move(error=Corrupt("no header"))
    stand.scan()
    again = sum(move.size_bytes for move in stand.moves)
    assert stand.store.status()["retired_bytes"] == again, "of the moves that replace the failed one, and no more"
    stand.settle()
    assert stand.ended(1, 540) == "stored"


def test_an_eviction_waits_for_no_move(make: Make) -> None:
    stand = several_moves(make)
    stand.move()
    still = next(n for n in range(0, 32, 2) if entry_of(stand, n).offset not in {m.from_offset for m in stand.moves})
    stand.send(2, evict(still))
    assert stand.scans, "it is freed while others move"
    stand.scan()
    assert stand.moves
    stand.settle()
    assert stand.ended(1, 540) == "stored"


def test_a_put_with_enough_free_bytes_in_several_holes_evicts_nothing(make: Make) -> None:
    stand = holed(make)
    before = {number: content_of(stand, number) for number in (0, 2, 3, 4, 6, 7)}
    assert stand.put(20, LARGE) == "stored"
    assert stand.stored() == {0, 2, 3, 4, 6, 7, 20}
    assert {number: content_of(stand, number) for number in before} == before
    status = stand.store.status()
    assert status["moves"] == 1
    assert status["moved_bytes"] == SPAN
    assert status["evictions"] == {"explicit": 2}


def test_while_an_entry_moves_readers_find_it_at_any_moment(make: Make) -> None:
    stand = holed(make)
    begin(stand, 20)
    (move,) = stand.moves
    moving = next(n for n in (0, 2, 3, 4, 6, 7) if entry_of(stand, n).offset == move.from_offset)
    before = content_of(stand, moving)
    stand.move()
    assert content_of(stand, moving) == before
    assert entry_of(stand, moving).offset == move.to_offset
    stand.settle()
    assert content_of(stand, moving) == before


def test_a_view_of_an_entry_that_moved_stays_as_it_is_and_its_bytes_are_not_reused(make: Make) -> None:
    stand = holed(make)
    begin(stand, 20)
    (move,) = stand.moves
    moving = next(n for n in (0, 2, 3, 4, 6, 7) if entry_of(stand, n).offset == move.from_offset)
    stand.pin(moving)
    stand.settle()
    stand.check()
    assert stand.ended(1, 520) == "stored", "another place was found"
    stand.views.clear()
    stand.pass_time(10)
    assert stand.store.status()["retired_bytes"] == 0


def test_an_entry_in_use_does_not_move(make: Make) -> None:
    stand = holed(make)
    for number in (0, 2, 3, 4, 6, 7):
        stand.pin(number)
    offsets = {number: entry_of(stand, number).offset for number in (0, 2, 3, 4, 6, 7)}
    assert stand.put(20, LARGE) == "StoreFull"
    assert {number: entry_of(stand, number).offset for number in offsets} == offsets


def test_a_move_is_no_use_and_leaves_the_order_as_it_was(make: Make) -> None:
    stand = holed(make)
    assert stand.put(20, LARGE) == "stored"
    gone = []
    for number in range(30, 36):
        before = stand.stored()
        stand.put(number)
        gone += sorted(before - stand.stored())
    assert gone == [0, 2, 3, 4, 6, 7]


def test_uses_and_times_move_with_an_entry(make: Make) -> None:
    stand = make(8 * SPAN)
    for number in range(8):
        stand.put(number, ttl_s=100.0)
    for number in (0, 2, 3, 4, 6, 7):
        view = stand.find(key(number))
        assert view is not None
        stand.do(Accessed([view.span_id, view.span_id]))
    stand.send(1, evict(1, 5))
    stand.settle()
    stand.put(20, LARGE)
    assert stand.store.status()["moves"] == 1
    for number in (0, 2, 3, 4, 6, 7):
        entry = entry_of(stand, number)
        assert stand.index.uses(entry.slot) == 2
        assert stand.headers[entry.offset].expires_s == 100.0
    stand.pass_time(101)
    assert stand.stored() == {20}


def test_a_policy_knows_an_entry_that_moved_by_the_same_number_after_a_restart(make: Make) -> None:
    stand = holed(make)
    assert stand.put(20, LARGE) == "stored"
    before = {number: entry_of(stand, number).number for number in stand.stored()}
    assert any(entry_of(stand, number).span_id != before[number] for number in before)
    restart(stand)
    assert {number: entry_of(stand, number).number for number in stand.stored()} == before


def test_a_touch_during_a_move_reaches_the_new_header(make: Make) -> None:
    stand = make(8 * SPAN)
    for number in range(8):
        stand.put(number, ttl_s=100.0)
    stand.send(1, evict(1, 5))
    stand.settle()
    begin(stand, 20)
    (move,) = stand.moves
    moving = next(n for n in (0, 2, 3, 4, 6, 7) if entry_of(stand, n).offset == move.from_offset)
    before = stand.headers[move.from_offset]
    stand.now = 50.0
    stand.send(2, messages.Touch(98, [key(moving)]))
    # The header was copied before it was renewed.
    stand.headers[move.from_offset] = before
    stand.move()
    assert entry_of(stand, moving).offset == move.to_offset
    assert stand.headers[move.to_offset].expires_s == 150.0
    stand.settle()


def test_an_entry_that_is_evicted_on_its_way_stays_gone(make: Make) -> None:
    stand = holed(make)
    begin(stand, 20)
    (move,) = stand.moves
    moving = next(n for n in (0, 2, 3, 4, 6, 7) if entry_of(stand, n).offset == move.from_offset)
    stand.send(2, evict(moving))
    stand.settle()
    assert moving not in stand.stored()
    assert stand.ended(1, 520) == "stored"


def test_a_move_that_fails_leaves_the_entry_where_it_is(make: Make) -> None:
    stand = holed(make)
    before = {number: content_of(stand, number) for number in (0, 2, 3, 4, 6, 7)}
    begin(stand, 20)
    stand.move(error=Corrupt("no header"))
    assert {number: content_of(stand, number) for number in before} == before
    stand.settle()
    assert stand.ended(1, 520) == "stored"


@pytest.mark.parametrize("policy", POLICIES)
def test_large_and_small_puts_in_turn_lose_nothing_that_is_hotter_than_what_went(make: Make, policy: str) -> None:
    stand = make(64 * SPAN, policy=policy)
    for number in range(200):
        cells = (1, 5, 2, 9)[number % 4]
        assert stand.put(number, cells * SPAN - SPAN_HEADER_BYTES) == "stored"
    assert stand.store.status()["moves"] > 0
    used = stand.store.memory.ring.used_bytes
    assert used > 0.85 * 64 * SPAN, "holes are filled"


def test_one_scan_serves_many_puts_though_small_holes_stay_between_large_entries(make: Make) -> None:
    entries = 512
    stand = make(entries * 2 * SPAN + 2 * SPAN)
    # A hole at each end: together as large as an entry, and apart of no use to one.
    stand.put(0)
    for number in range(1, entries + 1):
        assert stand.put(number, LARGE) == "stored"
    stand.send(1, evict(0))
    stand.settle()
    before = stand.store.status()["scans"]
    for number in range(1000, 1064):
        assert stand.put(number, LARGE) == "stored"
    assert stand.store.status()["moves"] == 0
    assert stand.store.status()["scans"] - before <= 64 / 4


def test_moves_take_at_most_their_share_of_the_time_and_are_there_after_a_pause() -> None:
    time = MovingTime()
    searches = 0
    for step in range(10_000):
        if time.is_left(step / 1000):
            time.searched()
            searches += 1
    assert TIME_SHARE * 10 <= searches * ROUND_S <= TIME_SHARE * 10 + BURST_S + ROUND_S
    assert not time.is_left(10.0)
    assert time.is_left(10.0 + 2 * ROUND_S / TIME_SHARE)


def test_without_time_for_moves_a_put_evicts_the_entries_of_a_range(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MovingTime, "is_left", lambda _, now: False)
    stand = holed(make)
    assert stand.put(20, LARGE) == "stored"
    assert stand.store.status()["moves"] == 0
    assert stand.store.status()["evictions"] == {"explicit": 2, "capacity": 1}
