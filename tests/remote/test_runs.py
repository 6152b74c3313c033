"""Runs as a client sees them: entries that the daemon fetches together, and how long they are waited for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from tensord.client.computing import remote_run
from tensord.client.computing.remote_run import RemoteRun, RemoteRuns

from ..daemon_process import PATIENCE_S, Daemon, until
from .hosts import LONG_S, Host, key, tree

ENTRIES = 5
SOON_S = 0.05


@pytest.fixture(autouse=True)
def _runs_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_run, "FETCH_S", LONG_S)


@pytest.fixture
def url(tmp_path: Path) -> str:
    (tmp_path / "store").mkdir()
    return f"dir://{tmp_path / 'store'}"


@pytest.fixture
def hosts(url: str) -> Iterator[tuple[Host, Host]]:
    """The first one has stored a chain of entries, which the second one does not have."""
    with Host(url) as first, Host(url) as second:
        for number in range(ENTRIES):
            parent = key(number - 1) if number else None
            first.client.put(key(number), tree(number), cost_ms=20_000.0, parent=parent, wait=True)
        first.counted("written", ENTRIES)
        yield first, second


def there(host: Host) -> list[bool]:
    return [host.client.contains(key(number)) for number in range(ENTRIES)]


def run_of(*numbers: int) -> RemoteRun:
    return RemoteRun([key(number) for number in numbers])


def test_a_run_is_pending_until_its_entries_are_in_the_ring(hosts: tuple[Host, Host]) -> None:
    second = hosts[1]
    run = run_of(*range(ENTRIES))
    assert run.pending
    run.begin(second.client.link)
    until(lambda: not run.pending, "the run ends")
    assert there(second) == [True] * ENTRIES


def test_a_run_of_more_keys_than_one_message_may_name_is_fetched_in_several(url: str) -> None:
    with Host(url) as first, Host(url) as second:
        second.client.link.limits = structs.replace(second.client.link.limits, keys_per_request_max=2)
        for number in range(ENTRIES):
            first.put(number)
        first.counted("written", ENTRIES)
        run = run_of(*range(ENTRIES))
        run.begin(second.client.link)
        until(lambda: not run.pending, "the run ends")
        assert there(second) == [True] * ENTRIES


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_run_whose_daemon_goes_is_not_waited_for(hosts: tuple[Host, Host], how: str) -> None:
    second = hosts[1]
    second.daemon.pause()
    run = run_of(*range(ENTRIES))
    run.begin(second.client.link)
    if how == "closed":
        second.client.close()
    else:
        second.daemon.kill()
    until(lambda: not run.pending, "the run ends", PATIENCE_S)
    run = run_of(*range(ENTRIES))
    run.begin(second.client.link)
    assert not run.pending, "without a daemon at once"


def test_a_run_is_not_waited_for_longer_than_its_time(
    hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    second = hosts[1]
    second.daemon.pause()
    with monkeypatch.context() as patched:
        patched.setattr(remote_run, "FETCH_S", SOON_S)
        run = run_of(*range(ENTRIES))
    run.begin(second.client.link)
    until(lambda: not run.pending, "the time is over")
    second.daemon.resume()
    until(lambda: all(there(second)), "the daemon fetches it all the same")
    assert not run.pending


def test_while_the_daemon_owes_an_answer_nobody_waits_for_another_one(
    hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    second, runs = hosts[1], RemoteRuns()
    link = second.client.link
    second.daemon.pause()
    with monkeypatch.context() as patched:
        patched.setattr(remote_run, "FETCH_S", SOON_S)
        late = runs.new(link, [key(0)])
    late.begin(link)
    late.wait(time.monotonic() + PATIENCE_S)
    assert not late.ended
    assert runs.new(link, [key(1)]).ended
    second.daemon.resume()
    until(lambda: late.ended, "the daemon answers")
    assert runs.new(link, [key(1)]).pending


def test_a_forked_process_waits_for_no_answer_to_its_parent(
    hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    second, runs = hosts[1], RemoteRuns()
    second.daemon.pause()
    with monkeypatch.context() as patched:
        patched.setattr(remote_run, "FETCH_S", SOON_S)
        late = runs.new(second.client.link, [key(0)])
    late.begin(second.client.link)
    late.wait(time.monotonic() + PATIENCE_S)
    pid = os.fork()
    if not pid:
        os._exit(runs.new(second.client.link, [key(1)]).ended)
    assert os.waitpid(pid, 0)[1] == 0
    assert runs.new(second.client.link, [key(1)]).ended, "its parent does"
    second.daemon.resume()


def test_without_a_remote_store_no_run_is_waited_for() -> None:
    with Daemon() as daemon:
        client = daemon.start().client()
        assert not client.link.remote
        assert not RemoteRuns().new(client.link, [key(0)]).pending
