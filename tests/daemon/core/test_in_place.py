"""A put that its client writes in place: nobody else gets its span while the client may be writing it."""

from __future__ import annotations

from tensord.errors import BadTree
from tensord.ipc import messages

from .stand import SPAN, Make, Stand, key


def begin(stand: Stand, client: int = 1, request: int = 1, number: int = 1, payload_bytes: int = 64) -> None:
    """A Commit in place, up to Placed."""
    stand.commit(client, request, key(number), payload_bytes, in_place=True, acks=False)
    stand.settle()


def test_a_payload_written_in_place_is_found_once_it_is_filled(make: Make) -> None:
    stand = make()
    begin(stand)
    view = stand.write(1, 1)
    assert view is not None
    assert stand.find(key(1)) is None, "found before it was complete"
    stand.fill(1, 1, checksum=77)
    stand.settle()
    assert stand.ended(1, 1) == "stored"
    found = stand.find(key(1))
    assert found is not None
    assert found.content == view.content
    stand.check()


def test_the_span_of_a_writer_that_left_is_kept_while_it_is_pinned_and_freed_afterwards(make: Make) -> None:
    stand = make(2 * SPAN)
    begin(stand)
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


def test_a_writer_that_was_too_slow_to_pin_its_span_sees_that_it_is_not_its_own(make: Make) -> None:
    stand = make(put_idle_s=5.0)
    begin(stand)
    stand.now += 6.0
    stand.go_on()
    assert stand.ended(1, 1) == "TimedOut"
    assert stand.scans == 1, "freed without a look at the lanes"
    assert stand.write(1, 1) is None, "before the scan"
    stand.settle()
    assert stand.write(1, 1) is None, "after it"
    stand.check()


def test_a_late_fill_changes_nothing(make: Make) -> None:
    stand = make(put_idle_s=5.0)
    begin(stand)
    stand.write(1, 1)
    stand.pass_time(6.0)
    stand.fill(1, 1)
    stand.settle()
    assert stand.find(key(1)) is None
    assert stand.ended(1, 1) == "TimedOut"
    stand.check()


def test_a_put_that_is_given_up_keeps_its_claim_and_its_span_waits_for_a_scan(make: Make) -> None:
    stand = make()
    stand.send(1, messages.RequestClaim(5, key(1)))
    token = stand.last().token
    stand.commit(1, 1, key(1), 64, in_place=True, acks=False, claim=token)
    stand.settle()
    stand.fill(1, 1, None)
    assert stand.scans == 1
    stand.settle()
    stand.commit(1, 2, key(1), 64, claim=token)
    stand.send(2, messages.RequestClaim(6, key(1)))
    assert stand.last(2).answer == "wait", "the claim ended with the span"
    stand.part(1, 2, 64, last=True)
    stand.settle()
    assert stand.ended(1, 2) == "stored"
    assert stand.last(2).answer == "hit"
    stand.check()


def test_the_first_of_two_writers_of_a_key_is_stored_and_the_other_span_waits_for_a_scan(make: Make) -> None:
    stand = make()
    begin(stand, 1, 1)
    begin(stand, 2, 2)
    first, second = stand.write(1, 1), stand.write(2, 2)
    assert first is not None
    assert second is not None
    assert first.offset != second.offset
    stand.fill(2, 2)
    stand.settle()
    stand.fill(1, 1)
    stand.settle()
    assert (stand.ended(2, 2), stand.ended(1, 1)) == ("stored", "existed")
    found = stand.find(key(1))
    assert found is not None
    assert found.content == second.content
    stand.check()


def test_a_payload_that_is_no_tree_is_refused_and_its_span_waits_for_a_scan(make: Make) -> None:
    stand = make()
    begin(stand)
    stand.write(1, 1)
    stand.fill(1, 1)
    stand.copy(error=BadTree("no tree"))
    stand.settle()
    assert stand.ended(1, 1) == "BadTree"
    assert stand.store.memory.has_pinned_retired
    stand.check()


def test_a_client_that_may_not_write_the_ring_is_refused(make: Make) -> None:
    stand = make()
    stand.join_as(4000, 9)
    begin(stand, 9)
    assert stand.ended(9, 1) == "BadMessage"
    assert not stand.placed(9, 1)


def test_a_fill_before_its_span_is_known_is_refused(make: Make) -> None:
    stand = make(2 * SPAN)
    for number in range(10, 12):
        stand.put(number)
        stand.pin(number)
    stand.commit(1, 1, key(1), 64, in_place=True, acks=False)
    stand.fill(1, 1)
    stand.settle()
    assert stand.ended(1, 1) in ("BadMessage", "StoreFull")
    stand.check()


def test_a_client_has_no_more_bytes_placed_than_it_may_announce(make: Make) -> None:
    stand = make(100 * SPAN, announced_bytes_max=128, announced_uid_bytes_max=128)
    for request in range(1, 6):
        begin(stand, 1, request, request)
    assert [stand.placed(1, request) for request in range(1, 6)] == [True, True, False, False, False]
    stand.write(1, 1)
    stand.fill(1, 1)
    stand.settle()
    assert stand.placed(1, 3), "the next one's turn came with the first one's bytes"
    stand.check()
