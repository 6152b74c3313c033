"""Claims where they meet puts, deaths and evictions."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.daemon.claims import unstorable
from tensord.errors import BadTree, NotEnoughMemory, ObjectTooLarge, TensordError, TimedOut
from tensord.ipc.messages import control as messages

from .stand import SPAN, Stand, key, with_clients


def claim(stand: Stand, number: int, *clients: int) -> int:
    """These clients ask for a claim, one after the other. The token that the first one got."""
    for client in clients:
        stand.send(client, messages.RequestClaim(1, key(number)))
    token: int = next(a.token for a in stand.answers[clients[0]] if isinstance(a, messages.Claimed))
    return token


def verdicts(stand: Stand, client: int) -> list[str]:
    return [answer.answer for answer in stand.answers[client] if isinstance(answer, messages.Claimed)]


def refused_in_the_queue(stand: Stand, number: int, error: TensordError, token: int) -> None:
    """A put of client 1 whose payload could not be copied out of its inbox."""
    place = stand.begin(1)
    stand.write(place, b"x" * 64)
    record = stand.record(1, place, key(number), tree=0, claim=token)
    stand.submit(1, record, errors={stand.records[1]: error})


def test_a_victim_that_comes_back_is_a_hit_for_those_who_wait() -> None:
    stand = with_clients(16 * SPAN)
    for number in range(16):
        stand.put(number)
    stand.pin(0)
    stand.ask(1, 64)
    assert stand.scans == 1 and 0 not in stand.stored(), "room is made for the next put"
    claim(stand, 0, 2, 3)
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


def test_a_value_that_cannot_be_stored_lets_all_compute_now_and_for_a_minute() -> None:
    stand = with_clients()
    token = claim(stand, 1, 1, 2, 3)
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


def test_a_put_refused_for_good_is_remembered_until_the_key_is_stored() -> None:
    stand = with_clients(max_tokens=9)
    token = claim(stand, 1, 1)
    assert stand.put(1, tokens=10, claim=token) == "LimitReached"
    assert granted(stand, 1) == "alone"
    assert stand.store.status()["claims_unstorable"] == {"LimitReached": 1}
    # Stored after all, for example as a smaller value.
    assert stand.put(1) == "stored"
    stand.send(1, messages.Evict(5, [key(1)]))
    assert granted(stand, 1) == "compute"


@pytest.mark.parametrize("error", [BadTree("no tree"), TimedOut("the copy is late"), NotEnoughMemory("none")])
def test_a_tree_that_is_none_is_remembered_and_a_failure_that_may_pass_is_not(error: TensordError) -> None:
    stand = with_clients()
    token = claim(stand, 1, 1, 2)
    refused_in_the_queue(stand, 1, error, token)
    assert stand.last(1).error.code == error.code
    assert verdicts(stand, 2) == ["wait", "alone"]
    assert granted(stand, 1) == ("alone" if isinstance(error, BadTree) else "compute")


def test_only_the_holder_of_a_claim_can_say_that_its_value_cannot_be_stored() -> None:
    stand = with_clients()
    stand.join(5)
    token = claim(stand, 1, 1, 2)
    told = messages.ErrorBody("ObjectTooLarge", "so it is said")
    stand.send(5, messages.Abandon(token, told))
    stand.send(5, messages.Abandon(12345, told))
    assert stand.last(2).answer == "wait"
    assert not stand.store.status()["unstorable"]


def test_keys_and_reasons_that_are_remembered_are_bounded_and_of_known_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unstorable, "KEYS_MAX", 3)
    monkeypatch.setattr(unstorable, "REASONS_MAX", 2)
    stand = with_clients()
    for number in range(5):
        gives_up(stand, number, ObjectTooLarge(f"value {number}"))
    assert [granted(stand, number) for number in range(5)] == ["compute"] * 2 + ["alone"] * 3
    for name in ("Mine", "Other"):
        stand.send(1, messages.RequestClaim(92, key(7)))
        stand.send(1, messages.Abandon(stand.last(1).token, messages.ErrorBody(name, "\x1b[2J")))
    status: dict[str, Any] = stand.store.status()
    assert set(status["claims_unstorable"]) == {"ObjectTooLarge", "TensordError"}
    assert [(reason["code"], reason["text"]) for reason in status["unstorable"]] == [
        ("TensordError", "\\x1b[2J"),
        ("ObjectTooLarge", "value 4"),
    ]
