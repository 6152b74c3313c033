"""A store that cannot be reached when the daemon starts, and one that nobody asks."""

from __future__ import annotations

from tensord.daemon.core.effects import AskGenerations
from tensord.daemon.remote.breaker import FAILURES_MAX, FIRST_S, LONGEST_S
from tensord.errors import TierUnavailable

from .stand import REMOTE, Make, RemoteStand, ask, fail

AWAY = TierUnavailable("connection refused")


def probed(stand: RemoteStand, error: TierUnavailable | None) -> None:
    """Time passes until the store is probed, and the store answers."""
    due = stand.next_timer()
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
    assert stand.next_timer() != stand.now, "it is not asked without end"


def test_a_store_that_was_reached_before_serves_again(make: Make) -> None:
    stand = make(**REMOTE)
    assert not stand.turned["store"]
    for number in range(FAILURES_MAX):
        fail(stand, number, AWAY)
    probed(stand, None)
    assert stand.turned["store"] == ["connection refused", ""]
