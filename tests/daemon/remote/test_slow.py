"""A store that answers more slowly than computing takes: it is not asked, probed without a waiting client, and said."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.daemon.remote.breaker import FIRST_S, LONGEST_S
from tensord.errors import TierTimedOut
from tensord.ipc import messages

from ..core.stand import key
from .stand import FOUND, REMOTE, Make, RemoteStand, ask, verdicts


@pytest.fixture
def stand(make: Make) -> RemoteStand:
    """A host whose store has once answered after 0.5 s."""
    stand = make(**REMOTE)
    ask(stand, within_s=1.0)
    stand.seek(answer_s=0.5)
    stand.send(1, messages.Abandon(stand.last(1).token))
    return stand


def test_one_slow_answer_keeps_a_store_from_being_asked_until_a_probe_is_quick(stand: RemoteStand) -> None:
    assert not stand.state()["too_slow"]
    assert ask(stand, number=2, within_s=0.1).answer == "compute"
    assert stand.state()["too_slow"] == "answers took 0.5 s, computing takes 0.1 s"
    assert not stand.seeks
    stand.now += FIRST_S
    stand.remote[key(3)] = FOUND
    assert ask(stand, number=3, within_s=0.1).answer == "compute", "the probe is made on the side"
    stand.seek(answer_s=0.001)
    assert not stand.state()["too_slow"]
    stand.remote[key(4)] = FOUND
    ask(stand, number=4, within_s=0.1)
    stand.settle()
    assert verdicts(stand)[-2:] == ["wait", "hit"]
    assert stand.counted["unasked"] == 2
    stand.check()


@pytest.mark.parametrize("error", [None, TierTimedOut("slow")])
def test_a_store_that_stays_slow_is_probed_ever_more_seldom(stand: RemoteStand, error: Any) -> None:
    ask(stand, number=2, within_s=0.1)
    waits_s = FIRST_S
    for number in range(10, 12):
        stand.now += 0.99 * waits_s
        ask(stand, number=number, within_s=0.1)
        assert not stand.seeks, f"after {waits_s} s, too early"
        stand.now += 0.02 * waits_s
        ask(stand, number=100 + number, within_s=0.1)
        ask(stand, number=200 + number, within_s=0.1)
        assert len(stand.seeks) == 1, "one probe at a time"
        stand.seek(error=error, answer_s=0.4)
        waits_s = min(2 * waits_s, LONGEST_S)
    assert stand.state()["too_slow"]


def test_runs_that_are_not_asked_for_are_counted_and_probe_too(stand: RemoteStand) -> None:
    stand.send(1, messages.FetchRun(7, [key(1), key(2)], 0.1))
    assert stand.counted["unasked"] == 2
    assert stand.state()["too_slow"]
    stand.now += FIRST_S
    stand.send(1, messages.FetchRun(8, [key(1), key(2)], 0.1))
    stand.seek(answer_s=0.001)
    stand.send(1, messages.FetchRun(9, [key(1), key(2)], 0.1))
    assert len(stand.runs) == 1


def test_no_run_waits_for_a_probe(stand: RemoteStand) -> None:
    stand.send(1, messages.FetchRun(7, [key(1)], 0.1))
    stand.now += FIRST_S
    stand.send(1, messages.FetchRun(8, [key(1)], 0.1))
    assert [seek.key for seek in stand.seeks] == [key(1)]
    stand.send(2, messages.FetchRun(9, [key(1)], 0.1))
    assert stand.last(2) == messages.Counted(9, 0)
    stand.seek(answer_s=0.4)
    stand.check()


def test_an_entry_that_was_not_worth_its_write_is_reconsidered_at_its_next_use(stand: RemoteStand) -> None:
    stand.put(5, cost_ms=100.0)
    assert key(5) not in stand.remote
    stand.put(5, cost_ms=100.0)
    assert stand.counted["not_worth"] == 1, "counted once"
    stand.now += FIRST_S
    ask(stand, number=6, within_s=0.1)
    stand.now += FIRST_S
    ask(stand, number=7, within_s=0.1)
    stand.seek(answer_s=0.001)
    stand.put(5, cost_ms=100.0)
    stand.settle()
    assert key(5) in stand.remote
