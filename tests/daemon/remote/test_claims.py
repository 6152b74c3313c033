"""Which host computes a key that several hosts miss, and how long the others wait for it."""

from __future__ import annotations

import pytest

from tensord.daemon.forms.events import Tick
from tensord.daemon.remote import fetches, link, writes
from tensord.daemon.remote.fetches import WAIT_TIMES
from tensord.daemon.remote.link import FAILURES_MAX
from tensord.errors import TierTimedOut, TierUnavailable
from tensord.ipc.messages import control as messages

from ..core.stand import key
from .stand import FOUND, RemoteStand, ask, verdicts


def test_a_host_that_has_missed_a_key_at_the_same_moment_waits_until_it_is_computed(stand: RemoteStand) -> None:
    stand.others[key(1)] = stand.now
    ask(stand, within_s=1.0)
    ask(stand, 2, within_s=1.0)
    stand.pass_time(1.1)
    assert verdicts(stand) == verdicts(stand, 2) == ["wait"]
    stand.remote[key(1)] = FOUND
    stand.pass_time(0.1)
    stand.settle()
    assert verdicts(stand) == verdicts(stand, 2) == ["wait", "hit"]
    assert stand.counted == {"waited": 1, "fetched": 1}


def test_the_wait_for_another_host_ends_a_quarter_after_it_ought_to_be_done(stand: RemoteStand) -> None:
    stand.now = 100.0
    stand.others[key(1)] = stand.now - 0.5
    ask(stand, within_s=1.0)
    stand.pass_time(WAIT_TIMES - 0.5 - 0.01)
    assert verdicts(stand) == ["wait"]
    stand.pass_time(0.02)
    assert verdicts(stand) == ["wait", "compute"]
    assert stand.counted == {"waited": 1, "missed": 1}
    assert stand.store.next_timer() is None or not stand.seeks


@pytest.mark.parametrize(("within_s", "others_s"), [(1.0, 1.3), (700.0, 0.0)], ids=["is late", "takes too long"])
def test_a_host_that_would_wait_in_vain_computes_at_once(stand: RemoteStand, within_s: float, others_s: float) -> None:
    stand.now = 100.0
    stand.others[key(1)] = stand.now - others_s
    ask(stand, within_s=within_s)
    stand.seek()
    assert verdicts(stand) == ["wait", "compute"]
    assert stand.counted == {"missed": 1}


@pytest.mark.parametrize("error", [None, TierUnavailable("connection refused")], ids=["gives up", "store fails"])
def test_a_host_that_waits_computes_as_soon_as_the_other_gives_up_or_the_store_fails(
    stand: RemoteStand, error: TierUnavailable | None
) -> None:
    stand.others[key(1)] = stand.now
    ask(stand, within_s=1.0)
    stand.pass_time(0.2)
    assert verdicts(stand) == ["wait"]
    stand.others.clear()
    stand.now += 0.1
    stand.do(Tick())
    stand.seek(error=error)
    assert verdicts(stand) == ["wait", "compute"]
    assert not stand.withdrawn


def test_nobody_waits_for_other_hosts_once_the_store_is_left_alone(stand: RemoteStand) -> None:
    for number in range(2 * FAILURES_MAX):
        stand.others[key(number)] = stand.now
        ask(stand, number=number, within_s=1.0)
    while stand.seeks:
        stand.seek()
    stand.now += 0.1
    stand.do(Tick())
    for _ in range(FAILURES_MAX):
        stand.seek()
    for _ in range(FAILURES_MAX):
        stand.seek(error=TierTimedOut("no answer in time"))
    stand.now += 0.3
    stand.do(Tick())
    assert not stand.seeks
    assert verdicts(stand).count("compute") == 2 * FAILURES_MAX


def test_while_another_host_is_waited_for_other_keys_are_sought(
    stand: RemoteStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetches, "LOOK_S_LEAST", 5.0)  # as with many keys
    stand.others[key(1)] = stand.now
    ask(stand, within_s=1.0)
    stand.pass_time(1.1)
    assert verdicts(stand) == ["wait"]
    assert ask(stand, 2, number=2).answer == "wait"


@pytest.mark.parametrize("how", ["abandons", "leaves", "is refused", "has left before", "has given up before"])
def test_a_claim_of_which_nothing_comes_is_withdrawn(stand: RemoteStand, how: str) -> None:
    ask(stand, within_s=0.3)
    match how:
        case "has left before":
            stand.leave(1)
        case "has given up before":
            stand.now += 0.31
            seek = stand.seeks.popleft()
            stand.go_on()
            stand.send(1, messages.Abandon(stand.last(1).token))
            stand.seeks.append(seek)
    stand.settle()
    match how:
        case "abandons":
            stand.send(1, messages.Abandon(stand.last(1).token))
        case "leaves":
            stand.leave(1)
        case "is refused":
            assert stand.put(1, claim=stand.last(1).token, parent=key(2), settles=False) == "ParentGone"
    assert stand.withdrawn == [key(1)]
    assert stand.counted["withdrawn"] == 1


def test_a_claim_stays_until_the_entry_is_written(stand: RemoteStand) -> None:
    ask(stand, within_s=0.5)
    stand.settle()
    stand.put(1, claim=stand.last(1).token, cost_ms=9.0)
    assert key(1) in stand.remote and not stand.withdrawn


@pytest.mark.parametrize("why", ["its cost is unknown", "it is not worth it", "the queue is full", "the store fails"])
def test_a_claim_whose_entry_is_not_written_is_withdrawn(
    stand: RemoteStand, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "LARGE_BYTES", 1)
    ask(stand, within_s=0.5)
    stand.seek(answer_s=0.1)
    cost_ms = {"its cost is unknown": 0.0, "it is not worth it": 1.0}.get(why, 900.0)
    if why == "the queue is full":
        monkeypatch.setattr(writes, "QUEUED_MAX", 0)
    stand.put(1, claim=stand.last(1).token, cost_ms=cost_ms, settles=False)
    if why == "the store fails":
        assert not stand.withdrawn
        stand.write_remote(error=TierTimedOut("slow"))
    assert stand.withdrawn == [key(1)]
