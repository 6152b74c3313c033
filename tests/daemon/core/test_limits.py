"""Limits, generations and pins by message; a ring that grows, and a configuration that is read again; what is told."""

from __future__ import annotations

from dataclasses import replace

from tensord.daemon.forms.events import LimitsChanged, Tick
from tensord.ipc.messages import control as messages
from tensord.shm.ring.layout import PAGE_BYTES, SPAN_HEADER_BYTES

from .stand import SPAN, key, with_clients

PAGE = PAGE_BYTES - SPAN_HEADER_BYTES


def test_a_pin_lasts_no_longer_than_the_limit_and_ends_with_its_client() -> None:
    stand = with_clients(SPAN, pin_s_max=30.0)
    stand.put(1)
    stand.send(2, messages.Pin(1, key(1), 99.0))
    assert stand.last(2) == messages.Pinned(1, 30.0)
    assert stand.put(2) == "StoreFull"
    stand.leave(2)
    assert stand.put(3) == "stored"


def test_pins_are_limited_for_a_client_and_in_bytes() -> None:
    stand = with_clients(pins_per_client_max=4, pinned_bytes_max=5 * SPAN)
    for number in range(6):
        assert stand.put(number) == "stored"
    for number in (*range(4), 0, 4):
        stand.send(1, messages.Pin(number, key(number), 10.0))
    assert "may have 4" in stand.last(1).text
    for number in (0, 4, 5):
        stand.send(2, messages.Pin(number, key(number), 10.0))
    assert "all that may be pinned" in stand.last(2).text
    status = stand.store.status()
    assert (status["pins"], status["pinned_bytes"]) == (6, 5 * SPAN)


def test_puts_and_claims_begun_before_an_invalidation_come_to_nothing() -> None:
    stand = with_clients(1 << 16)
    for client in (3, 2):
        stand.send(client, messages.RequestClaim(1, key(3)))
    token = stand.answers[3][0].token
    place = stand.begin(1)
    stand.write(place, b"x" * 64)
    stand.send(1, messages.Invalidate(5, b"namespac", 0))
    assert stand.last(2).answer == "alone"
    assert stand.finish(1, place, key(1)) == "Invalidated"
    assert stand.put(3, client=3, claim=token) == "Invalidated"
    assert stand.put(1) == "Invalidated"
    stand.send(2, messages.RequestClaim(9, key(1)))
    assert stand.last(2).code == "Invalidated"
    assert stand.put(key(1, generation=1)) == "stored"
    assert stand.used_bytes == SPAN


def test_only_what_is_of_a_past_generation_is_refused() -> None:
    stand = with_clients(namespaces_max=1)
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


def test_a_lowered_limit_evicts_down_to_it_and_can_be_raised_again() -> None:
    stand = with_clients(16 * PAGE_BYTES)
    for number in range(15):
        stand.put(number, PAGE)
    stand.pin(0)
    stand.send(1, messages.Limit(1, 2 * PAGE_BYTES))
    assert stand.last() == messages.Limited(1, 16 * PAGE_BYTES, 2 * PAGE_BYTES)
    stand.pass_time(1)
    assert 0 in stand.stored() and stand.used_bytes <= 2 * PAGE_BYTES
    assert stand.put(20, PAGE) == "stored"
    stand.send(1, messages.Limit(2, 1 << 40))
    assert stand.last() == messages.Limited(2, 2 * PAGE_BYTES, 16 * PAGE_BYTES)
    for number in range(30, 50):
        assert stand.put(number, PAGE) == "stored"
    assert len(stand.stored()) == 16


def test_a_raised_generation_is_answered_after_the_old_entries_are_gone() -> None:
    stand = with_clients(1 << 20, max_entries=3000)
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


# ---- a reload


def test_lowered_budgets_are_reached_without_another_put() -> None:
    stand = with_clients()
    for number in range(8):
        stand.put(number, tokens=2)
    stand.do(LimitsChanged(replace(stand.limits, max_entries=6, max_tokens=8)))
    stand.pass_time(1)
    assert stand.stored() == {4, 5, 6, 7}
    assert stand.put(9, tokens=9) == "LimitReached"


def test_a_lowered_budget_of_entries_is_reached_once_their_pins_have_ended() -> None:
    stand = with_clients()
    for number in range(8):
        stand.put(number)
    views = [stand.pin(number) for number in range(8)]
    stand.do(LimitsChanged(replace(stand.limits, max_entries=6)))
    stand.pass_time(1)
    assert stand.stored() == set(range(8))
    for view in views:
        stand.release(view)
    stand.pass_time(10)
    assert len(stand.stored()) == 6


def test_a_budget_set_by_message_outlives_a_reload_that_does_not_name_another() -> None:
    stand = with_clients()
    stand.send(1, messages.Limit(1, 4 * SPAN))
    stand.do(LimitsChanged(stand.limits))
    assert stand.store.status()["max_bytes"] == 4 * SPAN
    stand.do(LimitsChanged(replace(stand.limits, max_bytes=5 * SPAN)))
    assert stand.store.status()["max_bytes"] == 5 * SPAN


def test_objects_over_a_lowered_limit_stay_and_no_more_are_accepted() -> None:
    stand = with_clients()
    for number in (1, 2):
        stand.put(number)
        stand.send(1, messages.Pin(number, key(number), 50.0))
        stand.send(1, messages.RequestClaim(10 + number, key(10 + number)))
    stand.do(LimitsChanged(replace(stand.limits, pins_per_client_max=1, claims_per_client_max=1)))
    stand.check()
    stand.put(3, client=2)
    before = len(stand.answers[1])
    stand.send(1, messages.Pin(3, key(3), 50.0))
    stand.send(1, messages.RequestClaim(13, key(13)))
    assert [answer.code for answer in stand.answers[1][before:]] == ["LimitReached"] * 2
    status = stand.store.status()
    assert status["pins"] == status["claims_held"] == 2


def test_new_times_hold_for_what_comes_after() -> None:
    stand = with_clients()
    stand.put(1)
    stand.do(LimitsChanged(replace(stand.limits, default_ttl_s=5.0, claim_s=2.0)))
    stand.put(2)
    stand.send(1, messages.RequestClaim(1, key(9)))
    stand.send(2, messages.RequestClaim(1, key(9)))
    stand.pass_time(2.5)
    assert stand.last(2).answer == "compute"
    stand.pass_time(3)
    assert stand.stored() == {1}


# ---- a ring that grows while it serves


def test_a_place_that_fits_only_the_grown_ring_is_waited_for() -> None:
    stand = with_clients(4096, grown_bytes=512)
    request = stand.ask(1, 2000)
    stand.settle()
    assert stand.answered(1, request) is None
    assert stand.put(2, client=2) == "stored", "those behind it are not kept waiting"
    stand.grow(2048, more=True)
    stand.settle()
    assert stand.answered(1, request) is None
    stand.grow(4096, more=False)
    stand.settle()
    (place,) = stand.places[1]
    stand.write(place, b"x" * 2000)
    assert place.size >= 2000


def test_a_ring_that_stops_growing_early_refuses_what_waited() -> None:
    stand = with_clients(4096, grown_bytes=512)
    request = stand.ask(1, 2000)
    stand.settle()
    stand.grow(1024, more=False)
    stand.settle()
    answer = stand.answered(1, request)
    assert answer is not None and answer.error is not None and answer.error.code == "ObjectTooLarge"
    assert stand.put(2, 2000) == "ObjectTooLarge"
