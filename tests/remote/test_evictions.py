"""Entries that are evicted by name on one host, and what other hosts find of them in the remote store."""

from __future__ import annotations

from redis import Redis

from ..daemon.remote_stores.redis_server import HOST, RedisServer
from ..daemon_process import until
from .hosts import LONG_S, Host, key


def left_alone(host: Host, first: int) -> None:
    """Has the host miss keys until it leaves the store alone."""
    numbers = iter(range(first, first + 1000))
    until(lambda: host.get(next(numbers)) and not host.remote()["serves"], "the store is left alone")


def test_an_eviction_that_waits_for_the_store_is_carried_out_when_the_daemon_ends(redis: RedisServer) -> None:
    ready = Host(redis.url)
    # The daemon does not find the server again by itself, and has long enough for it at its end.
    ready.daemon.constants = {
        "tensord.daemon.remote.breaker.FIRST_S": 3600.0,
        "tensord.daemon.remote_stores.threads.LAST_S": LONG_S,
    }
    with ready as host, Redis(HOST, redis.port) as server:
        redis.kill()
        left_alone(host, 10)
        host.client.evict(key(1))
        redis.start()
        name = f"tensord-1:{key(1).hex()}"
        server.set(name, "what a server has kept that was away")
        host.daemon.terminate()
        assert not server.exists(name)


def test_an_eviction_that_cannot_be_carried_out_when_the_daemon_ends_is_logged(redis: RedisServer) -> None:
    with Host(redis.url) as host:
        host.get(1)
        host.counted("written")
        redis.kill()
        left_alone(host, 10)
        host.client.evict(key(1))
        host.daemon.terminate()
        assert "evicted entries stay in the remote store" in host.daemon.log
