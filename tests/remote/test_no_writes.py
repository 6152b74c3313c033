"""Stores that are full or read-only, and stores that are not there when a daemon starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from redis import Redis

from tensord.daemon.web import metrics
from tensord.ipc.messages import control as messages

from ..daemon.remote_stores.servers import HOST, RedisServer
from ..daemon.remote_stores.test_valkey_servers import make_replica
from ..daemon_process import PATIENCE_S, until
from .hosts import MIB, Host

NO_WRITES = "the remote store takes no writes for now"
AGAIN = "the remote store takes writes again"


def health(host: Host) -> str:
    return "\n".join(host.daemon.ask(messages.HealthQuery)["problems"])


def is_full(host: Host, numbers: Iterator[int], payload_bytes: int = 100_000) -> bool:
    """Puts an entry, and says what the status has then."""
    host.put(next(numbers), payload_bytes)
    return bool(host.remote()["full"])


def metric(host: Host, name: str) -> float:
    latency = host.daemon.ask(messages.LatencyQuery)
    lines = metrics.text({**host.daemon.status(), "latency": latency})[0].decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


class Store:
    """A store with the entry of 1. `fill`: from now on it has no room, until `free`."""

    def __init__(self, url: str, fill: Callable[[], object], free: Callable[[], object]) -> None:
        self.url = url
        self.fill = fill
        self.free = free
        with Host(url) as host:
            host.get(1)
            host.counted("written")


@pytest.fixture(params=["redis", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "directory":
        of_others = tmp_path / "tensord-1" / "tmp" / "host-1-1"
        url = f"dir://{tmp_path}?bytes={10 * MIB}"
        yield Store(url, lambda: of_others.write_bytes(bytes(10 * MIB)), of_others.unlink)
        return
    server: RedisServer = request.getfixturevalue("redis")
    with Redis(HOST, server.port) as direct:
        yield Store(server.url, lambda: direct.config_set("maxmemory", 1), lambda: direct.config_set("maxmemory", 0))


def test_a_full_store_says_so_and_is_read_until_it_has_room_again(store: Store) -> None:
    with Host(store.url) as host:
        store.fill()
        assert not host.get(1), "it is read"
        numbers = iter(range(100, 100_000))
        until(partial(is_full, host, numbers, MIB), "the store to be full")
        assert host.remote()["serves"] and not host.remote()["read_only"]
        assert "takes no writes" in health(host)
        assert (metric(host, "tensord_remote_full"), metric(host, "tensord_remote_serves")) == (1, 1)
        before = host.remote()
        for number in range(10, 20):
            assert host.get(number), "a miss is a miss"
        about = host.remote()
        assert not about.get("failed") and not about.get("waited")
        lost = [figures.get("write_failed", 0) + figures.get("dropped", 0) for figures in (before, about)]
        assert lost[1] - lost[0] >= 9, "what is not written is counted; one may be tried now"
        assert about["serves"] and host.daemon.log.count(NO_WRITES) == 1
        store.free()
        until(lambda: not is_full(host, numbers), "a write to be taken")
        assert host.daemon.log.count(NO_WRITES) == host.daemon.log.count(AGAIN) == 1
        assert metric(host, "tensord_remote_full") == 0 and not health(host)


def test_a_replica_is_read_and_says_that_it_takes_no_writes(redis: RedisServer) -> None:
    with Host(redis.url) as host, RedisServer() as replica:
        host.get(1)
        host.counted("written")
        make_replica(replica, redis)
        with Host(replica.url) as second:
            assert second.get(2), "nobody has it"
            until(lambda: second.remote()["read_only"], "a write is refused")
            assert not second.get(1), "it is read"
            assert not second.remote().get("failed") and second.remote()["serves"]
            assert "name the primary in the URL" in health(second)
            assert metric(second, "tensord_remote_read_only") == 1
            assert second.daemon.log.count(NO_WRITES) == 1


@pytest.mark.parametrize("kind", ["directory", "redis"])
def test_a_store_that_is_not_there_at_the_start_is_left_alone_and_found_without_any_client(
    redis: RedisServer, tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "store"
    redis.kill()
    with Host(redis.url if kind == "redis" else f"dir://{folder}") as host:
        until(lambda: not host.remote()["serves"], "the store is left alone")
        assert "left alone" in health(host) and metric(host, "tensord_remote_serves") == 0
        assert host.get(1)
        assert not host.remote().get("failed"), "no miss has waited for it"
        folder.mkdir()
        redis.start()
        until(lambda: host.remote()["serves"], "the store is found", 4 * PATIENCE_S)
        assert host.daemon.log.count("left alone") == 1
        assert host.daemon.log.count("the remote store serves again") == 1
        assert not health(host)
