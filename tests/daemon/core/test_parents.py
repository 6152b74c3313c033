"""Puts whose parents are in flight: a child waits for its parent, and nothing else waits for the child."""

from __future__ import annotations

import pytest

from tensord.daemon.core.host_memory import Pressed
from tensord.shm.layout import SPAN_HEADER_BYTES

from .stand import SPAN
from .test_chains import begin, put_chain, stand_of, whole


def test_a_child_whose_payload_is_complete_first_waits_for_its_parent() -> None:
    stand = stand_of(10)
    for number in (1, 2, 3):
        begin(stand, number, number, parent=number - 1 or None, client=1 + number % 2)
    for number in (3, 2):
        stand.part(1 + number % 2, number, 64, last=True)
    stand.settle()
    assert not stand.stored(), "their parent is still in flight"
    stand.part(2, 1, 64, last=True)
    stand.settle()
    assert stand.stored() == {1, 2, 3}
    whole(stand, (1, 2, 3))


@pytest.mark.parametrize("end", ["refused", "left", "overdue"])
def test_puts_that_wait_for_a_parent_that_does_not_come_are_refused(end: str) -> None:
    stand = stand_of(10, put_idle_s=30.0)
    begin(stand, 1, 1, client=1)
    for number in (2, 3):
        begin(stand, number, number, parent=number - 1)
        stand.part(2, number, 64, last=True)
    stand.settle()
    assert stand.ended(2, 2) == stand.ended(2, 3) == ""
    if end == "refused":
        stand.part(1, 1, 65, last=True)
    elif end == "left":
        stand.leave(1)
    else:
        stand.pass_time(31.0)
    stand.settle()
    assert stand.ended(2, 2) == stand.ended(2, 3) == "ParentGone"
    assert stand.store.memory.ring.used_bytes == 0
    stand.check()


def test_a_long_chain_that_waited_is_published_in_bounded_steps() -> None:
    stand = stand_of(300, commits_in_flight_max=300)
    begin(stand, 1, 1, client=1)
    for number in range(2, 200):
        begin(stand, number, number, parent=number - 1)
        stand.part(2, number, 64, last=True)
    stand.settle()
    stand.part(1, 1, 64, last=True)
    stand.copy()
    assert 0 < len(stand.stored()) < 199
    assert stand.store.next_timer() == stand.now
    stand.settle()
    assert len(stand.stored()) == 199
    stand.check()


def test_a_put_that_waits_for_its_parent_keeps_no_other_put_waiting() -> None:
    stand = stand_of(4)
    begin(stand, 1, 1, client=1)
    begin(stand, 2, 2, parent=1)
    stand.part(2, 2, 64, last=True)
    stand.settle()
    assert stand.put(9, 3 * SPAN - SPAN_HEADER_BYTES) == "stored"
    assert stand.put(10, 4 * SPAN - SPAN_HEADER_BYTES) == "StoreFull"
    stand.part(1, 1, 64, last=True)
    stand.settle()
    assert (stand.ended(1, 1), stand.ended(2, 2)) == ("stored", "stored")
    stand.check()


def test_two_puts_never_wait_for_each_other() -> None:
    """Key 1 is put twice: first without a parent, and refused; the second put names a child of the first."""
    stand = stand_of(10)
    begin(stand, 1, 1)
    begin(stand, 2, 2, parent=1)
    begin(stand, 3, 1, parent=2)
    for request in (2, 3):
        stand.part(2, request, 64, last=True)
    stand.part(2, 1, 65, last=True)
    stand.settle()
    assert [stand.ended(2, request) for request in (1, 2, 3)] == ["BadMessage", "ParentGone", "ParentGone"]
    assert stand.store.memory.ring.used_bytes == 0
    stand.check()


def test_a_child_that_is_published_saves_a_parent_that_was_about_to_be_evicted() -> None:
    stand = stand_of(10)
    put_chain(stand, 1, 2)
    stand.now = 100.0
    stand.do(Pressed(None, 10.0))
    stand.go_on()
    assert stand.scans == 1
    assert not stand.stored(), "both are idle, and were chosen"
    begin(stand, 4, 3, parent=2)
    stand.part(2, 4, 64, last=True)
    stand.copy()
    assert stand.ended(2, 4) == "stored"
    assert stand.stored() == {1, 2, 3}
    stand.check()
    stand.scan()
    stand.settle()
    whole(stand, (1, 2, 3))
    assert stand.stored() == {1, 2, 3}
