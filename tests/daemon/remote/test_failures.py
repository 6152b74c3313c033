"""When a failing store is left alone, a store that cannot be reached when the daemon starts, and one that takes no
writes: reads go on, and writes are tried from time to time."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.daemon.forms.effects import AskGenerations, RemoveRemote
from tensord.daemon.remote.link import FAILURES_MAX, FIRST_S, LONGEST_S
from tensord.errors import TierFull, TierReadOnly, TierRefused, TierTooLarge, TierUnavailable
from tensord.ipc.messages import control as messages

from ..core.stand import key
from .stand import FOUND, REMOTE, RemoteStand, ask, fail, publish, verdicts


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


def test_a_store_that_is_not_reached_at_the_start_is_left_alone_at_once_and_probed_without_any_client() -> None:
    stand = RemoteStand(reached=False, **REMOTE)
    probed(stand, AWAY)
    assert stand.turned["store"] == ["connection refused"]
    assert ask(stand).answer == "compute" and not stand.seeks
    stand.send(1, messages.Abandon(stand.last().token))
    waits_s = FIRST_S
    for _ in range(10):
        before = stand.now
        probed(stand, AWAY)
        assert stand.now - before >= waits_s * 0.99
        waits_s = min(2 * waits_s, LONGEST_S)
    assert stand.turned["store"] == ["connection refused"]
    probed(stand, None)
    assert stand.turned["store"] == ["connection refused", ""]
    assert ask(stand).answer == "wait"
    assert stand.store.next_timer() != stand.now, "it is not asked without end"


FULL, READ_ONLY = TierFull("maxmemory"), TierReadOnly("a replica")


def state(stand: RemoteStand) -> tuple[bool, bool, str]:
    """(full, read-only, why) as the status has it."""
    about: dict[str, Any] = stand.state()
    assert about["serves"]
    return about["full"], about["read_only"], about["refuses_writes"]


def offer(stand: RemoteStand, number: int) -> None:
    """Publishes an entry that is worth its write."""
    stand.put(key(number), 64, client=1, cost_ms=9.0, settles=False)


@pytest.mark.parametrize("error", [FULL, READ_ONLY])
def test_a_store_that_takes_no_writes_is_read_and_says_so_once(stand: RemoteStand, error: Any) -> None:
    offer(stand, 0)
    stand.write_remote(error=error)
    assert stand.turned["writes"] == [str(error)] and not stand.turned["store"]
    assert state(stand) == (error is FULL, error is READ_ONLY, str(error))
    for number in range(1, 5):
        offer(stand, number)
    assert not stand.writes and stand.counted["dropped"] == 4, "what is put meanwhile is dropped and counted"
    stand.remote[key(70)] = FOUND
    assert ask(stand, number=70).answer == "wait"
    assert not stand.seeks[0].claims_s, "it would not take the claim either"
    stand.settle()
    assert verdicts(stand)[-1] == "hit" and not stand.counted["failed"]


@pytest.mark.parametrize("error", [FULL, READ_ONLY])
def test_writes_are_tried_again_from_time_to_time_and_one_that_succeeds_ends_it(stand: RemoteStand, error: Any) -> None:
    offer(stand, 0)
    stand.write_remote(error=error)
    waits_s = FIRST_S
    for number in range(1, 12):
        stand.now += waits_s * 0.99
        offer(stand, 2 * number)
        assert not stand.writes, f"after {waits_s} s, too early"
        stand.now += waits_s * 0.02
        offer(stand, 2 * number + 1)
        stand.write_remote(error=error)
        waits_s = min(2 * waits_s, LONGEST_S)
    assert stand.turned["writes"] == [str(error)]
    stand.now += LONGEST_S
    offer(stand, 60)
    stand.write_remote()
    assert stand.turned["writes"] == [str(error), ""]
    assert state(stand) == (False, False, "")
    offer(stand, 61)
    assert len(stand.writes) == 1


def test_an_object_that_is_too_large_says_nothing_of_others(stand: RemoteStand) -> None:
    offer(stand, 0)
    stand.write_remote(error=TierTooLarge("larger than the limit"))
    assert not stand.turned["writes"] and state(stand) == (False, False, "")


def test_a_full_store_is_rid_of_keys(stand: RemoteStand) -> None:
    publish(stand, 1)
    stand.settle()
    offer(stand, 5)
    stand.write_remote(error=FULL)
    stand.evict(0)
    assert key(0) not in stand.remote
    assert stand.turned["writes"] == [str(FULL)], "a removal does not show that there is room"


def test_removals_wait_for_a_store_that_takes_no_writes_and_the_first_that_succeeds_ends_it(stand: RemoteStand) -> None:
    publish(stand, 1)
    stand.settle()
    stand.send(1, messages.Evict(3, [key(0)]))
    stand.write_remote(error=READ_ONLY)
    assert (stand.turned["writes"], stand.turned["store"]) == ([str(READ_ONLY)], [])
    assert stand.state()["removals"] == 1 and not stand.writes
    stand.now += FIRST_S
    offer(stand, 5)
    [(removal, _)] = stand.writes
    assert isinstance(removal, RemoveRemote)
    stand.write_remote()
    assert key(0) not in stand.remote
    assert stand.turned["writes"] == [str(READ_ONLY), ""]
