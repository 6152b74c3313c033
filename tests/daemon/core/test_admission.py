"""Refusals name the value, the limit and what to do, and change nothing."""

from __future__ import annotations

import re

import pytest

from tensord.ipc import messages

from .stand import SPAN, Make, key


@pytest.mark.parametrize(
    ("limits", "size", "more", "code", "says"),
    [
        ({"object_bytes_max": 1000}, 1001, {}, "ObjectTooLarge", "1001 bytes, .*max is 1000"),
        ({}, 4096, {}, "ObjectTooLarge", "4096 bytes take 4288 in the ring, and ring_bytes is 4096"),
        ({"max_bytes": 1024}, 960, {}, "ObjectTooLarge", "take 1152 .* max_bytes is 1024"),
        ({"max_tokens": 9}, 64, {"tokens": 10}, "LimitReached", "10 tokens, and max_tokens is 9"),
    ],
)
def test_a_put_that_can_never_fit_is_refused_with_value_limit_and_remedy(
    make: Make, limits: dict[str, int], size: int, more: dict[str, int], code: str, says: str
) -> None:
    stand = make(**limits)
    stand.put(1)
    assert stand.put(2, size, **more) == code
    text = next(e["text"] for e in stand.told if e["event"] == "refuse")
    assert re.search(says, text)
    assert "raise" in text
    assert stand.stored() == {1}
    assert stand.store.status()["refusals"] == {code: 1}


def test_each_limit_is_named_where_it_is_reached(make: Make) -> None:
    stand = make(
        commits_in_flight_max=1,
        parts_in_flight_max=2,
        claims_per_client_max=1,
        keys_per_request_max=1,
        pins_per_client_max=1,
        namespaces_max=1,
    )
    stand.put(1)
    stand.put(2)
    stand.commit(1, 1, key(8), 300)
    stand.commit(1, 2, key(9), 64)
    for _ in range(3):
        stand.part(1, 1, 64, last=False)
    for request in (3, 4):
        stand.send(1, messages.RequestClaim(request, key(20 + request)))
    stand.send(1, messages.Evict(5, [key(1), key(2)]))
    stand.send(1, messages.Touch(6, [key(1), key(2)]))
    for number in (1, 2):
        stand.send(1, messages.Pin(6 + number, key(number), 1.0))
        stand.send(1, messages.Invalidate(8 + number, bytes([number]) * 8, 0))
    texts = [e["text"] for e in stand.told if e["event"] == "refuse"]
    names = [
        "commits_in_flight_max",
        "2 may wait (a fixed limit)",
        "claims_per_client_max",
        "keys_per_request_max",
        "keys_per_request_max",
        "pins_per_client_max",
        "namespaces_max",
    ]
    assert [name in text for name, text in zip(names, texts, strict=True)] == [True] * 7
    assert stand.stored() == {1, 2}
    assert stand.store.status()["refusals"] == {"LimitReached": 7}


def test_pins_by_message_cannot_take_the_whole_store(make: Make) -> None:
    stand = make(pinned_bytes_max=SPAN)
    stand.put(1)
    stand.put(2)
    stand.send(1, messages.Pin(1, key(1), 5.0))
    stand.send(2, messages.Pin(1, key(1), 5.0))
    stand.send(1, messages.Pin(2, key(2), 5.0))
    assert stand.answers[2][-1] == messages.Pinned(1, 5.0)
    assert stand.last().code == "LimitReached"
    assert "limits.pinned_share_max" in stand.last().text


def test_an_id_in_flight_is_not_taken_twice(make: Make) -> None:
    stand = make()
    stand.commit(1, 1, key(1), 64)
    stand.commit(1, 1, key(2), 64)
    assert isinstance(stand.last(), messages.Error)
    stand.part(1, 1, 64, last=True)
    stand.settle()
    assert stand.stored() == {1}
