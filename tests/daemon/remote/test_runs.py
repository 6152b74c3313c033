"""Runs: keys in order that a client has the daemon fetch, and what becomes of them meanwhile."""

from __future__ import annotations

import pytest

from tensord.daemon.forms.events import RemoteEntry
from tensord.daemon.remote.fetches import RUN_KEYS_MAX
from tensord.errors import Corrupt
from tensord.ipc.messages import control as messages

from ..core.stand import key
from .stand import REMOTE, RemoteStand, ask, verdicts


def chain(count: int) -> dict[bytes, RemoteEntry]:
    """Objects in the store, each the parent of the next: the keys from 0 on."""
    return {key(at): RemoteEntry(64, 16, cost_ms=8.0, parent=key(at - 1) if at else None) for at in range(count)}


def fetch(stand: RemoteStand, *numbers: int, client: int = 1, within_s: float = 0.5) -> None:
    request = 1000 + len(stand.answers[client])
    stand.send(client, messages.FetchRun(request, [key(number) for number in numbers], within_s))


def counted(stand: RemoteStand, client: int = 1) -> list[int]:
    return [answer.count for answer in stand.answers[client] if isinstance(answer, messages.Counted)]


def test_a_run_is_found_with_one_question_and_put_in_order(stand: RemoteStand) -> None:
    stand.remote = chain(6)
    fetch(stand, *range(8))
    [seek] = stand.seeks
    assert seek.keys == tuple(key(number) for number in range(8))
    assert not counted(stand)
    stand.settle()
    assert counted(stand) == [6]
    for number in range(6):
        row = stand.store.parts.table.by_key[key(number)]
        assert stand.store.parts.table.depths[row] == number
    assert stand.counted == {"fetched": 6, "missed": 2}


def test_a_run_ends_at_the_first_key_that_the_store_does_not_have(stand: RemoteStand) -> None:
    stand.remote = chain(5)
    del stand.remote[key(2)]
    fetch(stand, *range(5))
    stand.settle()
    assert counted(stand) == [2]
    assert stand.find(key(3)) is None


def test_no_more_keys_are_sought_at_once_than_there_is_room_for_puts() -> None:
    stand = RemoteStand(1 << 20, **REMOTE)
    stand.remote = chain(100)
    fetch(stand, *range(100))
    assert len(stand.seeks[0].keys) == RUN_KEYS_MAX
    fetch(stand, *range(200, 202), client=2)
    assert counted(stand, 2) == [0], "it computes"
    ask(stand, client=2, number=300)
    assert verdicts(stand, 2) == ["wait"], "single keys are sought besides"
    stand.settle()
    assert counted(stand) == [RUN_KEYS_MAX]


def test_a_run_that_would_take_longer_than_computing_is_cut() -> None:
    stand = RemoteStand(ring_bytes=1 << 22, **REMOTE)
    stand.remote = {key(at): RemoteEntry(1 << 19, 16) for at in range(3)}
    fetch(stand, 0, within_s=1.0)
    stand.seek()
    stand.now += 0.4
    stand.read_remote()
    assert counted(stand) == [1]
    fetch(stand, 1, 2, within_s=0.5)
    stand.seek()
    assert stand.counted == {"fetched": 1, "slow": 1}
    stand.settle()
    assert counted(stand) == [1, 1]


@pytest.mark.parametrize("when", ["sought", "read"])
@pytest.mark.parametrize(("what", "left"), [("evicted by name", 1), ("invalidated", 0)])
def test_a_run_ends_at_a_key_that_is_evicted_by_name_and_has_nothing_after_an_invalidation(
    stand: RemoteStand, what: str, left: int, when: str
) -> None:
    stand.remote = chain(3)
    fetch(stand, 0, 1, 2)
    if when == "read":
        stand.seek()
    ends = messages.Evict(1, [key(1)]) if left else messages.Invalidate(1, key(0)[:8], 0)
    stand.send(2, ends)
    stand.settle()
    assert counted(stand) == [left]
    assert stand.find(key(2)) is None


def test_the_entries_after_one_that_cannot_be_read_are_not_stored(stand: RemoteStand) -> None:
    stand.remote = chain(4)
    fetch(stand, 0, 1, 2, 3)
    stand.seek()
    stand.read_remote(1, Corrupt("other bytes"))
    stand.settle()
    assert counted(stand) == [1]
    assert stand.counted == {"fetched": 1, "failed": 3}


def test_entries_are_stored_after_their_parents_in_whatever_order_they_are_read(stand: RemoteStand) -> None:
    stand.remote = chain(4)
    fetch(stand, 0, 1, 2, 3)
    stand.seek()
    for at in (3, 1, 1):
        stand.read_remote(at)
        assert not stand.store.parts.table.by_key
    stand.read_remote()
    assert counted(stand) == [4]
