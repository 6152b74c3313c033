"""Claims where they meet puts, deaths and evictions."""

from __future__ import annotations

from tensord.errors import BadTree
from tensord.ipc import messages

from .stand import SPAN, Make, key


def test_waiters_learn_of_the_commit(make: Make) -> None:
    stand = make()
    stand.send(1, messages.RequestClaim(1, key(1)))
    stand.send(2, messages.RequestClaim(2, key(1)))
    token = stand.answers[1][0].token
    stand.put(1, claim=token)
    assert [answer.answer for answer in stand.answers[2]] == ["wait", "hit"]
    stand.send(3, messages.RequestClaim(3, key(1)))
    assert stand.last(3) == messages.Claimed(3, "hit")


def test_a_refused_commit_lets_every_waiter_compute(make: Make) -> None:
    stand = make()
    stand.send(1, messages.RequestClaim(1, key(1)))
    for client in (2, 3):
        stand.send(client, messages.RequestClaim(2, key(1)))
    stand.put(1, 5000, claim=stand.answers[1][0].token)
    assert stand.last(2) == stand.last(3) == messages.Claimed(2, "alone")


def test_a_claim_passes_on_when_its_holder_dies_or_is_late(make: Make) -> None:
    stand = make(claim_s=10, claim_s_max=60)
    for client in (1, 2, 3):
        stand.send(client, messages.RequestClaim(1, key(1)))
    stand.leave(1)
    assert stand.last(2).answer == "compute"
    stand.pass_time(11)
    assert stand.last(3) == messages.Claimed(1, "alone")


def test_a_late_claimant_still_stores_its_result(make: Make) -> None:
    stand = make(claim_s=10, claim_s_max=60)
    stand.send(1, messages.RequestClaim(1, key(1)))
    token = stand.last().token
    stand.pass_time(100)
    assert stand.put(1, claim=token) == "stored"


def test_waiters_get_the_result_of_a_claimant_that_died_after_sending_all(make: Make) -> None:
    stand = make()
    stand.send(1, messages.RequestClaim(1, key(1)))
    stand.send(2, messages.RequestClaim(1, key(1)))
    stand.commit(1, 2, key(1), 64, claim=stand.answers[1][0].token)
    stand.part(1, 2, 64, last=True)
    stand.leave(1)
    assert stand.last(2).answer == "wait"
    stand.settle()
    assert stand.last(2).answer == "hit"


def test_waiters_compute_when_what_a_claimant_sent_before_it_died_is_refused(make: Make) -> None:
    stand = make()
    stand.send(1, messages.RequestClaim(1, key(1)))
    stand.send(2, messages.RequestClaim(1, key(1)))
    stand.commit(1, 2, key(1), 64, claim=stand.answers[1][0].token)
    stand.part(1, 2, 64, last=True)
    stand.leave(1)
    stand.copy(error=BadTree("its tree is none"))
    assert stand.last(2).answer == "alone"


def test_a_victim_that_comes_back_is_a_hit_for_those_who_wait(make: Make) -> None:
    stand = make(2 * SPAN)
    stand.put(1)
    stand.put(2)
    stand.pin(1)
    stand.begin(1, 1, key(9), 64)
    stand.send(2, messages.RequestClaim(1, key(1)))
    stand.send(3, messages.RequestClaim(1, key(1)))
    assert [stand.last(2).answer, stand.last(3).answer] == ["compute", "wait"]
    stand.settle()
    assert stand.last(3).answer == "hit"
