"""When a put is not written in place: it goes through the inbox, and nothing is left behind."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tensord.client.core import in_place
from tensord.client.core.answers import PendingRequest
from tensord.client.core.in_flight import PutsInFlight
from tensord.client.core.in_place import InPlacePuts
from tensord.client.core.view import View
from tensord.errors import DaemonUnavailable
from tensord.ipc import messages
from tensord.ipc.schema import Message
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


def test_a_put_waits_for_no_span_that_it_could_not_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(*_: object, **__: object) -> None:
        raise DaemonUnavailable("the connection has ended")

    view = lambda: cast(View, object())  # noqa: E731
    puts = InPlacePuts(send, iter(range(100)).__next__, never, lambda: CONNECTED, view, cast(PutsInFlight, None))
    monkeypatch.setattr(puts, "_writer_of", lambda *_: object())
    monkeypatch.setattr(puts.spans, "wait", lambda *_: pytest.fail("it waits for an answer to nothing"))
    for _ in range(2):
        assert not puts.put(never, encode(bytes(8)), 0.0)
    sent: list[Message] = []
    monkeypatch.setattr(puts, "_send", lambda *asked, **_: sent.extend(asked))
    monkeypatch.setattr(puts.spans, "wait", lambda *_: None)
    assert not puts.put(never, encode(bytes(8)), 0.0)
    assert isinstance(sent[0], messages.TakeSpan), "the next put asks again"
