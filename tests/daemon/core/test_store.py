"""What a client may rely on when it puts, claims, pins and evicts, one promise a test."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tensord.daemon.core.events import Accessed, Scanned, Tick
from tensord.errors import BadTree
from tensord.ipc import messages

from .stand import UNIX_AT_ZERO_S, Stand, key

SPAN = 192  # bytes that an image of 64 takes, header included


@pytest.fixture
def make() -> Any:
    """Makes stands, and checks them all at the end."""
    made: list[Stand] = []

    def make(*args: Any, **more: Any) -> Stand:
        stand = Stand(*args, **more)
        stand.join(1, 2, 3)
        made.append(stand)
        return stand

    yield make
    for stand in made:
        stand.check()
        assert stand.store.status()["evicted_while_pinned"] == 0


Make = Callable[..., Stand]


# ---- puts


def test_a_put_is_seen_only_once_all_of_it_is_copied(make: Make) -> None:
    stand = make()
    stand.commit(1, 1, key(1), 200)
    stand.part(1, 1, 128, last=False)
    stand.part(1, 1, 72, last=True)
    stand.copy()
    assert stand.stored() == set()
    stand.copy()
    assert stand.stored() == {1}
    assert [type(answer) for answer in stand.answers[1]] == [
        messages.PartCopied,
        messages.PartCopied,
        messages.Committed,
    ]


def test_the_span_header_says_what_the_entry_is(make: Make) -> None:
    stand = make()
    stand.now = 5.0
    assert stand.put(1, 200, client=2, tokens=9, ttl_s=60.0, tree=32) == "stored"
    (header,) = stand.headers.values()
    assert (header.key, header.image_bytes, header.tree_bytes) == (key(1), 200, 32)
    assert (header.tokens, header.owner_uid) == (9, 1002)
    assert header.created_unix_s == UNIX_AT_ZERO_S + 5
    assert header.expires_unix_s == UNIX_AT_ZERO_S + 65


def test_a_key_that_exists_is_not_stored_again(make: Make) -> None:
    stand = make()
    assert stand.put(1) == "stored"
    before = stand.find(key(1))
    assert stand.put(1, client=2) == "existed"
    assert stand.find(key(1)) == before
    assert isinstance(stand.answers[2][0], messages.Committed), "told before its part came"


def test_of_two_puts_in_flight_the_first_whole_one_wins(make: Make) -> None:
    stand = make()
    stand.commit(1, 1, key(1), 64)
    stand.commit(2, 1, key(1), 64)
    stand.part(2, 1, 64, last=True)
    stand.part(1, 1, 64, last=True)
    stand.copy()
    winner = stand.find(key(1))
    stand.settle()
    outcomes = [stand.outcome(client, 1) for client in (1, 2)]
    assert [o.outcome for o in outcomes if o is not None] == ["existed", "stored"]
    assert stand.find(key(1)) == winner
    assert stand.store.memory.ring.used_bytes == SPAN


def test_a_put_waiting_for_room_finds_that_its_key_was_stored_meanwhile(make: Make) -> None:
    stand = make(4 * SPAN)
    for number in (1, 2, 3):
        stand.put(number)
    stand.commit(1, 1, key(9), 64)
    stand.commit(2, 1, key(9), 64)
    stand.part(2, 1, 64, last=True)
    stand.part(1, 1, 64, last=True)
    assert stand.scans == 1
    stand.copy()
    stand.settle()
    assert stand.ended(1, 1) == "stored"
    assert stand.ended(2, 1) == "existed"
    # The room that was being made is not wanted any more, and costs nobody an entry.
    assert stand.stored() == {1, 2, 3, 9}


def test_a_wholly_sent_put_is_carried_out_though_its_sender_leaves(make: Make) -> None:
    stand = make()
    stand.commit(1, 1, key(1), 64)
    stand.part(1, 1, 64, last=True)
    stand.leave(1)
    assert stand.forgotten == [], "its inbox is still needed"
    stand.settle()
    assert stand.stored() == {1}
    assert stand.forgotten == [1]


def test_also_while_it_waits_for_room(make: Make) -> None:
    stand = make(2 * SPAN)
    stand.put(1)
    stand.put(2)
    stand.commit(1, 1, key(3), 64)
    stand.part(1, 1, 64, last=True)
    stand.leave(1)
    stand.settle()
    assert 3 in stand.stored()
    assert stand.forgotten == [1]


def test_a_half_sent_put_ends_with_its_sender_and_leaves_nothing(make: Make) -> None:
    stand = make()
    stand.commit(1, 1, key(1), 200)
    stand.part(1, 1, 100, last=False)
    stand.leave(1)
    assert stand.store.memory.ring.used_bytes > 0, "a copy into it is under way"
    assert stand.forgotten == []
    stand.copy()
    assert stand.store.memory.ring.used_bytes == 0
    assert stand.forgotten == [1]
    assert stand.store.status()["puts"] == {"aborted": 1}


def test_a_put_whose_bytes_are_no_tree_is_refused(make: Make) -> None:
    stand = make()
    stand.commit(1, 1, key(1), 64)
    stand.part(1, 1, 64, last=True)
    stand.copy(error=BadTree("depth 99"))
    done = stand.outcome(1, 1)
    assert done is not None
    assert done.error == messages.ErrorBody("BadTree", "depth 99")
    assert stand.store.memory.ring.used_bytes == 0


def test_parts_of_a_refused_put_are_acknowledged(make: Make) -> None:
    stand = make()
    stand.commit(1, 1, key(1), 64, tree=65)
    stand.part(1, 1, 64, last=True)
    assert stand.ended(1, 1) == "BadMessage"
    assert stand.last() == messages.PartCopied(1, 0)


def test_parts_that_do_not_add_up_end_the_put(make: Make) -> None:
    stand = make()
    for request, (size, last) in enumerate([(65, True), (64, False), (63, True)]):
        stand.commit(1, request, key(request), 64)
        stand.part(1, request, size, last=last)
        assert stand.ended(1, request) == "BadMessage"
        assert stand.last() != messages.PartCopied(request, 0)
    assert stand.store.memory.ring.used_bytes == 0


def test_a_sender_that_stops_halfway_does_not_hold_its_span_for_ever(make: Make) -> None:
    stand = make(put_idle_s=30)
    stand.commit(1, 1, key(1), 200)
    stand.part(1, 1, 100, last=False)
    stand.copy()
    stand.pass_time(29)
    assert stand.outcome(1, 1) is None
    stand.pass_time(2)
    assert stand.ended(1, 1) == "TimedOut"
    assert stand.store.memory.ring.used_bytes == 0


def test_a_put_is_not_overdue_while_its_copies_are(make: Make) -> None:
    stand = make(put_idle_s=30)
    stand.commit(1, 1, key(1), 200)
    stand.part(1, 1, 100, last=False)
    stand.pass_time(1000)
    assert stand.outcome(1, 1) is None


# ---- room


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


def test_what_was_pinned_lately_is_not_even_hidden(make: Make) -> None:
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
    assert stand.put(20, 3 * SPAN - 128) == "StoreFull", "three in a row, and each third pinned"
    assert stand.stored() == before
    assert stand.put(21, tokens=15) == "StoreFull", "6 of 20 tokens stay"
    assert stand.stored() == before
    assert stand.put(22, 2 * SPAN - 128, tokens=3) == "stored"


def test_a_large_put_opens_its_room_around_the_coldest(make: Make) -> None:
    stand = make(9 * SPAN)
    for number in range(9):
        stand.put(number)
    for number in (0, 1, 2, 3, 7, 8, 6):
        used = stand.find(key(number))
        assert used is not None
        stand.do(Accessed([used.span_id]))
    # 4 is the coldest, 5 the colder of its neighbours, and then 3, used before 6.
    assert stand.put(20, 3 * SPAN - 128) == "stored"
    assert stand.stored() == {0, 1, 2, 6, 7, 8, 20}


def test_a_window_wider_than_a_round_is_opened_in_rounds(make: Make) -> None:
    stand = make(600 * SPAN, object_bytes_max=600 * SPAN)
    for number in range(600):
        stand.put(number)
    assert stand.put(1000, 590 * SPAN - 128) == "stored"
    assert len(stand.stored()) == 11


def test_a_window_is_found_between_scattered_pins(make: Make) -> None:
    stand = make(60 * SPAN)
    for number in range(60):
        stand.put(number)
    for number in [*range(0, 50, 2), 58]:
        stand.pin(number)
    assert stand.put(100, 7 * SPAN - 128) == "stored"
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
    stand.settle()
    assert stand.ended(1, 1) == "stored"
    assert stand.ended(2, 1) == "stored"
    assert stand.stored() == {2}


def test_a_put_does_not_wait_for_one_whose_sender_dawdles(make: Make) -> None:
    stand = make(SPAN)
    stand.commit(1, 1, key(1), 64)
    assert stand.put(2, client=2) == "StoreFull"


def test_what_is_unpublished_during_a_scan_waits_for_the_next(make: Make) -> None:
    stand = make()
    stand.put(1)
    stand.put(2)
    stand.send(1, messages.Evict(1, [key(1)]))
    view = stand.pin(2)
    stand.send(1, messages.Evict(2, [key(2)]))
    # The lanes were read before 2 was unpublished, and before its reader pinned it.
    stand.scans -= 1
    stand.do(Scanned(frozenset()))
    assert stand.store.memory.span(view.span_id) is not None
    stand.settle()
    assert stand.store.memory.ring.used_bytes == SPAN
    stand.views.clear()
    stand.pass_time(10)
    assert stand.store.memory.ring.used_bytes == 0


def test_a_victim_whose_key_is_stored_anew_does_not_come_back(make: Make) -> None:
    stand = make(3 * SPAN)
    stand.commit(2, 1, key(1), 64)
    stand.put(1)
    stand.put(2)
    old = stand.pin(1)
    stand.commit(1, 1, key(9), 64)
    assert stand.find(key(1)) is None, "it is the victim"
    stand.part(2, 1, 64, last=True)
    stand.copy()
    new = stand.find(key(1))
    stand.settle()
    assert new is not None
    assert stand.find(key(1)) in (new, None)
    assert stand.store.memory.span(old.span_id) is not None, "somebody still views it"


def test_a_full_bucket_evicts_the_coldest_that_stands_there(make: Make) -> None:
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
def test_every_budget_is_enforced(
    make: Make, limits: dict[str, int], more: dict[str, int], reason: str
) -> None:
    stand = make(**limits)
    for number in range(6):
        assert stand.put(number, **more) == "stored"
        assert len(stand.stored()) <= 3
    assert stand.stored() == {3, 4, 5}
    assert stand.store.status()["evictions"] == {reason: 3}


# ---- refusals


@pytest.mark.parametrize(
    ("limits", "size", "more", "code", "says"),
    [
        ({"object_bytes_max": 1000}, 1001, {}, "ObjectTooLarge", "1001 bytes, .*max is 1000"),
        ({}, 4096, {}, "ObjectTooLarge", "4096 bytes take 4224 in the ring, and ring_bytes is 4096"),
        ({"max_bytes": 1024}, 960, {}, "ObjectTooLarge", "take 1088 .* max_bytes is 1024"),
        ({"max_tokens": 9}, 64, {"tokens": 10}, "LimitReached", "10 tokens, and max_tokens is 9"),
    ],
)
def test_what_can_never_fit_is_refused_with_value_limit_and_remedy(
    make: Make, limits: dict[str, int], size: int, more: dict[str, int], code: str, says: str
) -> None:
    stand = make(**limits)
    stand.put(1)
    assert stand.put(2, size, **more) == code
    text = next(e["text"] for e in stand.told if e["event"] == "refuse")
    assert re.search(says, text)
    assert "raise" in text
    assert stand.stored() == {1}
    assert stand.store.status()["refusals"] == {code: 1}


def test_each_limit_is_named_where_it_is_reached(make: Make) -> None:
    stand = make(
        commits_in_flight_max=1,
        parts_in_flight_max=2,
        claims_per_client_max=1,
        keys_per_request_max=1,
        pins_per_client_max=1,
        namespaces_max=1,
    )
    stand.put(1)
    stand.put(2)
    stand.commit(1, 1, key(8), 300)
    stand.commit(1, 2, key(9), 64)
    for _ in range(3):
        stand.part(1, 1, 64, last=False)
    for request in (3, 4):
        stand.send(1, messages.Claim(request, key(20 + request)))
    stand.send(1, messages.Evict(5, [key(1), key(2)]))
    stand.send(1, messages.Touch(6, [key(1), key(2)]))
    for number in (1, 2):
        stand.send(1, messages.Pin(6 + number, key(number), 1.0))
        stand.send(1, messages.Invalidate(8 + number, bytes([number]) * 8, 0))
    texts = [e["text"] for e in stand.told if e["event"] == "refuse"]
    names = [
        "commits_in_flight_max",
        "parts_in_flight_max",
        "claims_per_client_max",
        "keys_per_request_max",
        "keys_per_request_max",
        "pins_per_client_max",
        "namespaces_max",
    ]
    assert [name in text for name, text in zip(names, texts, strict=True)] == [True] * 7
    assert stand.stored() == {1, 2}
    assert stand.store.status()["refusals"] == {"LimitReached": 7}


def test_pins_by_message_cannot_take_the_whole_store(make: Make) -> None:
    stand = make(pinned_bytes_max=SPAN)
    stand.put(1)
    stand.put(2)
    stand.send(1, messages.Pin(1, key(1), 5.0))
    stand.send(2, messages.Pin(1, key(1), 5.0))
    stand.send(1, messages.Pin(2, key(2), 5.0))
    assert stand.answers[2][-1] == messages.Pinned(1, 5.0)
    assert stand.last().code == "LimitReached"
    assert "pinned_bytes_max" in stand.last().text


def test_an_id_in_flight_is_not_taken_twice(make: Make) -> None:
    stand = make()
    stand.commit(1, 1, key(1), 64)
    stand.commit(1, 1, key(2), 64)
    assert isinstance(stand.last(), messages.Error)
    stand.part(1, 1, 64, last=True)
    stand.settle()
    assert stand.stored() == {1}


# ---- a ring that grows


def test_a_put_that_fits_only_the_grown_ring_waits_for_it(make: Make) -> None:
    stand = make(4096, grown_bytes=512)
    stand.commit(1, 1, key(1), 2000)
    stand.part(1, 1, 2000, last=True)
    stand.settle()
    assert stand.put(2, client=2) == "stored", "those behind it are not kept waiting"
    stand.grow(2048, more=True)
    stand.settle()
    assert stand.outcome(1, 1) is None
    stand.grow(4096, more=False)
    stand.settle()
    assert stand.ended(1, 1) == "stored"


def test_a_growing_ring_evicts_before_it_makes_anybody_wait(make: Make) -> None:
    stand = make(4096, grown_bytes=SPAN)
    assert stand.put(1) == "stored"
    assert stand.put(2) == "stored"
    assert stand.stored() == {2}


def test_a_ring_that_stops_growing_early_refuses_what_waited(make: Make) -> None:
    stand = make(4096, grown_bytes=512)
    stand.commit(1, 1, key(1), 2000)
    stand.part(1, 1, 2000, last=True)
    stand.settle()
    stand.grow(1024, more=False)
    stand.settle()
    assert stand.ended(1, 1) == "StoreFull"
    assert stand.put(2, 2000) == "ObjectTooLarge"


# ---- ends


def test_an_evicted_entry_is_gone_at_once_and_its_bytes_when_unpinned(make: Make) -> None:
    stand = make()
    stand.put(1)
    stand.pin(1)
    stand.send(1, messages.Evict(5, [key(1), key(2), key(1)]))
    assert stand.last() == messages.Counted(5, 1)
    assert stand.stored() == set()
    stand.settle()
    assert stand.store.status()["retired_bytes"] == SPAN
    stand.pass_time(5)
    assert stand.store.memory.ring.used_bytes == SPAN
    stand.views.clear()
    stand.pass_time(5)
    assert stand.store.memory.ring.used_bytes == 0
    assert stand.store.status()["retired_bytes"] == 0


def test_a_span_that_stays_pinned_is_not_scanned_for_all_the_time(make: Make) -> None:
    stand = make()
    stand.put(1)
    stand.pin(1)
    stand.send(1, messages.Evict(5, [key(1)]))
    stand.pass_time(100)
    assert stand.store.status()["scans"] < 65


def test_a_victim_under_scan_can_be_evicted_by_name(make: Make) -> None:
    stand = make(2 * SPAN)
    stand.put(1)
    stand.put(2)
    view = stand.pin(1)
    stand.commit(1, 1, key(3), 64)
    stand.send(2, messages.Evict(5, [key(1)]))
    assert stand.last(2) == messages.Counted(5, 1)
    stand.settle()
    assert stand.find(key(1)) is None
    assert stand.store.memory.span(view.span_id) is not None


def test_entries_expire_and_touch_renews_them(make: Make) -> None:
    stand = make()
    stand.put(1, ttl_s=10.0)
    stand.put(2, ttl_s=10.0)
    stand.put(3)
    stand.pass_time(9)
    stand.send(1, messages.Touch(1, [key(1)]))
    assert stand.last() == messages.Counted(1, 1)
    stand.pass_time(2)
    assert stand.stored() == {1, 3}
    stand.pass_time(9)
    assert stand.stored() == {3}
    assert stand.store.status()["evictions"] == {"ttl": 2}


def test_default_ttl_holds_for_puts_that_name_none(make: Make) -> None:
    stand = make(default_ttl_s=5.0)
    stand.put(1)
    stand.put(2, ttl_s=50.0)
    stand.pass_time(6)
    assert stand.stored() == {2}


def test_a_pin_outlasts_capacity_and_ttl_but_not_its_time(make: Make) -> None:
    stand = make(2 * SPAN, pin_s_max=30.0)
    stand.put(1, ttl_s=5.0)
    stand.send(1, messages.Pin(1, key(1), 99.0))
    assert stand.last() == messages.Pinned(1, 30.0)
    for number in (2, 3, 4):
        assert stand.put(number) == "stored"
    stand.pass_time(29)
    assert 1 in stand.stored()
    stand.pass_time(2)
    assert 1 not in stand.stored()


def test_a_pin_ends_with_its_client(make: Make) -> None:
    stand = make(SPAN)
    stand.put(1)
    stand.send(2, messages.Pin(1, key(1), 99.0))
    assert stand.put(2) == "StoreFull"
    stand.leave(2)
    assert stand.put(3) == "stored"


def test_an_unpinned_entry_may_go(make: Make) -> None:
    stand = make(SPAN)
    stand.put(1)
    stand.send(2, messages.Pin(1, key(1), 99.0))
    stand.send(2, messages.Unpin(2, key(1)))
    assert stand.last(2) == messages.Done(2)
    assert stand.put(3) == "stored"


def test_pinning_what_is_not_there_lasts_no_time(make: Make) -> None:
    stand = make()
    stand.send(1, messages.Pin(1, key(1), 99.0))
    assert stand.last() == messages.Pinned(1, 0.0)


def test_clear_ends_one_namespace_or_all_in_slices(make: Make) -> None:
    stand = make(1 << 20, max_entries=3000)
    for number in range(700):
        stand.commit(1, number, key(number, b"12345678" if number % 2 else b"87654321"), 64)
        stand.part(1, number, 64, last=True)
        stand.settle()
    stand.send(1, messages.Clear(9999, b"12345678"))
    assert not isinstance(stand.last(), messages.Counted), "more than one slice"
    assert len(stand.stored()) == 700 - 256
    late = key(5000, b"12345678")
    stand.commit(2, 1, late, 64)
    stand.part(2, 1, 64, last=True)
    stand.copy()
    assert stand.store.next_timer() == stand.now
    stand.settle()
    assert stand.last() == messages.Counted(9999, 350)
    assert stand.find(late) is not None, "what comes after the request stays"
    stand.send(1, messages.Clear(10_000))
    stand.settle()
    assert stand.last() == messages.Counted(10_000, 351)
    assert stand.store.memory.ring.used_bytes == 0


def test_invalidate_raises_the_generation_once_for_all_who_ask(make: Make) -> None:
    stand = make()
    tag = b"namespac"
    stand.put(1)
    for client in (1, 2):
        stand.send(client, messages.Invalidate(5, tag, 0))
    assert stand.last(1) == messages.Generation(5, 1, 1)
    assert stand.last(2) == messages.Generation(5, 1, 0)
    stand.send(1, messages.Invalidate(6, tag, 1))
    assert stand.last() == messages.Generation(6, 2, 0)
    assert stand.stored() == set()


def test_puts_and_claims_begun_before_an_invalidation_come_to_nothing(make: Make) -> None:
    stand = make()
    stand.send(3, messages.Claim(1, key(3)))
    stand.send(2, messages.Claim(1, key(3)))
    stand.commit(1, 1, key(1), 64)
    stand.part(1, 1, 64, last=True)
    stand.send(1, messages.Invalidate(5, b"namespac", 0))
    assert stand.last(2).answer == "alone"
    stand.settle()
    assert stand.ended(1, 1) == "Invalidated"
    token = stand.answers[3][0].token
    stand.commit(3, 2, key(3), 64, claim=token)
    assert stand.ended(3, 2) == "ClaimLost"
    assert stand.put(1) == "stored"


def test_a_lowered_limit_evicts_down_to_it_and_can_be_raised_again(make: Make) -> None:
    stand = make(8 * SPAN)
    for number in range(8):
        stand.put(number)
    stand.pin(0)
    stand.send(1, messages.Limit(1, 2 * SPAN))
    assert stand.last() == messages.Limited(1, 8 * SPAN, 2 * SPAN)
    stand.pass_time(1)
    assert stand.stored() == {0, 7}
    stand.send(1, messages.Limit(2, 1 << 40))
    assert stand.last() == messages.Limited(2, 2 * SPAN, 8 * SPAN)
    for number in range(10, 17):
        assert stand.put(number) == "stored"
    assert len(stand.stored()) == 8


def test_a_limit_below_what_is_pinned_is_reached_when_pins_go(make: Make) -> None:
    stand = make(4 * SPAN)
    for number in range(4):
        stand.put(number)
        stand.pin(number)
    stand.send(1, messages.Limit(1, SPAN))
    stand.pass_time(5)
    assert len(stand.stored()) == 4
    stand.views.clear()
    stand.pass_time(5)
    assert len(stand.stored()) == 1


# ---- claims and the store


def test_waiters_learn_of_the_commit(make: Make) -> None:
    stand = make()
    stand.send(1, messages.Claim(1, key(1)))
    stand.send(2, messages.Claim(2, key(1)))
    token = stand.answers[1][0].token
    stand.put(1, claim=token)
    assert [answer.answer for answer in stand.answers[2]] == ["wait", "hit"]
    stand.send(3, messages.Claim(3, key(1)))
    assert stand.last(3) == messages.Claimed(3, "hit")


def test_a_refused_commit_lets_every_waiter_compute(make: Make) -> None:
    stand = make()
    stand.send(1, messages.Claim(1, key(1)))
    for client in (2, 3):
        stand.send(client, messages.Claim(2, key(1)))
    stand.put(1, 5000, claim=stand.answers[1][0].token)
    assert stand.last(2) == stand.last(3) == messages.Claimed(2, "alone")


def test_a_claim_passes_on_when_its_holder_dies_or_is_late(make: Make) -> None:
    stand = make(claim_s=10, claim_s_max=60)
    for client in (1, 2, 3):
        stand.send(client, messages.Claim(1, key(1)))
    stand.leave(1)
    assert stand.last(2).answer == "compute"
    stand.pass_time(11)
    assert stand.last(3) == messages.Claimed(1, "alone")


def test_a_late_claimant_still_stores_its_result(make: Make) -> None:
    stand = make(claim_s=10, claim_s_max=60)
    stand.send(1, messages.Claim(1, key(1)))
    token = stand.last().token
    stand.pass_time(100)
    assert stand.put(1, claim=token) == "stored"


def test_waiters_get_the_result_of_a_claimant_that_died_after_sending_all(make: Make) -> None:
    stand = make()
    stand.send(1, messages.Claim(1, key(1)))
    stand.send(2, messages.Claim(1, key(1)))
    stand.commit(1, 2, key(1), 64, claim=stand.answers[1][0].token)
    stand.part(1, 2, 64, last=True)
    stand.leave(1)
    assert stand.last(2).answer == "wait"
    stand.settle()
    assert stand.last(2).answer == "hit"


def test_a_victim_that_comes_back_is_a_hit_for_those_who_wait(make: Make) -> None:
    stand = make(2 * SPAN)
    stand.put(1)
    stand.put(2)
    stand.pin(1)
    stand.commit(1, 1, key(9), 64)
    stand.send(2, messages.Claim(1, key(1)))
    stand.send(3, messages.Claim(1, key(1)))
    assert [stand.last(2).answer, stand.last(3).answer] == ["compute", "wait"]
    stand.settle()
    assert stand.last(3).answer == "hit"


# ---- reading what is there


def test_entries_are_paged_completely_and_once(make: Make) -> None:
    stand = make(1 << 20, max_entries=3000)
    for number in range(300):
        stand.commit(1, number, key(number * 7919, b"abcdefgh" if number % 3 else b"hgfedcba"), 64)
        stand.part(1, number, 64, last=True)
        stand.settle()
    for tag, expected in ((None, 300), (b"hgfedcba", 100), (b"nobody's", 0)):
        seen: list[str] = []
        after = None
        while page := stand.store.entries(after, 7, tag):
            seen += [entry["key"] for entry in page]
            after = bytes.fromhex(seen[-1])
        assert len(seen) == len(set(seen)) == expected


def test_a_page_may_begin_behind_a_key_that_is_gone(make: Make) -> None:
    stand = make()
    for number in range(8):
        stand.put(number)
    order = [entry["key"] for entry in stand.store.entries(None, 100)]
    stand.send(1, messages.Evict(1, [bytes.fromhex(order[3])]))
    rest = stand.store.entries(bytes.fromhex(order[3]), 100)
    assert [entry["key"] for entry in rest] == order[4:]


def test_status_and_entry_say_what_is_there(make: Make) -> None:
    stand = make()
    stand.now = 3.0
    stand.put(1, 100, tokens=5, ttl_s=10.0)
    view = stand.pin(1)
    stand.now = 4.0
    stand.do(Accessed([view.span_id, view.span_id, 12345], misses=2, lost=1))
    entry = stand.store.entry(key(1))
    assert entry is not None
    assert entry["key"] == key(1).hex()
    assert (entry["image_bytes"], entry["span_bytes"], entry["tokens"]) == (100, 256, 5)
    assert entry["uses"] == 2
    assert entry["used_unix_s"] == UNIX_AT_ZERO_S + 4
    assert entry["expires_unix_s"] == UNIX_AT_ZERO_S + 13
    status = stand.store.status()
    assert (status["entries"], status["tokens"], status["used_bytes"]) == (1, 5, 256)
    assert status["largest_free_bytes"] == 4096 - 256
    assert (status["hits"], status["hits_unknown"], status["misses"]) == (3, 1, 2)
    assert status["puts"] == {"stored": 1}
    assert stand.store.entry(key(2)) is None


def test_watchers_are_told_what_happens(make: Make) -> None:
    stand = make(SPAN)
    stand.put(1)
    stand.put(2)
    stand.send(1, messages.Claim(1, key(3)))
    stand.send(1, messages.Limit(1, 9999))
    stand.send(1, messages.Clear(2))
    events = [event["event"] for event in stand.told]
    assert events == ["put", "evict", "put", "claim", "limit", "clear"]
