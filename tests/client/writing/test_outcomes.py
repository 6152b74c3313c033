"""An outcome is right at every moment, whoever is faster: the daemon's words or its messages."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tensord.client.writing.outcomes import Put
from tensord.errors import LimitReached, TimedOut

from ...daemon_process import PATIENCE_S
from ...memory_bench import key
from ...writing_bench import LANE, WritingBench


def soon() -> float:
    return time.monotonic() + PATIENCE_S


@pytest.fixture
def bench() -> Any:
    with WritingBench() as bench:
        yield bench


def test_no_put_counts_as_stored_while_a_refusal_is_still_unread(bench: WritingBench) -> None:
    """The daemon settles both, and its message is read later."""
    bench.asleep[0] = 0
    first, second = bench.put(key(1), 1, soon()), bench.put(key(2), 1, soon())
    bench.refusals[LANE] += 1
    bench.settled[LANE] = 2
    assert [first.state, second.state] == ["sent", "sent"]
    with pytest.raises(TimedOut, match="was not acknowledged within 0"):
        second.wait(0.01)
    bench.writer.outcomes.refused(1, LimitReached("full"))
    assert [first.state, second.state] == ["refused", "stored"]


def test_a_refusal_that_comes_before_the_put_is_noted_is_not_lost(bench: WritingBench) -> None:
    outcomes = bench.writer.outcomes
    bench.refusals[LANE] += 1
    outcomes.refused(1, LimitReached("full"))
    bench.settled[LANE] = 1
    put = Put(key(1))
    outcomes.note(put, 1)
    assert put.state == "refused"
