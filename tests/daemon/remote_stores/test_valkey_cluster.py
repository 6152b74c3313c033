"""A Redis cluster of two servers as a remote store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from tensord.errors import TierRefused, TierUnavailable
from tests.daemon_process import until

from .conformance import claims
from .conftest import Opened
from .entries import get, heads, key_of, made, put
from .servers import HOST, RedisServer
from .test_valkey import name_of

HALF = 8192
WORDS = ("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no", "--cluster-node-timeout", "60000")


class Cluster:
    """Two servers, each with half of the slots."""

    def __init__(self, first: RedisServer, second: RedisServer) -> None:
        self.servers = [first, second]
        self.url = f"redis://{HOST}:{first.port}?cluster=yes"
        self.clients: list[Any] = [redis.Redis(HOST, server.port) for server in self.servers]
        for number, client in enumerate(self.clients):
            client.execute_command("CLUSTER ADDSLOTSRANGE", number * HALF, number * HALF + HALF - 1)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        self.clients[0].execute_command("CLUSTER MEET", HOST, second.port)
        until(lambda: all(map(self._serves, self.clients)), "the cluster to serve its slots")

    def slot(self, key: bytes) -> int:
        return int(self.clients[0].execute_command("CLUSTER KEYSLOT", name_of(key)))

    def _serves(self, client: Any) -> bool:
        info = client.execute_command("CLUSTER INFO")
        return (info["cluster_state"], info["cluster_slots_ok"], info["cluster_size"]) == ("ok", str(2 * HALF), "2")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        made_once = Cluster(*(stack.enter_context(RedisServer(*WORDS)) for _ in range(2)))
        yield made_once
        for client in made_once.clients:
            client.close()


def keys_by_home(cluster: Cluster) -> list[list[int]]:
    """Numbers of entries, by the server that has their slots."""
    found: list[list[int]] = [[], []]
    for number in range(20):
        found[cluster.slot(key_of(number)) // HALF].append(number)
    assert all(found)
    return found


def test_entries_are_spread_over_the_servers_and_their_headers_come_back_in_order(
    cluster: Cluster, opened: Opened
) -> None:
    store = opened(cluster.url)
    entries = [made(number) for number in range(20)]
    put(store, *entries)
    assert [client.dbsize() for client in cluster.clients] == [len(home) for home in keys_by_home(cluster)]
    keys = [entry.key for entry in entries]
    assert heads(store, keys) == [entry.entry for entry in entries]
    assert [get(store, entry.key) for entry in entries] == [(entry.payload, entry.entry) for entry in entries]
    store.remove(keys)
    assert not any(heads(store, keys))
    # A cluster gives out generations and claims, too.
    assert store.raise_generation(key_of(1)[:8], 3) == 3
    assert store.generations([key_of(1)[:8], b"another."]) == [3, 0]
    for number in range(4):
        assert claims(store, key_of(number), b"host 1", 60.0) and not claims(store, key_of(number), b"host 2", 60.0)
        assert store.unclaim(key_of(number), b"host 1")
    alone = opened(cluster.servers[0].url)
    with pytest.raises(TierRefused, match="add cluster=yes to the URL"):
        put(alone, made(keys_by_home(cluster)[1][0]))


def test_the_death_of_one_server_costs_its_own_keys_only(cluster: Cluster, opened: Opened) -> None:
    store = opened(cluster.url)
    (here, *_), (there, *_) = keys_by_home(cluster)
    put(store, made(here), made(there))
    cluster.servers[1].kill()
    with pytest.raises(TierUnavailable):
        get(store, key_of(there))
    assert get(store, key_of(here)) is not None
