"""Hosts that compute a key once between them, and do not wait for what nobody computes."""

from __future__ import annotations

from typing import Any

from redis import Redis

from ..daemon.tiers.redis_server import HOST, RedisServer
from ..daemon_process import until
from .hosts import LONG_S, Host, check, key


def claimed(host: Host, number: int, within_s: float) -> Any:
    """A client's claim, once it may compute."""
    claim = host.client.claim(key(number), within_s=within_s)
    assert decided(claim) == "compute"
    return claim


def decided(claim: Any) -> str:
    """The state of a claim once it does not wait any more."""
    until(lambda: claim.state not in ("asked", "waiting"), "the claim is decided")
    state: str = claim.state
    return state


def test_a_computation_that_fails_keeps_nobody_waiting(redis: RedisServer) -> None:
    with Host(redis.url) as first, Host(redis.url) as second, Redis(HOST, redis.port) as server:
        for number in range(3):
            claimed(first, number, 10.0).abandon()
            claimed(first, number, 10.0).abandon()
            until(lambda: not server.keys("*:claim:*"), "the store has no claim any more")
            claimed(second, number, 10.0).abandon()
            until(lambda: not server.keys("*:claim:*"), "the store has no claim any more")
        assert not first.remote().get("waited") and not second.remote().get("waited")


def test_a_host_does_not_wait_for_its_own_claim_on_an_entry_that_the_store_has_lost(redis: RedisServer) -> None:
    with Host(redis.url) as host, Redis(HOST, redis.port) as server:
        host.get(1, takes_s=10.0)
        host.counted("written")
        assert server.keys("*:claim:*"), "it ends by itself"
        server.delete(f"tensord-1:{key(1).hex()}")
        host.client.clear()
        assert host.get(1, takes_s=10.0)
        assert not host.remote().get("waited")


def test_all_of_many_keys_that_are_missed_at_once_are_found(redis: RedisServer) -> None:
    count = 200
    with Host(redis.url) as first, Host(redis.url) as second:
        for number in range(count):
            first.put(number, 1000)
        first.counted("written", count)
        claims = [second.client.claim(key(number), within_s=LONG_S) for number in range(count)]
        for number, claim in enumerate(claims):
            assert decided(claim) == "hit"
            found = second.client.get(key(number))
            check(found, number, 1000)
        assert second.remote()["fetched"] == count
        assert not second.remote().get("unasked")
