"""What is written to the remote store, what becomes of an entry meanwhile, and what is written before it is evicted.

The whole core with deadlines, full stores and pressure that ends: tests/daemon/core/test_host_memory.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensord.daemon.forms.events import LimitsChanged, RemoteEntry
from tensord.daemon.remote import link, writes
from tensord.errors import TierTimedOut
from tensord.ipc.messages import control as messages

from ..core.stand import key
from .stand import FOUND, REMOTE, SPAN, RemoteStand, ask, publish


def test_an_entry_that_takes_longer_to_compute_than_to_read_is_written(stand: RemoteStand) -> None:
    stand.put(1, cost_ms=5.0)
    assert set(stand.remote) == {key(1)}
    assert (stand.counted, stand.store.counters.remote_written_bytes) == ({"written": 1}, 64)


def test_an_entry_of_unknown_cost_is_written_at_its_next_use(stand: RemoteStand) -> None:
    stand.put(1)
    stand.put(2)
    assert not stand.remote
    stand.use(1)
    stand.settle()
    assert set(stand.remote) == {key(1)}
    stand.remote.clear()
    stand.use(1)
    stand.settle()
    assert not stand.remote, "it was written once"


def test_an_entry_that_was_not_worth_its_write_is_counted_once_and_reconsidered_at_its_next_use(
    stand: RemoteStand,
) -> None:
    ask(stand, within_s=1.0)
    stand.seek(answer_s=0.5)
    for _ in range(2):
        stand.put(5, cost_ms=100.0)
        assert key(5) not in stand.remote and stand.counted["not_worth"] == 1
    stand.now += link.FORGOTTEN_S + 1
    stand.put(5, cost_ms=100.0)
    assert key(5) in stand.remote


def test_what_came_from_the_remote_store_is_not_written_back(stand: RemoteStand) -> None:
    stand.remote[key(1)] = RemoteEntry(64, 16)
    ask(stand)
    stand.settle()
    stand.use(1)
    stand.settle()
    assert not {"written", "there"} & stand.counted.keys()


def test_a_key_whose_last_bytes_are_no_generation_is_not_shared(stand: RemoteStand) -> None:
    stand.put(1, cost_ms=9.0)
    stand.put(key(2, generation=77), cost_ms=9.0)
    stand.send(1, messages.RequestClaim(8, key(3, generation=77), 0.5))
    assert stand.last(1).answer == "compute"
    assert set(stand.remote) == {key(1)}


@pytest.mark.parametrize("how", ["from the start", "by a reload"])
def test_a_daemon_that_may_only_read_writes_nothing(how: str) -> None:
    stand = RemoteStand(**{**REMOTE, "remote_writes": how == "by a reload"})
    if how == "by a reload":
        stand.do(LimitsChanged(replace(stand.limits, remote_writes=False)))
    stand.put(1, cost_ms=50.0, settles=False)
    stand.use(1)
    stand.send(1, messages.Evict(3, [key(1)]))
    assert not stand.writes


def test_a_full_queue_drops_what_is_new_and_counts_it(stand: RemoteStand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "QUEUED_MAX", 2)
    publish(stand, 5, 400)
    assert len(stand.writes) == 1
    assert len(stand.room.writes.queue) == 2
    assert stand.counted["dropped"] == 2
    stand.settle()
    assert len(stand.remote) == 3


@pytest.mark.parametrize("how", ["evicted", "full"])
def test_a_span_that_is_written_is_not_reused(how: str) -> None:
    stand = RemoteStand(2 * SPAN, **REMOTE)
    stand.put(1, cost_ms=9.0, settles=False)
    if how == "evicted":
        stand.send(1, messages.Evict(3, [key(1)]))
    for number in (2, 3, 4):
        stand.put(number, settles=False)
    # `write_remote` compares the bytes.
    stand.write_remote()
    assert (stand.find(key(1)) is None) == (how == "evicted")


@pytest.mark.parametrize("fails", [False, True])
def test_a_key_that_is_evicted_by_name_does_not_come_back_though_its_removal_fails_once(
    stand: RemoteStand, fails: bool
) -> None:
    stand.put(1, cost_ms=9.0)
    assert key(1) in stand.remote
    stand.send(1, messages.Evict(3, [key(1)]))
    if fails:
        stand.write_remote(error=TierTimedOut("slow"))
        assert key(1) in stand.remote
    assert ask(stand).answer == "compute", "its object is about to go"
    stand.settle()
    assert key(1) not in stand.remote


def test_an_entry_that_was_dropped_or_whose_write_failed_is_offered_again_at_its_next_use_or_put(
    stand: RemoteStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writes, "QUEUED_MAX", 2)
    publish(stand, 5, 400)
    stand.write_remote(error=TierTimedOut("slow"))
    stand.settle()
    failed, used, put = 0, 3, 4
    assert not {key(failed), key(used), key(put)} & stand.remote.keys()
    stand.use(failed)
    stand.use(used)
    assert stand.put(put, 400) == "existed"
    stand.settle()
    assert {key(failed), key(used), key(put)} <= stand.remote.keys()


def test_every_key_that_is_evicted_by_name_is_removed_however_many_wait(stand: RemoteStand) -> None:
    keys = [key(number) for number in range(3000)]
    stand.remote = dict.fromkeys(keys, FOUND)
    for first in range(0, len(keys), 500):
        stand.send(1, messages.Evict(first, keys[first : first + 500]))
    stand.settle()
    assert not stand.remote
    assert not stand.counted["removals_dropped"]


def test_a_write_waits_for_the_removal_of_its_key(stand: RemoteStand) -> None:
    stand.put(1, cost_ms=9.0)
    stand.send(1, messages.Evict(3, [key(1)]))
    stand.put(key(1), 64, client=1, cost_ms=9.0, settles=False)
    stand.put(key(2), 64, client=1, cost_ms=9.0, settles=False)
    assert len(stand.writes) == 1, "the removal is under way, and a write would find the object that goes"
    stand.settle()
    assert set(stand.remote) == {key(1), key(2)}
    assert stand.counted == {"written": 3}
