"""Hosts that compute a key once between them, and do not wait for what nobody computes."""

from __future__ import annotations

from typing import Any

from redis import Redis

from ..daemon.remote_stores.redis_server import HOST, RedisServer
from ..daemon_process import until
from .hosts import Host, key


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
