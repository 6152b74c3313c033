"""Stores in which something is wrong, and what a host says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis import Redis

from tensord.ipc import messages

from ..daemon.tiers.redis_server import HOST, RedisServer
from ..daemon_process import until
from .hosts import NAMESPACE, Host


def problems(host: Host) -> str:
    return "\n".join(host.daemon.ask(messages.HealthQuery)["problems"])


@pytest.mark.parametrize("kind", ["directory", "redis"])
def test_a_host_says_that_a_namespaces_generation_cannot_be_read_and_what_to_do(
    folder: Path, redis: RedisServer, kind: str
) -> None:
    nonsense = folder / "tensord-1" / "gen" / NAMESPACE.tag.hex() / "99999999999"
    name = f"tensord-1:gen:{NAMESPACE.tag.hex()}"
    with Redis(HOST, redis.port) as direct:
        if kind == "directory":
            nonsense.parent.mkdir(parents=True)
            nonsense.touch()
            url, says = f"dir://{folder}", f"{nonsense} is beyond the last generation"
        else:
            direct.set(name, "many")
            url, says = redis.url, f"delete the key {name}"
        with Host(url) as host:
            for number in range(5):
                assert host.get(number)
            until(lambda: says in problems(host), "the problem")
            assert host.remote()["serves"], "other namespaces are shared"
            assert says in host.remote()["bad_generations"][0]
            assert host.daemon.log.count(says) == 1
            nonsense.unlink(missing_ok=True)
            direct.delete(name)
            until(lambda: says not in problems(host), "the problem to end")
            assert host.get(9)
            host.written(1, 9)
