"""Making room: who goes, who stays, and that a put that cannot fit costs nobody an entry."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from random import Random

import pytest

from tensord.daemon.core.entries import SpanEntry
from tensord.daemon.core.events import Accessed, Scanned, Tick
from tensord.daemon.core.moving import MovingTime
from tensord.daemon.core.room import VICTIMS_MAX
from tensord.daemon.core.windows import Price, Windows
from tensord.daemon.policy.registry import POLICIES
from tensord.ipc import messages
from tensord.shm.layout import SPAN_HEADER_BYTES
from tensord.shm.window import Window

from .blocks import name
from .stand import SPAN, Make, Stand, key


def test_a_full_store_evicts_the_least_recently_used(make: Make) -> None:
    stand = make(4 * SPAN)
    for number in (1, 2, 3, 4):
        stand.put(number)
    used = stand.find(key(1))
    assert used is not None
    stand.do(Accessed([used.span_id]))
    assert stand.put(5) == "stored"
    assert stand.stored() == {1, 3, 4, 5}
    assert stand.store.status()["evictions"] == {"capacity": 1}


def test_a_pinned_victim_comes_back_and_the_next_goes(make: Make) -> None:
    stand = make(4 * SPAN)
    for number in (1, 2, 3, 4):
        stand.put(number)
    stand.pin(1)
    assert stand.put(5) == "stored"
    assert stand.stored() == {1, 3, 4, 5}
    assert stand.store.status()["republished"] == 1


def test_an_entry_that_the_last_scan_found_pinned_is_not_hidden(make: Make) -> None:
    stand = make(4 * SPAN)
    for number in (1, 2, 3, 4):
        stand.put(number)
    stand.pin(1)
    stand.put(5)
    for number in range(6, 20):
        assert stand.put(number) == "stored"
    assert stand.store.status()["republished"] == 1


def test_a_store_full_of_pins_refuses_after_one_attempt_and_recovers(make: Make) -> None:
    stand = make(4 * SPAN)
    for number in (1, 2, 3, 4):
        stand.put(number)
        stand.pin(number)
    assert stand.put(5) == "StoreFull"
    assert stand.stored() == {1, 2, 3, 4}
    assert stand.store.status()["scans"] == 1
    text = next(event["text"] for event in stand.told if event["event"] == "refuse")
    assert f"no room for {SPAN} bytes" in text
    assert f"{4 * SPAN} bytes are pinned or in flight" in text
    assert "largest_free_bytes is 0" in text
    assert stand.put(6) == "StoreFull"
    stand.views.clear()
    assert stand.put(7) == "stored"


def test_a_refused_put_costs_nobody_an_entry(make: Make) -> None:
    stand = make(9 * SPAN, max_tokens=20)
    for number in range(9):
        stand.put(number, tokens=2)
    for number in (0, 3, 6):
        stand.pin(number)
    before = stand.stored()
    assert stand.put(20, 3 * SPAN - SPAN_HEADER_BYTES) == "StoreFull", "three in a row, and each third pinned"
    assert stand.stored() == before
    assert stand.put(21, tokens=15) == "StoreFull", "6 of 20 tokens stay"
    assert stand.stored() == before
    assert stand.put(22, 2 * SPAN - SPAN_HEADER_BYTES, tokens=3) == "stored"


def test_a_large_put_evicts_only_the_coldest_wherever_they_lie(make: Make) -> None:
    stand = make(9 * SPAN)
    for number in range(9):
        stand.put(number)
    for number in (0, 1, 3, 2, 7, 8, 6):
        used = stand.find(key(number))
        assert used is not None
        stand.do(Accessed([used.span_id]))
    # 4 and 5 are the coldest, and then 0, which stands elsewhere.
    assert stand.put(20, 3 * SPAN - SPAN_HEADER_BYTES) == "stored"
    assert stand.stored() == {1, 2, 3, 6, 7, 8, 20}


def test_a_large_put_evicts_only_the_coldest_though_each_lies_beside_a_warm_entry(make: Make) -> None:
    stand = make(8 * SPAN)
    for number in range(8):
        stand.put(number)
    for number in (0, 4, 5, 2, 3, 6, 7, 1):
        used = stand.find(key(number))
        assert used is not None
        stand.do(Accessed([used.span_id]))
    assert stand.put(20, 2 * SPAN - SPAN_HEADER_BYTES) == "stored"
    assert stand.stored() == {1, 2, 3, 5, 6, 7, 20}


def test_a_window_wider_than_a_round_is_opened_in_rounds(make: Make) -> None:
    stand = make(600 * SPAN, object_bytes_max=600 * SPAN)
    for number in range(600):
        stand.put(number)
    assert stand.put(1000, 590 * SPAN - SPAN_HEADER_BYTES) == "stored"
    assert len(stand.stored()) == 11


def test_a_window_goes_on_where_it_was_begun(make: Make) -> None:
    stand = make(600 * SPAN)
    for number in range(600):
        stand.put(number)
    for number in (599, *range(300), *range(301, 599)):
        used = stand.find(key(number))
        assert used is not None
        stand.do(Accessed([used.span_id]))
    assert stand.put(1000, 560 * SPAN - SPAN_HEADER_BYTES) == "stored"
    assert len(stand.stored()) == 41, "begun around 300, and anew around 599, it takes them all"


@pytest.fixture
def no_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time is left for moves, so that room is made by windows."""
    monkeypatch.setattr(MovingTime, "is_left", lambda time, now: False)


@pytest.mark.usefixtures("no_moves")
def test_a_window_of_several_rounds_is_looked_for_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    stand = make(600 * SPAN)
    for number in range(600):
        stand.put(number)
    searched: list[int] = []
    cheapest = Windows.cheapest

    def counted(windows: Windows, anchors: Iterable[SpanEntry]) -> Window | None:
        searched.append(stand.store.status()["entries"])
        return cheapest(windows, anchors)

    monkeypatch.setattr(Windows, "cheapest", counted)
    assert stand.put(1000, 400 * SPAN - SPAN_HEADER_BYTES) == "stored"
    assert len(stand.stored()) == 201
    assert searched == [600]


@pytest.mark.usefixtures("no_moves")
@pytest.mark.parametrize("policy", POLICIES)
def test_among_entries_of_equal_worth_a_large_put_compares_windows_only_if_their_order_matters(
    make: Make, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    stand = make(600 * SPAN, policy=policy)
    for number in range(600):
        stand.put(number)
    windows: list[Window | None] = []
    around = Windows.around

    def counted(found: Windows, offset: int, *, below: Price | None = None) -> Window | None:
        windows.append(around(found, offset, below=below))
        return windows[-1]

    monkeypatch.setattr(Windows, "around", counted)
    assert stand.put(1000, 300 * SPAN - SPAN_HEADER_BYTES) == "stored"
    assert stand.stored() == {*range(300, 600), 1000}
    assert (len(windows) == 1) == stand.store.memory.policy.ranks_by_worth, len(windows)


@pytest.mark.usefixtures("no_moves")
def test_a_window_of_several_rounds_is_given_up_once_an_entry_of_it_is_in_use(make: Make) -> None:
    stand = make(1000 * SPAN)
    numbers = list(range(1000))
    for number in numbers:
        stand.put(number)
    Random(1).shuffle(numbers)
    for number in numbers:
        used = stand.find(key(number))
        assert used is not None
        stand.do(Accessed([used.span_id]))
    size_bytes = 400 * SPAN - SPAN_HEADER_BYTES
    stand.commit(1, 1, key(2000), size_bytes)
    stand.part(1, 1, size_bytes, last=True)
    stand.scan()
    # The victims of two rounds are chosen by now. This is one of the third round's.
    stand.pin(max(set(numbers) - stand.stored()) + VICTIMS_MAX)
    stand.settle()
    assert stand.ended(1, 1) == "stored"
    # Two rounds were over before the pin was known, and at most 400 stood in the next window.
    assert len(stand.stored()) >= 1001 - 2 * VICTIMS_MAX - 400


def test_readers_who_pin_every_victim_are_not_chased_for_ever(make: Make) -> None:
    stand = make(8 * SPAN)
    for number in range(8):
        stand.put(number)
    stand.begin(1, 1, key(9), 64)
    scans = 0
    while stand.scans and scans < 50:
        hidden = {slot.span_id for slot in stand.index.slots() if not slot.published}
        stand.views = [view for view in map(stand.find_span, hidden) if view is not None]
        stand.scan()
        scans += 1
    assert stand.ended(1, 1) == "StoreFull"
    assert scans == 2
    assert len(stand.stored()) == 8


def test_a_victim_that_came_back_counts_as_used(make: Make) -> None:
    stand = make(4 * SPAN)
    for number in (1, 2, 3, 4):
        stand.put(number)
    stand.pin(1)
    stand.put(5)
    stand.views.clear()
    stand.put(6)
    stand.put(7)
    assert stand.stored() == {1, 5, 6, 7}


def test_a_window_is_found_between_scattered_pins(make: Make) -> None:
    stand = make(60 * SPAN)
    for number in range(60):
        stand.put(number)
    for number in [*range(0, 50, 2), 58]:
        stand.pin(number)
    assert stand.put(100, 7 * SPAN - SPAN_HEADER_BYTES) == "stored"
    assert set(range(0, 50, 2)) <= stand.stored()


def test_cold_pinned_entries_do_not_hide_warm_ones_that_may_go(make: Make) -> None:
    stand = make(2000 * SPAN, max_entries=1500, pinned_bytes_max=SPAN)
    for number in range(1500):
        stand.put(number)
        if number < 1400:
            stand.pin(number)
    stand.commit(1, 1, key(5000), 64)
    stand.part(1, 1, 64, last=True)
    for _ in range(20):
        stand.settle()
        stand.do(Tick())
    assert stand.ended(1, 1) == "stored"


def test_a_put_waits_for_one_that_is_landing_rather_than_being_refused(make: Make) -> None:
    stand = make(SPAN)
    for client in (1, 2):
        stand.commit(client, 1, key(client), 64)
        stand.part(client, 1, 64, last=True)
    stand.scan()
    assert stand.ended(2, 1) == "", "nothing may go yet, but the first is about to be an entry"
    stand.settle()
    assert stand.ended(1, 1) == "stored"
    assert stand.ended(2, 1) == "stored"
    assert stand.stored() == {2}


def test_a_put_does_not_wait_for_a_put_whose_sender_is_slow(make: Make) -> None:
    stand = make(SPAN)
    stand.begin(1, 1, key(1), 64)
    assert stand.put(2, client=2) == "StoreFull"


def test_a_span_unpublished_during_a_scan_waits_for_the_next_scan(make: Make) -> None:
    stand = make()
    stand.put(1)
    stand.put(2)
    stand.send(1, messages.Evict(1, [key(1)]))
    view = stand.pin(2)
    stand.send(1, messages.Evict(2, [key(2)]))
    # The lanes were read before 2 was unpublished, and before its reader pinned it.
    stand.scans -= 1
    stand.do(Scanned(frozenset()))
    assert stand.store.memory.spans.find(view.span_id) is not None
    stand.settle()
    assert stand.store.memory.ring.used_bytes == SPAN
    stand.views.clear()
    stand.pass_time(10)
    assert stand.store.memory.ring.used_bytes == 0


def test_a_victim_whose_key_is_stored_anew_does_not_come_back(make: Make) -> None:
    stand = make(3 * SPAN)
    stand.begin(2, 1, key(1), 64)
    stand.put(1)
    stand.put(2)
    old = stand.pin(1)
    stand.begin(1, 1, key(9), 64)
    assert stand.find(key(1)) is None, "it is the victim"
    stand.part(2, 1, 63, last=True)
    stand.copy()
    new = stand.find(key(1))
    stand.settle()
    assert new is not None
    assert stand.find(key(1)) in (new, None)
    assert stand.store.memory.spans.find(old.span_id) is not None, "somebody still views it"


def test_a_full_bucket_evicts_the_coldest_entry_of_that_bucket(make: Make) -> None:
    stand = make(65_536, buckets=1)
    for number in range(8):
        stand.put(number)
    stand.pin(0)
    assert stand.put(100) == "stored"
    assert stand.stored() == {0, 2, 3, 4, 5, 6, 7, 100}
    assert stand.store.status()["evictions"] == {"index_bucket": 1}


def test_a_full_bucket_of_pins_refuses(make: Make) -> None:
    stand = make(65_536, buckets=1)
    for number in range(8):
        stand.put(number)
        stand.pin(number)
    assert stand.put(100) == "StoreFull"
    assert len(stand.stored()) == 8


@pytest.mark.parametrize(
    ("limits", "more", "reason"),
    [
        ({"max_entries": 3}, {}, "entries"),
        ({"max_tokens": 30}, {"tokens": 10}, "tokens"),
        ({"max_bytes": 3 * SPAN}, {}, "capacity"),
    ],
)
def test_every_budget_is_enforced(make: Make, limits: dict[str, int], more: dict[str, int], reason: str) -> None:
    stand = make(**limits)
    for number in range(6):
        assert stand.put(number, **more) == "stored"
        assert len(stand.stored()) <= 3
    assert stand.stored() == {3, 4, 5}
    assert stand.store.status()["evictions"] == {reason: 3}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pinned_entry_is_examined_once_and_not_for_each_put(policy: str) -> None:
    stand = Stand(600 * SPAN, policy=policy)
    stand.join(1)
    for number in range(600):
        stand.now += 1.0
        stand.put(number)
        if number < 400:
            stand.pin(number)
    looked = 0
    coldest = stand.store.memory.policy.coldest

    def counted(owners: Collection[int] | None = None) -> Iterator[int]:
        nonlocal looked
        for span_id in coldest(owners):
            looked += 1
            yield span_id

    stand.store.memory.policy.coldest = counted  # type: ignore[method-assign]
    for number in range(1000, 1100):
        stand.now += 1.0
        assert stand.put(number) == "stored"
    assert looked <= 400 + 100 * 20
    assert stand.stored() >= set(range(400))
    stand.check()


def test_a_released_entry_is_evicted_in_its_turn_again(make: Make) -> None:
    stand = make(8 * SPAN)
    for number in range(8):
        stand.put(number)
    stand.pin(0)
    stand.pin(1)
    assert stand.put(10) == stand.put(11) == "stored"
    assert stand.stored() >= {0, 1}
    stand.views.clear()
    for number in range(12, 18):
        assert stand.put(number) == "stored"
    assert stand.stored() == {10, 11, *range(12, 18)}


def test_a_pinned_block_does_not_keep_its_descendants(make: Make) -> None:
    stand = make(200 * SPAN)
    for first in range(8):
        stand.put_sequence(*range(100 * first, 100 * first + 8))
    middle = stand.find(name(list(range(300, 304))))
    assert middle is not None
    stand.views.append(middle)
    for number in range(250):
        assert stand.put(number) == "stored"
    assert stand.matched(*range(300, 308)) == 4
