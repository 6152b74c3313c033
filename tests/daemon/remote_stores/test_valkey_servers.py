"""Redis servers that can be read and take no writes: a replica, one whose user may only read. A number of a generation
that is none. A cluster of two servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from tensord.daemon.remote_stores.store import RemoteStore
from tensord.errors import TierReadOnly, TierRefused, TierTooLarge, TierUnavailable
from tests.daemon_process import until

from .conformance import MIB, claims
from .conftest import Opened
from .entries import get, heads, key_of, made, put
from .servers import HOST, RedisServer
from .test_valkey import name_of

READER = ("--user", "reader", "on", "nopass", "~tensord-*", "-@all", "+get", "+getrange")


def make_replica(server: RedisServer, of: RedisServer) -> None:
    """Returns once the server has all of the other's objects, and refuses writes."""
    with redis.Redis(HOST, server.port) as direct:
        client: Any = direct
        client.replicaof(HOST, of.port)

        def has_all() -> bool:
            about: Any = direct.info("replication")
            return bool(about["master_link_status"] == "up")

        until(has_all, "the replica to be complete")


@pytest.fixture(params=["replica", "user"])
def read_only(request: pytest.FixtureRequest, opened: Opened) -> Iterator[RemoteStore]:
    """A store with the object of 1, to which this host cannot write."""
    with RedisServer(*READER) as server, RedisServer() as other:
        put(opened(server.url), made(1))
        if request.param == "replica":
            make_replica(other, server)
            yield opened(other.url)
        else:
            yield opened(f"redis://reader:any@{HOST}:{server.port}")


def test_a_server_that_takes_no_writes_says_so_is_read_and_has_no_claims(read_only: RemoteStore) -> None:
    writes: list[Callable[[], object]] = [lambda: put(read_only, made(2)), lambda: read_only.remove([key_of(1)])]
    for write in writes:
        with pytest.raises(TierReadOnly, match="takes no writes"):
            write()
    assert get(read_only, key_of(1)) is not None
    assert [each is not None for each in heads(read_only, [key_of(1), key_of(2)])] == [True, False]
    assert read_only.generations([key_of(1)[:8]]) == [0]
    assert read_only.claim(key_of(3), b"host 1", 60.0) is None


def test_an_object_that_no_server_takes_does_not_mean_that_the_server_is_full(
    server: RedisServer, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensord.daemon.remote_stores.valkey.VALUE_BYTES_MAX", MIB)
    with pytest.raises(TierTooLarge, match="larger than a value"):
        put(opened(server.url), made(1, 2 * MIB))


@pytest.mark.parametrize("text", ["many", "99999999999", "-1", ""])
def test_a_generation_that_is_no_number_is_refused_and_said(server: RedisServer, opened: Opened, text: str) -> None:
    tag = key_of(1)[:8]
    name = f"tensord-1:gen:{tag.hex()}"
    store = opened(server.url)
    with redis.Redis(HOST, server.port) as direct:
        direct.set(name, text)
        for call in (lambda: store.generations([tag]), lambda: store.raise_generation(tag, 1)):
            with pytest.raises(TierRefused, match=f"delete the key {name}"):
                call()
        direct.delete(name)
    assert store.raise_generation(tag, 1) == 1


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
