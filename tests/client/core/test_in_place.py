"""When a put is not written in place: it goes through the inbox, and nothing is left behind."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tensord.client.core import in_place
from tensord.client.core.answers import PendingRequest
from tensord.client.core.in_flight import PutsInFlight
from tensord.client.core.in_place import InPlacePuts
from tensord.client.core.view import View
from tensord.shm.tree import encode

CONNECTED = object()


def never(_: int) -> Any:
    raise AssertionError("the put began")


def test_a_descriptor_that_comes_too_late_is_left_to_whoever_receives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "_OPEN_S", 0.01)
    asked: list[PendingRequest] = []

    def ask(*_: object, **__: object) -> PendingRequest:
        asked.append(PendingRequest())
        return asked[-1]

    in_flight = cast(PutsInFlight, None)
    send, view = (lambda *_: None), (lambda: cast(View, object()))
    puts = InPlacePuts(send, lambda: 1, ask, lambda: CONNECTED, view, in_flight)
    for _ in range(2):
        assert not puts.put(never, encode(bytes(8)), 0.0)
    assert [answer.cancelled() for answer in asked] == [True], "asked once for each connection, and cancelled"
