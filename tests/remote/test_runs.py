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
from .hosts import LONG_S, Host, key

ENTRIES = 5
SOON_S = 0.05


@pytest.fixture(autouse=True)
def _runs_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_run, "FETCH_S", LONG_S)


@pytest.fixture
def hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """The first one has stored a chain of entries, which the second one does not have."""
    with Host(f"dir://{folder}") as first, Host(f"dir://{folder}") as second:
        first.chain(ENTRIES)
        yield first, second


def there(host: Host) -> list[bool]:
    return [host.client.contains(key(number)) for number in range(ENTRIES)]


def run_of(*numbers: int) -> RemoteRun:
    return RemoteRun([key(number) for number in numbers])


@pytest.mark.parametrize("keys_max", [1000, 2])
def test_a_run_is_pending_until_its_entries_are_in_the_ring_however_many_messages_it_takes(
    hosts: tuple[Host, Host], keys_max: int
) -> None:
    second = hosts[1]
    second.client.link.limits = structs.replace(second.client.link.limits, keys_per_request_max=keys_max)
    run = run_of(*range(ENTRIES))
    assert run.pending
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


def test_while_the_daemon_owes_an_answer_nobody_waits_for_another_one_but_a_forked_process_is_owed_none(
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
    pid = os.fork()
    if not pid:
        os._exit(runs.new(link, [key(1)]).ended)
    assert os.waitpid(pid, 0)[1] == 0
    assert runs.new(link, [key(1)]).ended
    second.daemon.resume()
    until(lambda: late.ended, "the daemon answers")
    assert runs.new(link, [key(1)]).pending


def test_without_a_remote_store_no_run_is_waited_for() -> None:
    with Daemon() as daemon:
        client = daemon.start().client()
        assert not client.link.remote
        assert not RemoteRuns().new(client.link, [key(0)]).pending
