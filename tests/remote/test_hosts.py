"""Two hosts that share a remote store: what one has computed, the other reads; and nothing that happens to the store
costs a host its own entries, an exception or a wrong byte."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tensord.client.computing.claim import Claim
from tensord.daemon.remote_stores.form import OBJECT_HEADER_BYTES
from tensord.ipc.messages import control as messages

from ..daemon.remote_stores.servers import RedisServer
from ..daemon_process import PATIENCE_S, until
from .hosts import MIB, NAMESPACE, SHORT_S, Host, aside, check, key, tree

SIZES = [100, 100_000, 3 * MIB, 20 * MIB]


@pytest.fixture(params=["directory", "redis"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "directory":
        return f"dir://{request.getfixturevalue('folder')}"
    return str(request.getfixturevalue("redis").url)


def granted(claim: Claim) -> bool:
    return claim.state == "compute"


def objects(folder: Path) -> list[Path]:
    """The files of a directory's objects."""
    return [path for path in folder.glob("tensord-1/??/*") if path.is_file()]


@pytest.mark.parametrize("payload_bytes", SIZES)
def test_what_one_host_has_computed_another_reads(url: str, payload_bytes: int) -> None:
    with Host(url) as first, Host(url) as second:
        assert first.get(1, payload_bytes)
        first.counted("written")
        assert not second.get(1, payload_bytes), "it was computed twice"
        assert second.remote()["fetched"] == 1
        assert not second.get(1, payload_bytes)
        assert second.remote()["fetched"] == 1, "a stored entry is not read again"
        assert second.remote()["corrupt"] == 0


def test_what_two_hosts_miss_at_once_is_computed_by_one(redis: RedisServer) -> None:
    with Host(redis.url) as first, Host(redis.url) as second:
        for number in range(5):
            claim = first.client.claim(key(number), within_s=30.0)
            until(partial(granted, claim), "the first host computes")
            thread, outcome = aside(partial(second.get, number, takes_s=30.0))
            until(lambda number=number: second.remote().get("waited", 0) > number, "the second host waits")  # type: ignore[misc]
            assert first.client.put(key(number), tree(number), cost_ms=9000.0, wait=True).state == "stored"
            claim.stored()
            thread.join()
            assert outcome == [False], "it was computed twice"


# ---- faults


def test_a_stopped_store_costs_one_wait_and_no_entry(redis: RedisServer) -> None:
    with Host(redis.url, remote_timeout_s=0.5) as host:
        assert host.get(1)
        host.counted("written")
        with redis.paused():
            for number in range(100, 140):
                assert host.get(number), "somebody else cannot have it"
                assert not host.get(number), "its own entries are served"
            host.uses_store(uses=False)
            waits = host.remote().get("failed", 0)
            assert waits <= 20, "every miss has waited for it"
            assert host.daemon.log.count("left alone") == 1
        host.uses_store(uses=True)
        assert host.daemon.log.count("serves again") == 1


@pytest.mark.parametrize("damage", ["a bit", "of another key"])
def test_wrong_bytes_in_the_store_are_computed_again(folder: Path, damage: str) -> None:
    """And replaced by who computes them."""
    url = f"dir://{folder}"
    with Host(url) as first:
        first.get(1)
        first.get(2)
        first.counted("written", 2)
    one, other = sorted(objects(folder), key=lambda path: path.name != key(1).hex())
    raw = bytearray(one.read_bytes())
    if damage == "a bit":
        raw[OBJECT_HEADER_BYTES + 50_000] ^= 1
    else:
        raw[:] = other.read_bytes()
    one.write_bytes(raw)
    with Host(url) as second, Host(url) as third:
        assert second.get(1)
        assert not second.get(1)
        assert not second.get(2)
        assert second.remote()["corrupt"] in (1, 2), "once when it is read, once when it is written anew"
        assert second.remote()["serves"], "a wrong object is no failure of the store"
        second.counted("written")
        assert not third.get(1)


def test_a_daemon_that_is_killed_during_a_fetch_leaves_nothing_wrong(redis: RedisServer) -> None:
    with Host(redis.url) as first, Host(redis.url) as second:
        first.get(1, 20 * MIB)
        first.counted("written")
        for _ in range(3):
            with redis.paused():
                thread, outcome = aside(lambda: second.get(1, 20 * MIB, takes_s=60.0))
                until(lambda: second.remote()["fetches"], "the key is sought")
                second.daemon.kill()
            second.daemon.start()
            thread.join()
            assert not outcome or not isinstance(outcome[0], BaseException), outcome
            second.client.close()
            second.client = second.daemon.client()
            assert second.client.get(key(1)) is None or second.computed
            second.get(1, 20 * MIB, takes_s=SHORT_S)
            second.client.evict(key(1))
            second.idle()
            first.client.evict(key(1))
            first.get(1, 20 * MIB, takes_s=SHORT_S)
            first.idle()


@pytest.mark.parametrize("what", ["fetch", "write"])
def test_a_daemon_that_is_asked_to_stop_meanwhile_ends_in_the_stores_time(redis: RedisServer, what: str) -> None:
    with Host(redis.url, remote_timeout_s=4.0) as host:
        with redis.paused():
            if what == "fetch":
                thread, outcome = aside(lambda: host.get(1, takes_s=60.0))
                until(lambda: host.remote()["fetches"], "the key is sought")
            else:
                thread, outcome = aside(lambda: host.put(1))
                until(lambda: host.remote()["writes"], "the entry is being written")
                thread.join()
            assert host.daemon.terminate() == 0
        host.daemon.start()
        thread.join()
        assert outcome and not isinstance(outcome[0], BaseException), outcome
        until(lambda: host.client.connected, "the client is back")
        assert what == "fetch" or not host.get(1), "it is in the ring"


def test_hosts_that_invalidate_without_the_store_share_nothing_before_they_agree(redis: RedisServer) -> None:
    with Host(redis.url) as first, Host(redis.url) as second:
        first.get(1)
        first.counted("written")
        assert not second.get(1)
        redis.kill()
        for host in (first, second):
            assert host.client.invalidate(NAMESPACE).generation == 1
            assert host.get(2, generation=1)
        redis.start()
        until(lambda: first.client.current(NAMESPACE).generation > 1, "one of two equal numbers is given up")
        until(
            lambda: first.client.current(NAMESPACE).generation == second.client.current(NAMESPACE).generation,
            "the hosts agree",
        )
        generation = first.client.current(NAMESPACE).generation
        assert first.get(2, generation=generation), "what is of before the agreement may be another host's"
        first.written(2, 2, generation=generation)
        until(lambda: not second.get(len(second.computed) + 100, generation=generation) or True, "")
        second.get(2, generation=generation)


def fetch(host: Host, keys: list[bytes]) -> int:
    """Has the host's daemon fetch a run. Returns how many of its keys are in the ring then."""
    assert host.client.link.remote
    asked = host.client.link.ask(lambda number: messages.FetchRun(number, keys), PATIENCE_S)
    count: int = asked.result(PATIENCE_S).count
    return count


@pytest.mark.parametrize("payload_bytes", [100, 3 * MIB])
def test_a_chain_that_one_host_has_stored_is_fetched_with_one_request(url: str, payload_bytes: int) -> None:
    with Host(url) as first, Host(url) as second:
        keys = first.chain(5, payload_bytes)
        assert fetch(second, [*keys, key(5)]) == 5
        for number, name in enumerate(keys):
            lease = second.client.get(name, verify=True)
            check(lease, number, payload_bytes)
        second.client.evict(keys[2])
        assert [second.client.contains(name) for name in keys] == [True, True, False, False, False], "no chain any more"
