"""When a failing store is left alone, and what waits for it."""

from __future__ import annotations

from tensord.daemon.remote.breaker import FAILURES_MAX, FIRST_S, LONGEST_S
from tensord.errors import TierFull, TierRefused, TierUnavailable
from tensord.ipc.messages import control as messages

from ..core.stand import key
from .stand import REMOTE, Make, ask, fail, publish


def test_a_store_that_fails_is_left_alone_until_a_probe_is_answered(make: Make) -> None:
    stand = make(**REMOTE)
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


def test_a_refusal_opens_the_breaker_at_once(make: Make) -> None:
    stand = make(**REMOTE)
    fail(stand, 1, TierRefused("wrong password"))
    assert stand.turned["store"] == ["wrong password"]


def test_a_failure_now_and_then_does_not_open_the_breaker(make: Make) -> None:
    stand = make(**REMOTE)
    for number in range(0, 20, 2):
        fail(stand, number)
        ask(stand, number=number + 1)
        stand.seek()
    assert not stand.turned["store"]


def test_failed_writes_open_the_breaker(make: Make) -> None:
    stand = make(8192, **REMOTE)
    publish(stand, FAILURES_MAX + 2)
    for _ in range(FAILURES_MAX):
        stand.write_remote(error=TierUnavailable("connection refused"))
    assert stand.turned["store"] == ["connection refused"]
    while stand.writes:
        stand.write_remote(error=TierUnavailable("connection refused"))
    stand.put(50, cost_ms=9.0)
    assert not stand.remote
    stand.pass_time(FIRST_S + 0.01)
    assert stand.turned["store"][-1] == ""
    stand.put(51, cost_ms=9.0)
    assert set(stand.remote) == {key(51)}


def test_a_full_store_goes_on_serving_reads(make: Make) -> None:
    stand = make(8192, **REMOTE)
    for number in range(FAILURES_MAX + 1):
        stand.put(key(number), 64, client=1, cost_ms=9.0, settles=False)
        stand.write_remote(error=TierFull("maxmemory"))
        stand.now += LONGEST_S
    assert not stand.turned["store"]
    assert stand.counted == {"write_failed": FAILURES_MAX + 1}
    assert ask(stand, number=70).answer == "wait"


def test_a_removal_outlives_a_time_in_which_the_store_fails(make: Make) -> None:
    stand = make(**REMOTE)
    stand.put(1, cost_ms=9.0)
    for number in range(10, 10 + FAILURES_MAX):
        fail(stand, number)
    stand.send(1, messages.Evict(3, [key(1)]))
    stand.settle()
    assert key(1) in stand.remote
    stand.pass_time(FIRST_S + 0.01)
    assert key(1) not in stand.remote
