"""The way of a put: what its client may rely on at every point, and whoever comes after it."""

from __future__ import annotations

from tensord.daemon.core.effects import Copy
from tensord.daemon.core.events import Tick
from tensord.daemon.core.intake import SERVED_MAX
from tensord.errors import BadTree
from tensord.ipc import messages
from tensord.shm.layout import SPAN_HEADER_BYTES

from .stand import SPAN, Make, key


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


def test_a_commit_of_a_whole_payload_is_answered_once_and_needs_no_part(make: Make) -> None:
    stand = make()
    stand.commit(1, 1, key(1), 200, at=64)
    (copy,) = stand.copies
    assert isinstance(copy, Copy)
    assert (copy.inbox_offset, copy.part_bytes, copy.last) == (64, 200, True)
    stand.settle()
    assert stand.stored() == {1}
    stand.commit(1, 2, key(1), 200, at=64)
    assert stand.answers[1] == [messages.Committed(1, "stored"), messages.Committed(2, "existed")]


def test_a_whole_payload_is_stored_although_its_sender_leaves(make: Make) -> None:
    stand = make()
    stand.commit(1, 1, key(1), 200, at=0)
    stand.leave(1)
    stand.settle()
    assert stand.stored() == {1}


def test_a_payload_is_in_the_inbox_or_in_a_span(make: Make) -> None:
    stand = make()
    stand.take_span(1, 1)
    assert stand.write(1, 1) is not None
    stand.put_span(1, 2, key(1), span=1, at=0)
    answer = stand.answers[1][-1]
    assert isinstance(answer, messages.Committed) and answer.error is not None
    assert (answer.outcome, answer.error.code) == ("refused", "BadMessage")
    assert stand.stored() == set()
    stand.check()


def test_the_span_header_says_what_the_entry_is(make: Make) -> None:
    stand = make()
    stand.now = 5.0
    assert stand.put(1, 200, client=2, tokens=9, ttl_s=60.0, tree=32) == "stored"
    (header,) = stand.headers.values()
    assert (header.key, header.payload_bytes, header.tree_bytes) == (key(1), 200, 32)
    assert (header.tokens, header.owner_uid) == (9, 1002)
    assert header.created_s == 5
    assert (header.expires_s, header.ttl_s) == (65, 60)


def test_a_key_that_exists_is_not_stored_again(make: Make) -> None:
    stand = make()
    assert stand.put(1) == "stored"
    before = stand.find(key(1))
    assert stand.put(1, client=2) == "existed"
    assert stand.find(key(1)) == before
    assert isinstance(stand.answers[2][0], messages.Committed), "told before its part came"


def test_putting_what_exists_counts_as_a_use(make: Make) -> None:
    stand = make(2 * SPAN)
    for number in (1, 2, 1, 3):
        stand.put(number)
    assert stand.stored() == {1, 3}


def test_the_first_complete_put_of_a_key_wins(make: Make) -> None:
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
    assert stand.ended(1, 1) == "existed"
    assert stand.ended(2, 1) == "stored"
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


def test_a_wholly_sent_put_that_waits_for_room_is_carried_out_though_its_sender_leaves(make: Make) -> None:
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
    for _ in range(2):
        stand.part(1, 1, 50, last=False)
    stand.leave(1)
    for _ in range(2):
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


def test_parts_that_waited_for_room_are_acknowledged_when_there_is_none(make: Make) -> None:
    stand = make(SPAN)
    stand.put(1)
    stand.pin(1)
    before = len(stand.answers[1])
    stand.commit(1, 1, key(2), 64)
    stand.part(1, 1, 32, last=False)
    stand.part(1, 1, 32, last=True)
    stand.settle()
    assert stand.ended(1, 1) == "StoreFull"
    assert [type(answer) for answer in stand.answers[1][before:]].count(messages.PartCopied) == 2


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


def test_the_copier_gets_a_discard_for_a_put_that_ends_between_its_parts(make: Make) -> None:
    stand = make()
    stand.commit(1, 1, key(1), 300)
    stand.part(1, 1, 128, last=False)
    stand.copy()
    assert len(stand.half_copied) == 1
    stand.leave(1)
    assert stand.half_copied == set()


def test_without_acks_a_sender_gets_only_the_outcome_of_its_put(make: Make) -> None:
    stand = make()
    stand.send(1, messages.Commit(1, key(1), 200, 20, acks=False))
    stand.part(1, 1, 128, last=False)
    stand.part(1, 1, 72, last=True)
    stand.copy()
    stand.copy()
    assert [type(answer) for answer in stand.answers[1]] == [messages.Committed]


def test_puts_that_waited_for_room_are_placed_some_at_a_time_in_their_order(make: Make) -> None:
    wide = 300 * SPAN - SPAN_HEADER_BYTES
    stand = make(400 * SPAN)
    assert stand.put(0, wide) == "stored"
    stand.commit(1, 1, key(1), wide)
    stand.part(1, 1, wide, last=True)
    for number in range(2, 92):
        stand.commit(2, number, key(number), 64)
        stand.part(2, number, 64, last=True)
    assert not stand.copies, "they wait behind the large one"
    stand.scan()
    assert 1 < len(stand.copies) <= SERVED_MAX
    stand.go_on()
    assert [copy.put_id for copy in stand.copies] == sorted(copy.put_id for copy in stand.copies)
    stand.settle()
    assert stand.stored() == set(range(1, 92))


def test_puts_that_cannot_fit_are_refused_one_search_at_a_time(make: Make) -> None:
    stand = make(8 * SPAN)
    for number in range(8):
        stand.put(number)
        stand.pin(number)
    for number in range(10, 20):
        stand.commit(2, number, key(number), 64)
        stand.part(2, number, 64, last=True)
    stand.scan()

    def refused() -> int:
        return sum(isinstance(answer, messages.Committed) for answer in stand.answers[2])

    assert refused() <= 1
    before = refused()
    stand.do(Tick())
    assert refused() <= before + 1
    stand.settle()
    assert all(stand.ended(2, number) == "StoreFull" for number in range(10, 20))
    assert stand.stored() == set(range(8))
