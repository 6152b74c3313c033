"""An outcome is right at every moment, whoever is faster: the daemon's words or its messages."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tensord.client.writing.outcomes import Outcomes, Put
from tensord.errors import LimitReached, TimedOut
from tensord.shm.ring.layout import LANE_BYTES

from ...memory_bench import key

LANE = 3


def made() -> tuple[Outcomes, memoryview, memoryview]:
    """The outcomes of a connection that nobody rings, and the daemon's words `settled` and `refusals`."""
    wire: Any = SimpleNamespace(
        bells=0, ring_to_wait=lambda: None, wait_for_bell=lambda seen, timeout_s: threading.Event().wait(timeout_s)
    )
    settled, refusals, lane = (memoryview(bytearray(size)).cast("Q") for size in (64, 64, LANE_BYTES))
    return Outcomes(lane, settled, refusals, LANE, wire), settled, refusals


def test_no_put_counts_as_stored_while_a_refusal_is_still_unread() -> None:
    """The daemon settles both, and its message is read later."""
    outcomes, settled, refusals = made()
    first, second = Put(key(1)), Put(key(2))
    outcomes.note(first, 1)
    outcomes.note(second, 2)
    refusals[LANE] += 1
    settled[LANE] = 2
    assert [first.state, second.state] == ["sent", "sent"]
    with pytest.raises(TimedOut, match=r"was not acknowledged within 0\.01 s"):
        second.wait(0.01)
    with pytest.raises(TimedOut, match="was not acknowledged within 5 s"):
        second.wait_until(0.0, 5.0)
    outcomes.refused(1, LimitReached("full"))
    assert [first.state, second.state] == ["refused", "stored"]


def test_a_refusal_that_comes_before_the_put_is_noted_is_not_lost() -> None:
    outcomes, settled, refusals = made()
    refusals[LANE] += 1
    outcomes.refused(1, LimitReached("full"))
    settled[LANE] = 1
    put = Put(key(1))
    outcomes.note(put, 1)
    assert put.state == "refused"
