"""Engines on two hosts with one remote store: each a daemon of its own here, and a directory for the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tensord
from tensord.client.vllm.kv import remote_run
from tensord.client.vllm.kv.remote_run import RemoteRun

from ...daemon_process import PATIENCE_S, Daemon, until
from ...remote.hosts import Host, key, tree
from .conftest import BLOCK_TOKENS, KVStand, StartEngine, asked, fresh_text, with_kv

ENTRIES = 5


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
            first.client.put(key(number), tree(number), cost_ms=500.0, parent=parent, wait=True)
        first.counted("written", ENTRIES)
        yield first, second


def there(host: Host) -> list[bool]:
    return [host.client.contains(key(number)) for number in range(ENTRIES)]


def run_of(*numbers: int) -> RemoteRun:
    return RemoteRun([key(number) for number in numbers])


def test_an_engine_computes_only_its_own_suffix_of_a_prompt_that_another_host_has_computed(
    kv_model: Path, start_engine: StartEngine, url: str
) -> None:
    with Daemon(remote_url=url) as daemon, Daemon(remote_url=url) as other_daemon:
        daemon.start()
        other_daemon.start()
        with (
            start_engine(kv_model, **with_kv(daemon.socket)) as engine,
            start_engine(kv_model, **with_kv(other_daemon.socket)) as other,
            tensord.Client(daemon.socket) as client,
        ):
            engine.wait_up()
            other.wait_up()
            stand = KVStand(daemon, engine, other, engine)
            text = fresh_text()
            right, keys = stand.store(engine, text=text)
            # A second use has them written: computing them took a time that nobody knows.
            assert all(client.get(each) is not None for each in keys)
            daemon.until(lambda status: status["store"]["remote"].get("written") == len(keys), "blocks are written")
            answer, computed = asked(other, text=text)
            assert answer == right
            assert computed <= 2 * BLOCK_TOKENS
            assert other_daemon.status()["store"]["remote"]["fetched"] == len(keys)
            # Of what no host has computed, the store finds nothing, and no answer waits for it for long.
            new = fresh_text()
            assert other.generate(text=new) == engine.generate(text=new)


def test_a_run_is_pending_until_its_entries_are_in_the_ring(hosts: tuple[Host, Host]) -> None:
    second = hosts[1]
    run = run_of(*range(ENTRIES))
    assert run.pending
    run.begin(second.client)
    until(lambda: not run.pending, "the run ends")
    assert there(second) == [True] * ENTRIES


def test_a_run_of_more_keys_than_one_message_may_name_is_fetched_in_several(url: str) -> None:
    with Host(url) as first, Host(url, limits_keys_per_request_max=2) as second:
        for number in range(ENTRIES):
            first.put(number)
        first.counted("written", ENTRIES)
        run = run_of(*range(ENTRIES))
        run.begin(second.client)
        until(lambda: not run.pending, "the run ends")
        assert there(second) == [True] * ENTRIES


def test_a_run_of_no_keys_is_not_waited_for() -> None:
    assert not run_of().pending


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_run_whose_daemon_goes_is_not_waited_for(hosts: tuple[Host, Host], how: str) -> None:
    second = hosts[1]
    second.daemon.pause()
    run = run_of(*range(ENTRIES))
    run.begin(second.client)
    if how == "closed":
        second.client.close()
    else:
        second.daemon.kill()
    until(lambda: not run.pending, "the run ends", PATIENCE_S)
    run = run_of(*range(ENTRIES))
    run.begin(second.client)
    assert not run.pending, "without a daemon at once"


def test_a_run_is_not_waited_for_longer_than_its_time(
    hosts: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_run, "FETCH_S", 0.05)
    second = hosts[1]
    second.daemon.pause()
    run = run_of(*range(ENTRIES))
    run.begin(second.client)
    until(lambda: not run.pending, "the time is over")
    second.daemon.resume()
    until(lambda: all(there(second)), "the daemon fetches it all the same")
    assert not run.pending
