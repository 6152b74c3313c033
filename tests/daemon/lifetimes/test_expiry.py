"""How entries end: by name, by time, with their namespace; and what a pin by message holds."""

from __future__ import annotations

import pytest

from tensord.errors import LimitReached
from tensord.ipc.messages import control as messages

from ..store.rows import TAG, key_of
from .stand import SPAN, LifetimesStand

OTHER = b"other ns"


def test_entries_expire_and_touch_renews_them() -> None:
    stand = LifetimesStand()
    for number, ttl in ((1, 10.0), (2, 10.0), (3, 0.0), (4, 5.0)):
        stand.put(number, ttl=ttl)
    stand.read(2)
    stand.pass_time(9)
    assert stand.stored() == {1, 2, 3}
    stand.uses.touched([stand.row(1)], stand.now)
    expires = stand.rows.header(stand.row(1)).expires_s
    assert expires == pytest.approx(20.0), "clients and the next daemon know it too"
    stand.pass_time(2)
    assert stand.stored() == {1, 3}, "a get renews nothing"
    stand.pass_time(9)
    assert stand.stored() == {3}
    assert stand.status()["evictions"] == {"ttl": 3}
    assert stand.lifetimes.next_timer() is None
    stand.check()


def test_many_entries_expire_in_slices_and_none_is_forgotten() -> None:
    stand = LifetimesStand(1 << 20)
    for number in range(600):
        stand.put(number, ttl=5.0 + number % 7)
    stand.now = 9.0
    stand.tick()
    assert len(stand.stored()) == 600 - 128
    stand.pass_time(0.01)
    assert stand.stored() == {number for number in range(600) if number % 7 > 3}
    stand.pass_time(10)
    assert stand.stored() == set()


def test_a_victim_that_has_expired_ends_as_expired() -> None:
    stand = LifetimesStand()
    stand.put(1, ttl=5.0)
    stand.rows.spans.hide(stand.rows.policy.victims(1), "capacity")
    stand.pass_time(6)
    stand.rows.scan()
    assert stand.status()["evictions"] == {"ttl": 1}
    stand.check()


# ---- pins by message


def test_a_pin_ends_by_request_or_with_its_client_and_then_the_entry_may_go() -> None:
    for ends in ("request", "client", "time"):
        stand = LifetimesStand(SPAN)
        stand.put(1)
        stand.pin(2, 1, 9.0)
        stand.pin(3, 1, 5.0)
        stand.lifetimes.pins.unpin(3, stand.row(1))
        assert not stand.put(2)
        if ends == "request":
            stand.lifetimes.pins.unpin(2, stand.row(1))
        elif ends == "client":
            stand.lifetimes.pins.client_left(2)
        else:
            stand.pass_time(10)
        assert stand.put(3), ends
        stand.check()


def test_pins_are_limited_for_a_client_and_in_bytes() -> None:
    stand = LifetimesStand(pinned_bytes_max=5 * SPAN)
    for number in range(6):
        stand.put(number)
    for number in range(4):
        stand.pin(1, number, 10.0)
    stand.pin(1, 0, 20.0)
    with pytest.raises(LimitReached, match="may have 4"):
        stand.pin(1, 4, 10.0)
    stand.pin(2, 0, 10.0)
    stand.pin(2, 4, 10.0)
    with pytest.raises(LimitReached, match="all that may be pinned"):
        stand.pin(2, 5, 10.0)
    assert (stand.status()["pins"], stand.status()["pinned_bytes"]) == (6, 5 * SPAN)


# ---- parents and children


def family(stand: LifetimesStand, ttl: float = 0.0) -> None:
    """1 has the children 2 and 3, and 2 has the child 4."""
    for number, parent in ((1, None), (2, 1), (3, 1), (4, 2)):
        stand.put(number, parent=parent, ttl=ttl)


def test_an_expired_parent_stays_until_its_last_child_has_ended() -> None:
    stand = LifetimesStand()
    stand.put(1, ttl=5.0)
    stand.put(2, parent=1)
    stand.pass_time(20)
    assert stand.stored() == {1, 2}
    stand.end(2)
    stand.pass_time(0.01)
    assert stand.stored() == set()
    family(stand, ttl=5.0)
    stand.pass_time(5.1)
    assert stand.stored() == set(), "the last ones first"
    stand.check()


# ---- sweeps


def test_clear_ends_one_namespace_or_all_in_slices_and_nothing_later() -> None:
    stand = LifetimesStand(1 << 20)
    for number in range(700):
        stand.put(key_of(number, OTHER if number % 2 else TAG))
    stand.clear(9, TAG)
    assert not stand.answers[1], "more than one slice"
    assert stand.status()["entries"] == 700 - 256
    late = stand.put(5000)
    assert stand.lifetimes.postponed
    stand.settle()
    assert stand.answers[1] == [messages.Counted(9, 350)]
    assert stand.row(5000) == late, "what comes after the request stays"
    stand.clear(10)
    stand.settle()
    assert stand.answers[1][-1] == messages.Counted(10, 351)
    stand.rows.scan()
    assert stand.status()["entries"] == 0
    assert [event["event"] for event in stand.told if event["event"] != "put"] == ["clear", "clear"]
    stand.check()


def test_a_sweep_leaves_what_its_rows_have_become_meanwhile() -> None:
    stand = LifetimesStand(400 * SPAN)
    for number in range(400):
        stand.put(number)
    stand.clear(1, TAG)
    row = stand.row(399)
    stand.end(399)
    stand.rows.scan()
    stand.rows.scan()
    assert stand.stored(), "the sweep goes on"
    # Another namespace has the row now, with a header that says an earlier time.
    stand.now = 0.5
    assert stand.put(key_of(400, OTHER)) == row
    stand.now = 2.0
    stand.settle()
    assert stand.answers[1] == [messages.Counted(1, 399)]


def test_what_was_found_expired_and_is_renewed_before_its_turn_stays() -> None:
    stand = LifetimesStand(400 * SPAN)
    for number in range(300):
        stand.put(number, ttl=5.0)
    stand.now = 7.0
    stand.tick()
    left = sorted(stand.stored())
    assert len(left) == 300 - 128
    renewed, ended = left[-1], left[-2]
    stand.uses.touched([stand.row(renewed)], stand.now)
    stand.end(ended)
    stand.pass_time(0.01)
    assert stand.stored() == {renewed}
    stand.check()
