"""Claims where they meet puts, deaths and evictions."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.daemon.core import unstorable
from tensord.errors import BadTree, ObjectTooLarge, TensordError, TimedOut
from tensord.ipc import messages

from .stand import SPAN, Make, Stand, key


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


def gives_up(stand: Stand, number: int, error: TensordError) -> None:
    """Client 1 claims a key, and finds that its value cannot be stored."""
    stand.send(1, messages.RequestClaim(90, key(number)))
    stand.send(1, messages.Abandon(stand.last(1).token, messages.ErrorBody.of(error)))


def granted(stand: Stand, number: int) -> str:
    """The answer to one who asks for the key's claim, and gives it back."""
    stand.send(3, messages.RequestClaim(91, key(number)))
    claimed = stand.last(3)
    if claimed.token:
        stand.send(3, messages.Abandon(claimed.token))
    return str(claimed.answer)


def test_a_value_that_cannot_be_stored_lets_all_compute_now_and_for_a_minute(make: Make) -> None:
    stand = make()
    for client in (1, 2, 3):
        stand.send(client, messages.RequestClaim(1, key(1)))
    token = stand.answers[1][0].token
    stand.send(1, messages.Abandon(token, messages.ErrorBody.of(ObjectTooLarge("17000 nodes"))))
    assert stand.last(2) == stand.last(3) == messages.Claimed(1, "alone")
    assert (granted(stand, 1), granted(stand, 2)) == ("alone", "compute")
    stand.pass_time(59)
    assert granted(stand, 1) == "alone"
    stand.pass_time(2)
    assert granted(stand, 1) == "compute"
    status = stand.store.status(stand.now)
    assert status["refusals"] == status["claims_unstorable"] == {"ObjectTooLarge": 1}
    [reason] = status["unstorable"]
    assert (reason["namespace"], reason["code"], reason["count"]) == (key(1)[:8].hex(), "ObjectTooLarge", 1)
    assert (reason["text"], reason["ago_s"]) == ("17000 nodes", 61)


@pytest.mark.parametrize(
    ("limits", "size_bytes", "tokens", "code"),
    [
        ({}, 5000, 0, "ObjectTooLarge"),
        ({"max_tokens": 9}, 64, 10, "LimitReached"),
        ({"object_bytes_max": 100}, 200, 0, "ObjectTooLarge"),
    ],
)
def test_a_put_refused_for_good_is_remembered(
    make: Make, limits: dict[str, Any], size_bytes: int, tokens: int, code: str
) -> None:
    stand = make(**limits)
    stand.send(1, messages.RequestClaim(1, key(1)))
    assert stand.put(1, size_bytes, tokens=tokens, claim=stand.last(1).token) == code
    assert granted(stand, 1) == "alone"
    assert stand.store.status()["claims_unstorable"] == {code: 1}
    # Stored after all, for example as a smaller value.
    assert stand.put(1) == "stored"
    stand.send(1, messages.Evict(5, [key(1)]))
    assert granted(stand, 1) == "compute"


@pytest.mark.parametrize("error", [BadTree("no tree"), TimedOut("the copy is late")])
def test_a_tree_that_is_none_is_remembered_and_a_failure_that_may_pass_is_not(make: Make, error: TensordError) -> None:
    stand = make()
    stand.send(1, messages.RequestClaim(1, key(1)))
    stand.commit(1, 2, key(1), 64, claim=stand.last(1).token)
    stand.part(1, 2, 64, last=True)
    stand.copy(error=error)
    assert granted(stand, 1) == ("alone" if isinstance(error, BadTree) else "compute")


def test_only_the_holder_of_a_claim_can_say_that_its_value_cannot_be_stored(make: Make) -> None:
    stand = make()
    stand.join(5)
    stand.send(1, messages.RequestClaim(1, key(1)))
    stand.send(2, messages.RequestClaim(1, key(1)))
    told = messages.ErrorBody("ObjectTooLarge", "so it is said")
    stand.send(5, messages.Abandon(stand.answers[1][0].token, told))
    stand.send(5, messages.Abandon(12345, told))
    assert stand.last(2).answer == "wait"
    assert not stand.store.status()["unstorable"]


def test_keys_and_reasons_that_are_remembered_are_bounded_and_of_known_names(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unstorable, "KEYS_MAX", 3)
    monkeypatch.setattr(unstorable, "REASONS_MAX", 2)
    stand = make()
    for number in range(5):
        gives_up(stand, number, ObjectTooLarge(f"value {number}"))
    assert [granted(stand, number) for number in range(5)] == ["compute"] * 2 + ["alone"] * 3
    for name in ("Mine", "Other"):
        stand.send(1, messages.RequestClaim(92, key(7)))
        stand.send(1, messages.Abandon(stand.last(1).token, messages.ErrorBody(name, "\x1b[2J")))
    status = stand.store.status()
    assert set(status["claims_unstorable"]) == {"ObjectTooLarge", "TensordError"}
    assert [(reason["code"], reason["text"]) for reason in status["unstorable"]] == [
        ("TensordError", "\\x1b[2J"),
        ("ObjectTooLarge", "value 4"),
    ]
