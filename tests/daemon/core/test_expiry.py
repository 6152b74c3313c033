"""Limits and generations where they meet grants and records, and pins by message."""

from __future__ import annotations

from tensord.daemon.forms.events import Tick
from tensord.ipc.messages import control as messages
from tensord.shm.ring.layout import PAGE_BYTES, SPAN_HEADER_BYTES

from .stand import SPAN, Make, key

PAGE = PAGE_BYTES - SPAN_HEADER_BYTES


def test_a_pin_lasts_no_longer_than_the_limit_and_ends_with_its_client(make: Make) -> None:
    stand = make(SPAN, pin_s_max=30.0)
    stand.put(1)
    stand.send(2, messages.Pin(1, key(1), 99.0))
    assert stand.last(2) == messages.Pinned(1, 30.0)
    assert stand.put(2) == "StoreFull"
    stand.leave(2)
    assert stand.put(3) == "stored"


def test_pins_are_limited_for_a_client_and_in_bytes(make: Make) -> None:
    stand = make(pins_per_client_max=4, pinned_bytes_max=5 * SPAN)
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


def test_puts_and_claims_begun_before_an_invalidation_come_to_nothing(make: Make) -> None:
    stand = make(1 << 16)
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
    stand = make(16 * PAGE_BYTES)
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


def test_more_keys_than_one_slice_are_evicted_and_counted_in_one_request(make: Make) -> None:
    stand = make(1 << 20, max_entries=3000)
    for number in range(600):
        stand.put(number)
    stand.send(1, messages.Evict(5, [key(number) for number in range(700)] + [key(0)]))
    stand.settle()
    assert stand.last() == messages.Counted(5, 600)
    stand.send(1, messages.Touch(6, [key(0)] * 1025))
    assert stand.last().code == "LimitReached"
