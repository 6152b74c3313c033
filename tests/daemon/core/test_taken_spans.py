"""Spans that clients take to write payloads into: nobody else gets a span while its client may be writing it."""

from __future__ import annotations

import pytest

from tensord.daemon.core.taken_spans import TAKEN_SHARE
from tensord.errors import BadTree
from tensord.ipc import messages
from tensord.ipc.schema import SPAN_S, SPANS_PER_CLIENT_MAX
from tensord.shm.layout import aligned, span_bytes

from .stand import SPAN, Make, Stand, key

RING = 64 * SPAN


def take(stand: Stand, client: int = 1, request: int = 1, payload_bytes: int = 64) -> None:
    """A TakeSpan, up to its answer."""
    stand.take_span(client, request, payload_bytes)
    stand.settle()


def error_of(stand: Stand, client: int, request: int) -> str:
    """The code of the error that answers a request; empty if none does."""
    answers = stand.answers[client]
    return next((a.code for a in answers if isinstance(a, messages.Error) and a.id == request), "")


def test_a_payload_written_into_a_span_is_found_once_its_commit_is_answered(make: Make) -> None:
    stand = make(RING)
    take(stand)
    view = stand.write(1, 1)
    assert view is not None
    stand.put_span(1, 2, key(1), span=1)
    assert stand.find(key(1)) is None, "found before it was checked"
    stand.settle()
    assert stand.ended(1, 2) == "stored"
    found = stand.find(key(1))
    assert found is not None
    assert (found.span_id, found.content) == (view.span_id, view.content)
    stand.check()


def test_a_span_is_found_under_no_key_before_its_commit(make: Make) -> None:
    stand = make(RING)
    take(stand)
    stand.write(1, 1)
    assert not stand.stored()
    assert not list(stand.store.memory.entries)
    stand.check()


def test_the_bytes_that_a_payload_does_not_need_are_free_for_others(make: Make) -> None:
    stand = make(8 * SPAN)
    take(stand, payload_bytes=6 * SPAN)
    stand.write(1, 1)
    before_bytes = stand.store.memory.ring.free_bytes
    stand.put_span(1, 2, key(1), span=1)
    stand.settle()
    assert stand.store.memory.ring.free_bytes == before_bytes + span_bytes(6 * SPAN) - SPAN
    for number in range(10, 17):
        assert stand.put(number, client=2) == "stored"
    assert stand.stored() == {1, *range(10, 17)}
    stand.check()


def test_the_span_of_a_client_that_left_is_kept_while_it_is_pinned_and_freed_afterwards(make: Make) -> None:
    stand = make(2 * SPAN)
    take(stand)
    stand.write(1, 1)
    stand.leave(1)
    for number in range(10, 20):
        stand.put(number, client=2)
    assert len(stand.stored()) == 1, "the writer's span was given to others"
    stand.check()
    stand.views.clear()
    for number in range(20, 22):
        assert stand.put(number, client=2) == "stored"
    assert stand.stored() == {20, 21}
    stand.check()


def test_a_client_that_was_too_slow_to_pin_its_span_sees_that_it_was_taken_back(make: Make) -> None:
    stand = make(RING)
    take(stand)
    stand.now += SPAN_S + 1
    stand.go_on()
    assert stand.scans == 1, "freed without a look at the lanes"
    assert stand.write(1, 1) is None, "before the scan"
    stand.settle()
    assert stand.write(1, 1) is None, "after it"
    stand.check()


def test_the_commit_of_a_span_that_was_taken_back_is_refused(make: Make) -> None:
    stand = make(RING)
    take(stand)
    stand.write(1, 1)
    stand.views.clear()
    stand.pass_time(SPAN_S + 1)
    stand.put_span(1, 2, key(1), span=1)
    stand.settle()
    assert stand.ended(1, 2) == "TimedOut"
    assert stand.find(key(1)) is None
    stand.check()


@pytest.mark.parametrize("scanned", ["before", "meanwhile", "after"])
def test_a_client_that_takes_longer_to_write_than_a_span_lasts_gets_it_as_long_as_it_pins_it(
    make: Make, scanned: str
) -> None:
    stand = make(RING)
    take(stand)
    view = stand.write(1, 1)
    assert view is not None
    stand.now += 10 * SPAN_S
    stand.go_on()
    assert stand.scans == 1
    if scanned == "before":
        stand.settle()
        for number in range(10, 80):
            assert stand.put(number, client=2) == "stored"
    stand.put_span(1, 2, key(1), span=1)
    if scanned == "meanwhile":
        stand.scan()
    stand.settle()
    assert stand.ended(1, 2) == "stored"
    found = stand.find(key(1))
    assert found is not None and found.content == view.content
    assert not stand.store.memory.has_pinned_retired
    stand.check()


def test_a_refused_commit_of_a_span_that_was_taken_back_late_frees_it_after_a_scan(make: Make) -> None:
    stand = make(RING)
    take(stand)
    stand.write(1, 1)
    stand.pass_time(SPAN_S + 1)
    stand.put_span(1, 2, key(1), 65, span=1)
    assert stand.ended(1, 2) == "BadMessage"
    stand.settle()
    stand.check()
    stand.views.clear()
    stand.pass_time(60)
    assert stand.store.memory.ring.used_bytes == 0
    stand.check()


def test_a_client_that_stops_with_a_pinned_span_leaves_the_share_of_taken_spans_to_others(make: Make) -> None:
    stand = make(RING)
    take(stand, 1, 1, RING // 2)
    stand.write(1, 1)
    take(stand, 2, 1)
    assert stand.taken(2, 1) is None
    stand.pass_time(SPAN_S + 1)
    take(stand, 2, 2)
    assert stand.taken(2, 2) is not None
    stand.check()


def test_a_span_that_was_taken_back_late_goes_to_one_commit(make: Make) -> None:
    stand = make(RING)
    take(stand)
    stand.write(1, 1)
    stand.pass_time(SPAN_S + 1)
    for request, number in ((2, 1), (3, 2)):
        stand.put_span(1, request, key(number), span=1)
    stand.settle()
    assert (stand.ended(1, 2), stand.ended(1, 3)) == ("stored", "TimedOut")
    stand.check()


def test_a_span_taken_back_late_is_freed_once_its_client_has_left(make: Make) -> None:
    stand = make(RING)
    take(stand)
    stand.write(1, 1)
    stand.pass_time(SPAN_S + 1)
    stand.leave(1)
    stand.views.clear()
    stand.pass_time(60)
    assert stand.store.memory.ring.used_bytes == 0
    stand.check()


def test_a_returned_span_is_freed_after_a_scan(make: Make) -> None:
    stand = make(RING)
    take(stand)
    stand.send(1, messages.ReturnSpan(1))
    assert stand.scans == 1
    stand.settle()
    assert stand.store.memory.ring.used_bytes == 0
    assert stand.write(1, 1) is None
    stand.check()


def test_returning_a_span_that_is_waited_for_ends_the_wait(make: Make) -> None:
    stand = make(2 * SPAN)
    for number in range(10, 12):
        stand.put(number)
        stand.pin(number)
    stand.take_span(1, 1)
    stand.send(1, messages.ReturnSpan(1))
    stand.settle()
    assert not len(stand.store.intake.puts)
    stand.check()


def test_a_refused_commit_frees_its_span_and_a_stored_key_does_too(make: Make) -> None:
    stand = make(RING, object_bytes_max=100)
    stand.put(1)
    for request, name, size_bytes in ((1, key(1), 64), (2, key(2), 101)):
        take(stand, request=request)
        stand.write(1, request)
        stand.put_span(1, 10 + request, name, size_bytes, span=request)
    stand.views.clear()
    stand.pass_time(1)
    stand.settle()
    assert (stand.ended(1, 11), stand.ended(1, 12)) == ("existed", "BadMessage")
    assert stand.store.memory.ring.used_bytes == SPAN
    stand.check()


def test_a_claim_lasts_until_the_commit_of_its_span_is_answered(make: Make) -> None:
    stand = make(RING)
    stand.send(1, messages.RequestClaim(5, key(1)))
    token = stand.last().token
    take(stand)
    stand.write(1, 1)
    stand.put_span(1, 2, key(1), span=1, claim=token)
    stand.send(2, messages.RequestClaim(6, key(1)))
    assert stand.last(2).answer == "wait"
    stand.settle()
    assert stand.ended(1, 2) == "stored"
    assert stand.last(2).answer == "hit"
    stand.check()


def test_the_first_of_two_writers_of_a_key_is_stored_and_the_other_span_waits_for_a_scan(make: Make) -> None:
    stand = make(RING)
    take(stand, 1, 1)
    take(stand, 2, 2)
    first, second = stand.write(1, 1), stand.write(2, 2)
    assert first is not None
    assert second is not None
    assert first.offset != second.offset
    stand.put_span(2, 12, key(1), span=2)
    stand.put_span(1, 11, key(1), span=1)
    stand.settle()
    assert (stand.ended(2, 12), stand.ended(1, 11)) == ("stored", "existed")
    found = stand.find(key(1))
    assert found is not None
    assert found.content == second.content
    stand.check()


def test_a_payload_that_is_no_tree_is_refused_and_its_span_waits_for_a_scan(make: Make) -> None:
    stand = make(RING)
    take(stand)
    stand.write(1, 1)
    stand.put_span(1, 2, key(1), span=1)
    stand.copy(error=BadTree("no tree"))
    stand.settle()
    assert stand.ended(1, 2) == "BadTree"
    assert stand.store.memory.has_pinned_retired
    stand.check()


def test_a_client_that_may_not_write_the_ring_gets_no_span(make: Make) -> None:
    stand = make(RING)
    stand.join_as(4000, 9)
    take(stand, 9)
    assert error_of(stand, 9, 1) == "BadMessage"
    assert stand.taken(9, 1) is None


def test_a_commit_gets_only_a_span_of_its_own_client(make: Make) -> None:
    stand = make(RING)
    take(stand, 2, 1)
    stand.put_span(1, 2, key(1), span=1)
    stand.settle()
    assert stand.ended(1, 2) == "TimedOut"
    assert stand.write(2, 1) is not None, "the owner has its span still"
    stand.check()


@pytest.mark.parametrize(("payload_bytes", "checksum"), [(65, bytes(8)), (64, None)])
def test_a_commit_that_a_span_cannot_have_is_refused(make: Make, payload_bytes: int, checksum: bytes | None) -> None:
    stand = make(RING)
    take(stand)
    stand.put_span(1, 2, key(1), payload_bytes, span=1, checksum=checksum)
    stand.settle()
    assert stand.ended(1, 2) == "BadMessage"
    stand.check()


def test_a_put_into_a_span_evicts_what_fills_the_slots_of_its_key(make: Make) -> None:
    stand = make(RING, buckets=2)
    for number in range(10, 25):
        assert stand.put(number, client=2) == "stored"
    take(stand)
    view = stand.write(1, 1)
    assert view is not None
    assert stand.put(25, client=2) == "stored", "another one takes a slot meanwhile"
    stand.put_span(1, 2, key(1), span=1)
    stand.settle()
    assert stand.ended(1, 2) == "stored"
    found = stand.find(key(1))
    assert found is not None and found.content == view.content
    stand.check()


def test_a_put_into_a_span_keeps_the_budget_of_tokens(make: Make) -> None:
    stand = make(RING, max_tokens=10)
    stand.put(5, tokens=8, client=2)
    take(stand)
    stand.write(1, 1)
    stand.put_span(1, 2, key(1), span=1, tokens=6)
    stand.settle()
    assert stand.stored() == {1}
    assert stand.store.memory.spans.taken_tokens == 6
    stand.check()


def test_spans_taken_in_advance_have_a_share_of_the_ring(make: Make) -> None:
    stand = make(RING)
    share = RING // TAKEN_SHARE // SPAN
    for request in range(share + 2):
        stand.take_span(1 + request % 2, request, ahead=True)
        stand.settle()
    given = [stand.taken(1 + request % 2, request) is not None for request in range(share + 2)]
    assert given == [True] * share + [False] * 2
    assert error_of(stand, 1 + share % 2, share) == "LimitReached"
    stand.check()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_put_gets_a_span_of_any_size_if_no_other_is_taken(make: Make, ahead: bool) -> None:
    stand = make(RING)
    stand.take_span(1, 1, RING // 2, ahead=ahead)
    stand.settle()
    assert (stand.taken(1, 1) is None) == ahead
    stand.check()


def test_a_client_takes_no_more_spans_than_a_client_may_have(make: Make) -> None:
    stand = make(aligned(SPAN * TAKEN_SHARE * (SPANS_PER_CLIENT_MAX + 4)))
    for request in range(SPANS_PER_CLIENT_MAX + 1):
        stand.take_span(1, request)
    stand.settle()
    assert sum(stand.taken(1, request) is not None for request in range(99)) == SPANS_PER_CLIENT_MAX
    assert error_of(stand, 1, SPANS_PER_CLIENT_MAX) == "LimitReached"
    stand.check()


def test_a_span_that_a_client_does_not_get_counts_as_no_refusal(make: Make) -> None:
    """The client puts through the inbox. Only that put is refused, or none is."""
    stand = make(RING)
    take(stand, request=1, payload_bytes=2 * RING)
    stand.press(refuse=True, reason="a test")
    take(stand, request=2)
    stand.press(refuse=False)
    take(stand, request=3, payload_bytes=RING // 2)
    take(stand, request=4)
    codes = [error_of(stand, 1, request) for request in (1, 2, 4)]
    assert codes == ["ObjectTooLarge", "UnderPressure", "LimitReached"]
    assert dict(stand.store.status()["refusals"]) == {}
    stand.check()


def test_spans_that_wait_for_room_count_as_no_puts_of_their_client(make: Make) -> None:
    stand = make(RING, commits_in_flight_max=1)
    for request in range(4):
        stand.take_span(1, request)
    stand.commit(1, 10, key(1), 64)
    stand.part(1, 10, 64, last=True)
    stand.settle()
    assert stand.ended(1, 10) == "stored"
    stand.check()


def test_the_parent_that_a_span_is_taken_for_stays_until_the_span_is_used(make: Make) -> None:
    stand = make(4 * SPAN)
    for number in range(1, 5):
        stand.put(number)
    stand.take_span(1, 1, parent=key(1))
    stand.settle()
    assert stand.stored() == {1, 3, 4}, "room was made of the oldest other entry"
    for number in range(10, 14):
        assert stand.put(number, client=2) == "stored"
    assert 1 in stand.stored(), "it stays while the span is written"
    stand.write(1, 1)
    stand.put_span(1, 2, key(20), span=1, parent=key(1))
    stand.settle()
    assert stand.ended(1, 2) == "stored"
    stand.check()


def test_the_parent_of_a_returned_span_may_go(make: Make) -> None:
    stand = make(4 * SPAN)
    for number in range(1, 5):
        stand.put(number)
    stand.take_span(1, 1, parent=key(1))
    stand.settle()
    stand.send(1, messages.ReturnSpan(1))
    for number in range(10, 14):
        assert stand.put(number, client=2) == "stored"
    assert 1 not in stand.stored()
    stand.check()


def test_a_span_for_a_child_of_a_parent_that_is_gone_is_given_and_its_commit_is_refused(make: Make) -> None:
    stand = make(4 * SPAN)
    stand.take_span(1, 1, parent=key(9))
    stand.settle()
    stand.write(1, 1)
    stand.put_span(1, 2, key(1), span=1, parent=key(9))
    stand.settle()
    assert stand.ended(1, 2) == "ParentGone"
    stand.check()


def test_a_span_taken_in_advance_costs_its_client_no_last_put(make: Make) -> None:
    stand = make(RING)
    for number in range(64):
        stand.put(number)
        if number < 63:
            stand.pin(number)
    stand.take_span(1, 1, ahead=True)
    stand.settle()
    assert error_of(stand, 1, 1) == "StoreFull"
    assert 63 in stand.stored(), "the next put may continue it"
    stand.take_span(1, 2)
    stand.settle()
    assert stand.taken(1, 2) is not None, "a span for a put with no parent is worth it"
    stand.check()


def test_a_put_in_flight_when_its_client_asks_for_a_span_in_advance_stays_for_its_child(make: Make) -> None:
    stand = make(RING)
    take(stand)
    for number in range(63):
        stand.put(number)
        stand.pin(number)
    stand.put_span(1, 3, key(100), span=1)
    stand.take_span(1, 2, ahead=True)
    stand.settle()
    assert stand.ended(1, 3) == "stored"
    assert error_of(stand, 1, 2) == "StoreFull"
    assert 100 in stand.stored()
    assert not stand.store.memory.sequences.followed
    stand.check()
