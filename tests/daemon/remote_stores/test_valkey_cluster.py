"""A Redis cluster of two servers as a remote store: the conformance suite, and keys that move between the servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis
from redis.exceptions import OutOfMemoryError

from tensord.daemon.remote_stores.form import RemoteEntry
from tensord.daemon.remote_stores.urls import open_store
from tensord.errors import TierRefused, TierUnavailable
from tests.daemon_process import until

from .conformance import AnyStore
from .entries import get, key_of, made, put, soon
from .redis_server import HOST, RedisServer
from .server_conformance import AnyServer, Server

HALF = 8192
WORDS = ("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no", "--cluster-node-timeout", "60000")


class Cluster(Server):
    """Two servers, each with half of the slots."""

    def __init__(self, first: RedisServer, second: RedisServer) -> None:
        self.servers = [first, second]
        self.url = f"redis://{HOST}:{first.port}?cluster=yes"
        self.clients: list[Any] = [redis.Redis(HOST, server.port) for server in self.servers]
        for number, client in enumerate(self.clients):
            client.execute_command("CLUSTER ADDSLOTSRANGE", number * HALF, number * HALF + HALF - 1)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        self.clients[0].execute_command("CLUSTER MEET", HOST, second.port)
        self.ids = [client.execute_command("CLUSTER MYID").decode() for client in self.clients]
        self.wait()

    def slot(self, key: bytes) -> int:
        return int(self.clients[0].execute_command("CLUSTER KEYSLOT", name_of(key)))

    def give(self, slot: int, owner: int) -> None:
        """From now on the server `owner` has the slot."""
        for client in (self.clients[owner], self.clients[1 - owner]):
            client.execute_command("CLUSTER SETSLOT", slot, "STABLE")
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", self.ids[owner])

    def raw(self, key: bytes) -> bytes:
        found = self.clients[self.slot(key) // HALF].get(name_of(key))
        assert isinstance(found, bytes)
        return found

    def set_raw(self, key: bytes, stored: bytes) -> None:
        self.clients[self.slot(key) // HALF].set(name_of(key), stored)

    def fill(self) -> None:
        for client in self.clients:
            client.config_set("maxmemory", client.info("memory")["used_memory"] + 100_000)
            client.config_set("maxmemory-policy", "noeviction")
            name = f"filler{{{name_of(key_of(2))}}}"  # the part in braces chooses the slot
            if client is self.clients[self.slot(key_of(2)) // HALF]:
                try:
                    while True:
                        client.append(name, bytes(50_000))
                except OutOfMemoryError:
                    pass

    def pause(self) -> None:
        for server in self.servers:
            server.pause()

    def resume(self) -> None:
        for server in self.servers:
            server.resume()

    def kill(self) -> None:
        for server in self.servers:
            server.kill()

    def restart(self) -> None:
        for server in self.servers:
            if not server.running:
                server.start()
        self.wait()

    def reset(self) -> None:
        """As it was at first, for the next test."""
        self.restart()
        for client in self.clients:
            client.config_set("maxmemory", 0)
            client.flushall()

    def close(self) -> None:
        for client in self.clients:
            client.close()

    def wait(self) -> None:
        """Until both servers serve all slots. A restarted one takes two seconds."""
        until(lambda: all(self._serves(client) for client in self.clients), "the cluster to serve its slots")

    def _serves(self, client: Any) -> bool:
        info = client.execute_command("CLUSTER INFO")
        return (info["cluster_state"], info["cluster_slots_ok"], info["cluster_size"]) == ("ok", str(2 * HALF), "2")


def name_of(key: bytes) -> str:
    return f"tensord-1:{key.hex()}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        made_once = Cluster(*(stack.enter_context(RedisServer(*WORDS)) for _ in range(2)))
        stack.callback(made_once.close)
        yield made_once


@pytest.fixture
def backend(cluster: Cluster) -> Iterator[Cluster]:
    yield cluster
    cluster.reset()


class TestCluster(AnyStore, AnyServer):
    pass


def keys_by_home(backend: Cluster) -> list[list[int]]:
    """Numbers of entries, by the server that has their slots."""
    found: list[list[int]] = [[], []]
    for number in range(20):
        found[backend.slot(key_of(number)) // HALF].append(number)
    assert all(found)
    return found


def test_entries_are_spread_over_the_servers_and_their_headers_come_back_in_order(backend: Cluster) -> None:
    store = backend.open()
    entries = [made(number) for number in range(20)]
    put(store, *entries)
    assert [client.dbsize() for client in backend.clients] == [len(home) for home in keys_by_home(backend)]
    assert [each and each.meta for each in store.heads([e.key for e in entries], soon())] == [e.meta for e in entries]
    assert [get(store, entry.key) for entry in entries] == [(entry.payload, entry.meta) for entry in entries]
    store.close()


def test_a_slot_that_has_moved_is_followed(backend: Cluster) -> None:
    store = backend.open()
    number = keys_by_home(backend)[0][0]
    put(store, made(number))
    slot = backend.slot(key_of(number))
    backend.clients[0].delete(name_of(key_of(number)))
    backend.give(slot, 1)
    assert get(store, key_of(number)) is None
    put(store, made(number))
    assert backend.clients[1].exists(name_of(key_of(number)))
    told = backend.clients[0].info("errorstats")["errorstat_MOVED"]
    assert get(store, key_of(number)) is not None
    assert backend.clients[0].info("errorstats")["errorstat_MOVED"] == told, "the store knows the new server by now"
    store.close()
    backend.clients[1].flushall()
    backend.give(slot, 0)


def test_a_slot_that_is_moving_is_served_by_both_servers(backend: Cluster) -> None:
    store = backend.open()
    number = keys_by_home(backend)[0][0]
    slot = backend.slot(key_of(number))
    backend.clients[1].execute_command("CLUSTER SETSLOT", slot, "IMPORTING", backend.ids[0])
    backend.clients[0].execute_command("CLUSTER SETSLOT", slot, "MIGRATING", backend.ids[1])
    assert get(store, key_of(number)) is None
    put(store, made(number))
    assert get(store, key_of(number)) is not None
    assert store.heads([key_of(number)], soon()) == [RemoteEntry(made(number).meta, len(made(number).payload))]
    assert not backend.clients[0].dbsize()
    assert backend.clients[1].dbsize() == 1
    store.close()
    backend.clients[1].flushall()
    backend.give(slot, 0)


def test_the_death_of_one_server_costs_its_own_keys_only(backend: Cluster) -> None:
    store = backend.open()
    (here, *_), (there, *_) = keys_by_home(backend)
    put(store, made(here), made(there))
    backend.servers[1].kill()
    for _ in range(2):
        with pytest.raises(TierUnavailable):
            get(store, key_of(there))
        assert get(store, key_of(here)) is not None
    backend.restart()
    assert get(store, key_of(there)) is None
    store.close()


def test_a_server_of_a_cluster_without_the_option_says_what_to_write(backend: Cluster) -> None:
    store = open_store(f"redis://{HOST}:{backend.servers[0].port}")
    with pytest.raises(TierRefused, match="add cluster=yes to the URL"):
        put(store, made(keys_by_home(backend)[1][0]))
    store.close()


def test_a_cluster_that_has_no_server_for_a_slot_is_named(backend: Cluster) -> None:
    (here, *_), _ = keys_by_home(backend)
    slot = backend.slot(key_of(here))
    for client in backend.clients:
        client.execute_command("CLUSTER DELSLOTS", slot)
    store = backend.open()
    with pytest.raises(TierUnavailable, match=f"no server of the cluster has slot {slot}"):
        get(store, key_of(here))
    store.close()
    backend.clients[0].execute_command("CLUSTER ADDSLOTS", slot)
    backend.give(slot, 0)


def test_without_the_option_a_single_server_says_it_is_no_cluster() -> None:
    with RedisServer() as server:
        store = open_store(f"redis://{HOST}:{server.port}?cluster=yes")
        with pytest.raises(TierRefused, match="cluster support disabled"):
            get(store, key_of(1))
        store.close()
