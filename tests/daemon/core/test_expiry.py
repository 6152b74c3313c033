"""How entries end: by name, by time, with their namespace, by a lowered limit; and what a pin holds."""

from __future__ import annotations

import pytest

from tensord.daemon.core.events import Tick
from tensord.ipc import messages

from .stand import SPAN, Make, key


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
    stand.begin(1, 1, key(3), 64)
    assert stand.scans == 1
    stand.send(2, messages.Evict(5, [key(1)]))
    assert stand.last(2) == messages.Counted(5, 1)
    stand.settle()
    assert stand.find(key(1)) is None
    assert stand.store.memory.spans.find(view.span_id) is not None


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


def test_a_pin_and_a_ttl_end_with_their_entry(make: Make) -> None:
    stand = make()
    stand.put(1, ttl_s=100.0)
    stand.send(2, messages.Pin(1, key(1), 99.0))
    stand.send(1, messages.Evict(1, [key(1)]))
    stand.settle()
    status = stand.store.status()
    assert (status["pins"], status["pinned_bytes"], status["entries"]) == (0, 0, 0)
    assert stand.store.next_timer() is None


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
    stand.send(3, messages.RequestClaim(1, key(3)))
    stand.send(2, messages.RequestClaim(1, key(3)))
    stand.commit(1, 1, key(1), 64)
    stand.part(1, 1, 64, last=True)
    stand.send(1, messages.Invalidate(5, b"namespac", 0))
    assert stand.last(2).answer == "alone"
    stand.settle()
    assert stand.ended(1, 1) == "Invalidated"
    token = stand.answers[3][0].token
    stand.commit(3, 2, key(3), 64, claim=token)
    assert stand.ended(3, 2) == "Invalidated"
    assert stand.put(1) == "Invalidated"
    stand.send(2, messages.RequestClaim(9, key(1)))
    assert stand.last(2).code == "Invalidated"
    assert stand.put(key(1, generation=1)) == "stored"


@pytest.mark.parametrize("stage", ["queued", "receiving", "copying", "copied"])
def test_a_put_of_a_past_generation_is_refused_at_every_stage(make: Make, stage: str) -> None:
    stand = make(4 * SPAN)
    if stage == "queued":
        # It waits for room, which a scan has to find first.
        for number in range(10, 14):
            stand.put(number)
            stand.pin(number)
    stand.commit(1, 1, key(1), 64 if stage == "queued" else 100)
    if stage != "queued":
        stand.part(1, 1, 40, last=False)
    if stage in ("copying", "copied"):
        stand.part(1, 1, 60, last=True)
    if stage == "copied":
        stand.copy()
    stand.send(2, messages.Invalidate(5, b"namespac", 0))
    stand.views.clear()
    if stage == "queued":
        stand.part(1, 1, 64, last=True)
    stand.settle()
    if stage == "receiving":
        stand.part(1, 1, 60, last=True)
        stand.settle()
    assert stand.ended(1, 1) == "Invalidated"
    assert stand.stored() == set()
    assert stand.store.memory.ring.used_bytes == 0


def test_only_what_is_of_a_past_generation_is_refused(make: Make) -> None:
    stand = make(namespaces_max=1)
    stand.send(1, messages.Invalidate(1, b"namespac", 6))
    assert stand.last() == messages.Generation(1, 7, 0)
    assert stand.put(key(1, generation=6)) == "Invalidated"
    for wanted in (key(1, generation=7), key(1, generation=8), key(1, b"other ns")):
        assert stand.put(wanted) == "stored"
    stand.send(1, messages.Invalidate(2, b"other ns", 0))
    assert stand.last().code == "LimitReached"
    stand.send(1, messages.Invalidate(3, b"namespac", (1 << 32) - 1))
    assert stand.last().code == "LimitReached"
    assert stand.put(key(2, generation=7)) == "stored"


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


def test_a_raised_generation_is_answered_after_the_old_entries_are_gone(make: Make) -> None:
    stand = make(1 << 20, max_entries=3000)
    for number in range(600):
        stand.put(number)
    stand.send(1, messages.Invalidate(5, b"namespac", 0))
    assert stand.stored(), "more than one slice"
    for client in (2, 3):
        stand.send(client, messages.Invalidate(6, b"namespac", 0))
    stand.send(2, messages.Invalidate(7, b"other ns", 0))
    assert [len(stand.answers[client]) for client in (2, 3)] == [0, 0]
    while not stand.answers[2]:
        stand.do(Tick())
    assert stand.stored() == set()
    stand.settle()
    assert stand.last(1) == messages.Generation(5, 1, 600)
    assert stand.answers[2] == [messages.Generation(6, 1, 0), messages.Generation(7, 1, 0)]
    assert stand.last(3) == messages.Generation(6, 1, 0)
