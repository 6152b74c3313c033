"""What hosts promise each other of generations, which the remote store gives out."""

from __future__ import annotations

from typing import Any

import pytest

from tensord.daemon.forms.effects import AskGenerations
from tensord.daemon.forms.events import RemoteDone, RemoteSaved, Tick
from tensord.daemon.remote.link import EVERY_S, FAILURES_MAX
from tensord.errors import TierReadOnly, TierTimedOut, TierUnavailable
from tensord.ipc.messages import control as messages

from ..core.stand import key
from .stand import FOUND, RemoteStand, ask, fail, verdicts

TAG = b"namespac"


def invalidate(stand: RemoteStand, client: int = 1) -> int:
    """A client invalidates the namespace. Its generation afterwards."""
    stand.send(client, messages.Invalidate(900, TAG, stand.generations.current(TAG)))
    return stand.generations.current(TAG)


def shared(stand: RemoteStand, number: int, generation: int) -> bool:
    """Whether an entry of a generation goes to the store."""
    name = key(number, generation=generation)
    assert stand.put(name, cost_ms=50.0) == "stored"
    return name in stand.remote


def test_until_the_store_has_given_out_a_number_nothing_of_the_namespace_is_shared(stand: RemoteStand) -> None:
    ask(stand)
    stand.settle()
    invalidate(stand)
    stand.remote[key(2, generation=1)] = FOUND
    stand.send(2, messages.RequestClaim(7, key(2, generation=1), 0.5))
    assert stand.last(2).answer == "compute", "another host's first invalidation is not this one's"
    stand.put(key(3, generation=1), 64, client=1, cost_ms=50.0, settles=False)
    assert not stand.writes


def test_hosts_that_invalidate_at_once_get_different_numbers(stand: RemoteStand) -> None:
    assert shared(stand, 1, 0)
    stand.remote_generations[TAG] = 1  # another host was first
    assert invalidate(stand) == 1
    stand.put(key(2, generation=1), 64, client=1, cost_ms=50.0, settles=False)
    assert stand.find(key(2, generation=1)) is not None
    stand.settle()
    assert stand.remote_generations == {TAG: 2}
    assert stand.generations.current(TAG) == 2
    assert stand.find(key(2, generation=1)) is None, "the number may be another host's"
    assert key(2, generation=1) not in stand.remote
    assert shared(stand, 3, 2)


@pytest.mark.parametrize("has_shared", [True, False], ids=["shares", "has only read its own since its start"])
def test_an_invalidation_on_another_host_ends_the_entries_of_this_one(stand: RemoteStand, has_shared: bool) -> None:
    if has_shared:
        assert shared(stand, 1, 0)
    else:
        stand.put(1)
        assert not stand.seeks and not stand.writes
    stand.remote_generations[TAG] = 1
    stand.pass_time(2 * EVERY_S + 0.1)
    assert stand.generations.current(TAG) == 1
    assert stand.find(key(1)) is None
    assert shared(stand, 2, 1)


def test_a_host_that_is_new_follows_the_stores_number_before_it_reads(stand: RemoteStand) -> None:
    stand.remote_generations[TAG] = 4
    stand.remote[key(1)] = FOUND
    ask(stand)
    ask(stand, 2)
    stand.settle()
    assert verdicts(stand) == ["wait", "alone"], "its key is one of before the invalidation"
    assert stand.generations.current(TAG) == 4
    assert not stand.store.parts.table.by_key
    stand.remote[key(1, generation=4)] = FOUND
    stand.send(1, messages.RequestClaim(70, key(1, generation=4), 0.5))
    stand.settle()
    assert stand.last(1).answer == "hit"


def test_a_store_that_has_lost_its_numbers_gets_those_of_the_hosts_back(stand: RemoteStand) -> None:
    invalidate(stand)
    stand.settle()
    assert shared(stand, 1, 1)
    stand.remote_generations.clear()
    stand.pass_time(EVERY_S + 0.1)
    assert stand.remote_generations == {TAG: 1}
    assert stand.generations.current(TAG) == 1, "clients that hold the number would share nothing any more"
    assert shared(stand, 2, 1)


def test_an_invalidation_while_the_store_fails_is_told_once_it_is_back(stand: RemoteStand) -> None:
    assert shared(stand, 1, 0)
    for number in range(10, 10 + FAILURES_MAX):
        fail(stand, number)
    invalidate(stand)
    assert not stand.generation_requests
    name = key(2, generation=1)
    stand.send(1, messages.RequestClaim(70, name, 0.5))
    assert stand.last(1).answer == "compute"
    # The daemon probes by itself, and tells.
    stand.pass_time(2 * EVERY_S + 0.1)
    assert stand.remote_generations == {TAG: 1}
    assert shared(stand, 4, 1)


def test_a_second_invalidation_is_not_taken_for_the_one_that_the_store_answers(stand: RemoteStand) -> None:
    assert shared(stand, 1, 0)
    stand.remote_generations[TAG] = 4
    invalidate(stand)
    invalidate(stand)
    stand.answer_generations()
    assert stand.remote_generations == {TAG: 5}
    stand.send(1, messages.RequestClaim(70, key(1, generation=5), 0.5))
    assert stand.last(1).answer == "compute", "another host may have taken 5 before the second invalidation"
    stand.settle()
    assert stand.remote_generations == {TAG: 6}
    assert stand.generations.current(TAG) == 6


def test_an_old_answer_raises_nothing_that_the_store_has_already(stand: RemoteStand) -> None:
    stand.put(key(1), 64, client=1, cost_ms=50.0, settles=False)
    [(save, _)] = stand.writes
    invalidate(stand)
    stand.answer_generations()
    stand.room.link.breaker.failed("gone", stand.now, refused=True)
    stand.now += EVERY_S
    stand.do(Tick())
    stand.writes.clear()
    stand.do(RemoteDone(save, RemoteSaved(0, written=False)))
    stand.pass_time(4 * EVERY_S)
    assert stand.remote_generations == {TAG: 1}
    assert stand.generations.current(TAG) == 1


def test_an_answer_of_before_an_invalidation_changes_nothing(stand: RemoteStand) -> None:
    assert shared(stand, 1, 0)
    stand.now += EVERY_S + 0.1
    stand.do(Tick())
    [question] = stand.generation_requests
    assert isinstance(question, AskGenerations)
    invalidate(stand)
    stand.generation_requests.rotate(-1)
    stand.answer_generations()
    assert stand.remote_generations == {TAG: 1}
    stand.do(RemoteDone(question, {TAG: 0}))
    stand.generation_requests.popleft()
    stand.settle()
    assert stand.generations.current(TAG) == 1 and stand.remote_generations == {TAG: 1}
    assert shared(stand, 2, 1)


@pytest.mark.parametrize("error", [TierUnavailable("gone"), TierTimedOut("slow"), TierReadOnly("a replica")])
def test_a_number_that_cannot_be_had_is_asked_for_again_and_said_if_the_store_does_not_take_it(
    stand: RemoteStand, error: Any
) -> None:
    assert shared(stand, 1, 0)
    invalidate(stand)
    stand.answer_generations(error)
    assert not stand.remote_generations
    if isinstance(error, TierReadOnly):
        assert (stand.state()["not_agreed"], stand.state()["not_agreed_why"]) == (1, "a replica")
        assert not shared(stand, 2, 1) and not stand.turned["store"]
    stand.pass_time(EVERY_S + 0.1)
    assert stand.remote_generations == {TAG: 1}
    assert not stand.state()["not_agreed"]
    assert shared(stand, 3, 1)
