"""A put takes room when its bytes come, waits its turn among the clients, and announces no more than it may."""

from __future__ import annotations

from tensord.daemon.core.arrivals import HOLD_S
from tensord.daemon.core.events import Tick
from tensord.ipc import messages

from .stand import SPAN, Make, Stand, key


def announce(stand: Stand, client: int, numbers: range, payload_bytes: int = 64) -> None:
    """Commits without their bytes."""
    for number in numbers:
        stand.commit(client, number, key(number), payload_bytes)
    stand.settle()


def test_commits_without_bytes_cost_nobody_an_entry(make: Make) -> None:
    stand = make(50 * SPAN)
    for number in range(50):
        assert stand.put(number) == "stored"
    announce(stand, 2, range(100, 164))
    assert stand.stored() == set(range(50)), "48 of 50 went for what was only announced"
    assert stand.scans == stand.store.status()["scans"] == 0
    # And they keep nobody else from storing, who needs one entry's room.
    assert stand.put(50) == "stored"
    assert stand.store.status()["puts_announced"] == 64


def test_a_commit_gets_its_room_with_its_first_bytes(make: Make) -> None:
    stand = make(2 * SPAN)
    for number in range(2):
        stand.put(number)
    stand.commit(1, 1, key(9), 64)
    assert stand.scans == 0
    stand.part(1, 1, 32, last=False)
    assert stand.scans == 1, "room is looked for while the rest is on its way"
    stand.part(1, 1, 32, last=True)
    stand.settle()
    assert stand.ended(1, 1) == "stored"


def test_a_commit_whose_bytes_never_come_is_refused_after_put_idle_s(make: Make) -> None:
    stand = make(put_idle_s=5.0)
    stand.commit(1, 1, key(1), 64)
    stand.pass_time(6.0)
    assert stand.ended(1, 1) == "TimedOut"
    assert stand.store.status()["puts_announced"] == 0


def test_puts_that_wait_for_room_are_served_client_by_client(make: Make) -> None:
    stand = make(4 * SPAN)
    for number in range(4):
        stand.put(number)
    for number in range(100, 120):
        stand.commit(1, number, key(number), 64)
        stand.part(1, number, 64, last=True)
    stand.commit(2, 1, key(200), 64)
    stand.part(2, 1, 64, last=True)
    while not stand.ended(2, 1):
        stand.scan() if stand.scans else stand.copy()
    flood = [stand.ended(1, number) for number in range(100, 120)]
    # It waits for the put at the head, and for what one scan gave room to, not for the backlog.
    assert stand.ended(2, 1) == "stored"
    assert flood.count("stored") < 10
    stand.settle()
    assert [stand.ended(1, number) for number in range(100, 120)] == ["stored"] * 20


def test_a_client_that_sends_the_first_byte_of_many_puts_takes_room_for_no_more_than_it_may_announce(
    make: Make,
) -> None:
    stand = make(64 * 1024, announced_bytes_max=4096, announced_uid_bytes_max=8192)
    for number in range(63):
        stand.put(number, 832)
    for number in range(100, 120):
        stand.commit(2, number, key(number), 2001)
        stand.part(2, number, 1, last=False)
    stand.settle()
    # Two of 2,000 bytes that have not come, each with a header in room of 2,240.
    assert len(stand.stored()) >= 63 - 6
    assert stand.store.status()["announced_bytes"] == 4000
    # Another client's put waits for none of them.
    assert stand.put(50, 832, client=1) in ("stored", "existed")
    # Each that comes lets the next one in.
    stand.part(2, 100, 2000, last=True)
    stand.settle()
    assert stand.ended(2, 100) == "stored"
    assert stand.store.status()["announced_bytes"] == 4000


def test_a_put_is_admitted_while_its_client_waits_for_a_span(make: Make) -> None:
    stand = make(64 * SPAN, announced_bytes_max=100, announced_uid_bytes_max=100)
    for number in range(64):
        stand.put(number)
    stand.take_span(1, 1, 3000)
    assert stand.scans == 1 and stand.taken(1, 1) is None, "the span waits for room"
    stand.begin(1, 2, key(100), 3000)
    assert stand.store.status()["announced_bytes"] == 2999
    stand.now += 2 * HOLD_S
    stand.do(Tick())
    stand.settle()
    stand.part(1, 2, 2999, last=True)
    stand.settle()
    assert stand.ended(1, 2) == "stored"
    stand.check()


def test_a_client_with_announced_bytes_gets_a_span_at_once(make: Make) -> None:
    stand = make(64 * SPAN, announced_bytes_max=100, announced_uid_bytes_max=100)
    stand.begin(1, 1, key(1), 200)
    stand.take_span(1, 2)
    stand.settle()
    assert stand.taken(1, 2) is not None
    stand.check()


def test_a_put_too_large_to_be_announced_beside_others_gets_in_alone(make: Make) -> None:
    stand = make(announced_bytes_max=100, announced_uid_bytes_max=100)
    for number in (1, 2):
        stand.commit(1, number, key(number), 1000)
        stand.part(1, number, 1, last=False)
    stand.copy()
    assert stand.store.status()["announced_bytes"] == 999
    stand.part(1, 1, 999, last=True)
    stand.part(1, 2, 999, last=True)
    stand.settle()
    assert stand.stored() == {1, 2}


def test_a_put_that_waits_to_be_announced_while_nothing_comes_is_refused(make: Make) -> None:
    stand = make(announced_bytes_max=100, announced_uid_bytes_max=100)
    for number in (1, 2):
        stand.commit(1, number, key(number), 1000)
        stand.part(1, number, 1, last=False)
    stand.settle()
    stand.pass_time(2.0)
    assert stand.ended(1, 2) == "LimitReached"
    refused = stand.outcome(1, 2)
    assert refused is not None and refused.error is not None
    assert "quotas.announced_bytes_max is 100" in refused.error.text and "uid 1001" in refused.error.text
    assert stand.last(1) == messages.Committed(2, "refused", refused.error)
    assert messages.PartCopied(2, 0) in stand.answers[1], "its part of the inbox is free"
    # The one that has its room goes on.
    stand.part(1, 1, 999, last=True)
    stand.settle()
    assert stand.stored() == {1}


def test_a_client_that_leaves_makes_room_for_what_others_of_its_uid_announce(make: Make) -> None:
    stand = make(announced_bytes_max=1000, announced_uid_bytes_max=1000)
    stand.join_as(7, 77, 78)
    for client in (77, 78):
        stand.commit(client, 1, key(client), 901)
        stand.part(client, 1, 1, last=False)
    stand.settle()
    assert stand.store.status()["announced_bytes"] == 900
    stand.leave(77)
    stand.settle()
    assert stand.store.status()["announced_bytes"] == 900
    stand.part(78, 1, 900, last=True)
    stand.settle()
    assert stand.ended(78, 1) == "stored"
