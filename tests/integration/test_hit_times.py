"""The daemon's histogram of hits has hits of real clients, through forks, restarts and ends of both sides."""

from __future__ import annotations

import os
from typing import Any

import pytest

import tensord
from tensord.client.core import hit_times
from tensord.client.core.hit_times import arm
from tensord.daemon.reports.request_times import HIT_S_MAX
from tensord.ipc.messages import LatencyQuery
from tensord.shm.lanes import TIMED_AT, TIMES, TIMES_AT

from ..daemon_process import PATIENCE_S, Daemon, until
from ..memory_bench import key

KEY = key(1)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hit_times, "TIME_EVERY_S", 0.0)
    monkeypatch.setattr(hit_times, "SKIPPED_MAX", 1)


def hits(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.ask(LatencyQuery)["hits"]
    return found


def timed(daemon: Daemon) -> int:
    return sum(hits(daemon)["counts"])


def reads_until_timed(daemon: Daemon, client: tensord.Client, before: int = 0) -> None:
    def read() -> bool:
        assert client.get(KEY) is not None
        return timed(daemon) > before

    until(read, "a hit to be timed")


def test_a_clients_hits_are_in_the_histogram_and_its_counts_are_as_without(daemon: Daemon) -> None:
    client = daemon.client()
    client.put(KEY, 1, wait=True)
    assert client.get(key(2)) is None
    assert timed(daemon) == 0
    reads = 0
    while not timed(daemon):
        assert client.get(KEY) is not None
        reads += 1
    found = hits(daemon)
    assert 0 < found["sum"] / sum(found["counts"]) <= HIT_S_MAX
    until(lambda: daemon.store("hits") == reads, "each hit to be counted once")
    assert daemon.store("misses") == 1


def test_both_sides_of_a_fork_go_on(daemon: Daemon) -> None:
    client = daemon.client()
    client.put(KEY, 1, wait=True)
    lease = client.get(KEY)
    view = client.link.view
    assert view is not None and lease is not None
    arm(view, 0)
    child = os.fork()
    if child == 0:
        try:
            good = view.get(KEY) is not None and client.wait_connected(PATIENCE_S) and client.get(KEY) is not None
        finally:
            os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.wait_connected(PATIENCE_S)
    reads_until_timed(daemon, client, timed(daemon))


def test_a_client_that_writes_anything_is_counted_within_bounds_and_the_others_go_on(daemon: Daemon) -> None:
    liar, other = daemon.client(), daemon.client()
    other.put(KEY, 1, wait=True)
    view = liar.link.view
    assert view is not None
    for number in range(TIMES):
        view.lane.words[TIMES_AT + number] = (1 << 64) - 1 - number
    view.lane.words[TIMED_AT] = (1 << 64) - 1
    until(lambda: timed(daemon) >= TIMES, "the lies to be read")
    found = hits(daemon)
    assert found["counts"][-1] == found["sum"] / HIT_S_MAX == TIMES
    for count in (5, 0, 1 << 63):
        view.lane.words[TIMED_AT] = count
    assert liar.get(KEY) is not None
    reads_until_timed(daemon, other, TIMES)
