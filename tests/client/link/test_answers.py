"""Answers that come too late: what they grant is given back."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from tensord.client.link.answers import Answers, PendingRequest
from tensord.ipc.messages import control as messages

GIVEN_BACK: list[tuple[Any, list[Any]]] = [
    (messages.Claimed(1, "compute", 7, 1.0), [messages.Abandon(7)]),
    (messages.Reserved(1, 7, 1.0), [messages.ReleaseReservation(1, 7)]),
    (messages.WritableRing(1), []),
]


@pytest.mark.parametrize("cancelled", [True, False])
@pytest.mark.parametrize(("answer", "given_back"), GIVEN_BACK, ids=["claim", "reservation", "ring"])
def test_what_is_granted_to_a_request_that_nobody_waits_for_is_given_back(
    answer: Any, given_back: list[Any], cancelled: bool
) -> None:
    sent: list[Any] = []
    link: Any = SimpleNamespace(next_id=lambda: 1, attached=None, send=lambda *said, **_: sent.extend(said))
    link.claims = SimpleNamespace(hold=lambda *_: None, drop=lambda token: None)
    answers = Answers(link)
    if cancelled:
        answers.pending[1] = PendingRequest()
        assert answers.pending[1].cancel()
    reader, writer = os.pipe()
    answers.received(answer, [writer], link)
    assert sent == given_back
    assert os.read(reader, 1) == b"", "the descriptor that came with the answer is closed"
    os.close(reader)
