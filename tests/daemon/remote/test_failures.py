"""When a failing store is left alone, and a store that cannot be reached when the daemon starts."""

from __future__ import annotations

import pytest

from tensord.daemon.forms.effects import AskGenerations
from tensord.daemon.remote.link import FAILURES_MAX, FIRST_S, LONGEST_S
from tensord.errors import TierRefused, TierUnavailable

from ..core.stand import key
from .stand import FOUND, REMOTE, Make, RemoteStand, ask, fail, verdicts


def test_a_store_that_fails_is_left_alone_until_a_probe_is_answered(stand: RemoteStand) -> None:
    for number in range(FAILURES_MAX):
        assert not stand.turned["store"]
        fail(stand, number)
    assert stand.turned["store"] == ["connection refused"]
    assert stand.state()["why"] == "connection refused"
    assert ask(stand, number=20).answer == "compute"
    assert not stand.seeks
    stand.pass_time(FIRST_S + 0.01)
    assert stand.turned["store"] == ["connection refused", ""], "one line when it fails, one when it is back"
    assert ask(stand, number=21).answer == "wait"


@pytest.mark.parametrize("when", ["sought", "read"])
def test_a_refusal_opens_the_breaker_at_once(stand: RemoteStand, when: str) -> None:
    refused = TierRefused("wrong password")
    if when == "sought":
        fail(stand, 1, refused)
    else:
        stand.remote[key(1)] = FOUND
        ask(stand)
        stand.seek()
        stand.go_on()
        stand.read_remote(error=refused)
        assert verdicts(stand) == ["wait", "compute"]
    assert stand.turned["store"] == ["wrong password"]


def test_a_failure_now_and_then_does_not_open_the_breaker(stand: RemoteStand) -> None:
    for number in range(0, 20, 2):
        fail(stand, number)
        ask(stand, number=number + 1)
        stand.seek()
    assert not stand.turned["store"]


AWAY = TierUnavailable("connection refused")


def probed(stand: RemoteStand, error: TierUnavailable | None) -> None:
    """Time passes until the store is probed, and the store answers."""
    due = stand.store.next_timer()
    assert due is not None
    stand.now = max(stand.now, due)
    stand.go_on()
    assert [type(each) for each in stand.generation_requests] == [AskGenerations]
    stand.answer_generations(error)


def test_a_store_that_is_not_reached_at_the_start_is_left_alone_from_the_first_miss(make: Make) -> None:
    stand = make(reached=False, **REMOTE)
    probed(stand, AWAY)
    assert stand.turned["store"] == ["connection refused"]
    assert ask(stand).answer == "compute" and not stand.seeks


def test_a_store_is_probed_without_any_client(make: Make) -> None:
    stand = make(reached=False, **REMOTE)
    probed(stand, AWAY)
    waits_s = FIRST_S
    for _ in range(10):
        before = stand.now
        probed(stand, AWAY)
        assert stand.now - before >= waits_s * 0.99
        waits_s = min(2 * waits_s, LONGEST_S)
    assert stand.turned["store"] == ["connection refused"]
    probed(stand, None)
    assert stand.turned["store"] == ["connection refused", "reached for the first time"]
    assert ask(stand).answer == "wait"
    assert stand.store.next_timer() != stand.now, "it is not asked without end"
