"""Redis servers that can be read and take no writes: a replica, a full one, one whose user may only read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from tensord.daemon.remote_stores.store import RemoteStore
from tensord.daemon.remote_stores.urls import open_store
from tensord.errors import TierFull, TierReadOnly, TierTooLarge
from tests.daemon_process import until

from .conformance import MIB, claims
from .entries import get, key_of, made, put, soon
from .redis_server import HOST, RedisServer
from .test_valkey import Redis
from .test_valkey_types import make_wrong

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
def read_only(request: pytest.FixtureRequest) -> Iterator[RemoteStore]:
    """A store with the object of 1, to which this host cannot write."""
    with RedisServer(*READER) as server, RedisServer() as other:
        filled = open_store(f"redis://{HOST}:{server.port}")
        put(filled, made(1))
        filled.close()
        if request.param == "replica":
            make_replica(other, server)
            store = open_store(f"redis://{HOST}:{other.port}")
        else:
            store = open_store(f"redis://reader:any@{HOST}:{server.port}")
        yield store
        store.close()


def test_a_server_that_takes_no_writes_says_so_and_is_read(read_only: RemoteStore) -> None:
    writes: list[Callable[[], object]] = [
        lambda: put(read_only, made(2)),
        lambda: read_only.remove([key_of(1)], soon()),
    ]
    for write in writes:
        with pytest.raises(TierReadOnly, match="takes no writes"):
            write()
    assert get(read_only, key_of(1)) is not None
    assert [each is not None for each in read_only.heads([key_of(1), key_of(2)], soon())] == [True, False]
    assert read_only.generations([key_of(1)[:8]], soon()) == [0]


def test_a_server_that_takes_no_writes_has_no_claims(read_only: RemoteStore) -> None:
    assert read_only.claim(key_of(3), b"host 1", 60.0, soon()) is None


def test_a_full_server_has_no_claims_and_misses_are_misses() -> None:
    with RedisServer() as server:
        full = Redis(server, f"redis://{HOST}:{server.port}")
        store = full.open()
        full.fill()
        with pytest.raises(TierFull):
            put(store, made(1, MIB))
        assert store.claim(key_of(1), b"host 1", 60.0, soon()) is None
        assert store.heads([key_of(1)], soon()) == [None]
        store.close()
        full.direct.close()


@pytest.mark.parametrize("kind", ["list", "hash", "stream"])
def test_a_claim_of_another_type_is_nobodys_and_counts_as_corrupt(kind: str) -> None:
    with RedisServer() as server:
        store = open_store(f"redis://{HOST}:{server.port}")
        make_wrong(server, f"tensord-1:claim:{key_of(1).hex()}", kind)
        assert store.claim(key_of(1), b"host 1", 60.0, soon()) is None
        assert store.corrupt == 1
        assert f"tensord-1:claim:{key_of(1).hex()}" in store.last_corrupt and "delete it" in store.last_corrupt
        assert store.claim(key_of(2), b"host 1", 60.0, soon()) == (True, 0.0)
        assert not claims(store, key_of(2), b"host 2", 60.0, soon())
        store.close()


def test_an_object_that_no_server_takes_does_not_mean_that_the_server_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensord.daemon.remote_stores.valkey.VALUE_BYTES_MAX", MIB)
    with RedisServer() as server:
        store = open_store(f"redis://{HOST}:{server.port}")
        with pytest.raises(TierTooLarge, match="larger than a value"):
            put(store, made(1, 2 * MIB))
        store.close()
