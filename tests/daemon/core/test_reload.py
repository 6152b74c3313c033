"""What a configuration that is read again changes, and what it leaves."""

from __future__ import annotations

from dataclasses import replace

from tensord.daemon.forms.events import LimitsChanged
from tensord.ipc.messages import control as messages

from .stand import SPAN, Make, key


def test_lowered_budgets_are_reached_without_another_put(make: Make) -> None:
    stand = make()
    for number in range(8):
        stand.put(number, tokens=2)
    stand.do(LimitsChanged(replace(stand.limits, max_entries=6, max_tokens=8)))
    stand.pass_time(1)
    assert stand.stored() == {4, 5, 6, 7}
    assert stand.put(9, tokens=9) == "LimitReached"


def test_a_lowered_budget_of_entries_is_reached_once_their_pins_have_ended(make: Make) -> None:
    stand = make()
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


def test_a_budget_set_by_message_outlives_a_reload_that_does_not_name_another(make: Make) -> None:
    stand = make()
    stand.send(1, messages.Limit(1, 4 * SPAN))
    stand.do(LimitsChanged(stand.limits))
    assert stand.store.status()["max_bytes"] == 4 * SPAN
    stand.do(LimitsChanged(replace(stand.limits, max_bytes=5 * SPAN)))
    assert stand.store.status()["max_bytes"] == 5 * SPAN


def test_objects_over_a_lowered_limit_stay_and_no_more_are_accepted(make: Make) -> None:
    stand = make()
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


def test_new_times_hold_for_what_comes_after(make: Make) -> None:
    stand = make()
    stand.put(1)
    stand.do(LimitsChanged(replace(stand.limits, default_ttl_s=5.0, claim_s=2.0)))
    stand.put(2)
    stand.send(1, messages.RequestClaim(1, key(9)))
    stand.send(2, messages.RequestClaim(1, key(9)))
    stand.pass_time(2.5)
    assert stand.last(2).answer == "compute"
    stand.pass_time(3)
    assert stand.stored() == {1}
