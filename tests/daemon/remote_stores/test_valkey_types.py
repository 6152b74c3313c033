"""Keys of a Redis server under which another program has stored values of other types."""

from __future__ import annotations

import pytest
import redis

from tensord.daemon.remote_stores.urls import open_store
from tensord.errors import TierRefused

from .entries import get, key_of, made, put, soon
from .redis_server import HOST, RedisServer
from .test_valkey import name_of


def make_wrong(server: RedisServer, name: str, kind: str) -> None:
    with redis.Redis(HOST, server.port) as direct:
        direct.delete(name)
        match kind:
            case "list":
                direct.rpush(name, b"x")
            case "hash":
                direct.hset(name, "x", "y")
            case "stream":
                direct.xadd(name, {"x": "y"})


@pytest.mark.parametrize("kind", ["list", "hash", "stream"])
def test_a_value_that_is_no_string_is_a_miss_counts_as_corrupt_and_is_replaced(kind: str) -> None:
    wrong, right = made(1), made(2)
    with RedisServer() as server:
        store = open_store(f"redis://{HOST}:{server.port}")
        put(store, right)
        make_wrong(server, name_of(wrong.key), kind)
        found = store.heads([wrong.key, right.key], soon())
        assert found[0] is None and found[1] is not None
        assert store.corrupt == 1
        assert wrong.key.hex() in store.last_corrupt and "WRONGTYPE" in store.last_corrupt
        assert get(store, wrong.key) is None and get(store, right.key) is not None
        assert store.corrupt == 2
        put(store, wrong)
        assert get(store, wrong.key) == (wrong.payload, wrong.meta)
        make_wrong(server, name_of(wrong.key), kind)
        store.remove([wrong.key], soon())
        assert get(store, wrong.key) is None and store.corrupt == 2
        store.close()


@pytest.mark.parametrize("kind", ["list", "many", "99999999999", "-1", ""])
def test_a_generation_that_is_no_number_is_refused_and_said(kind: str) -> None:
    tag = key_of(1)[:8]
    name = f"tensord-1:gen:{tag.hex()}"
    with RedisServer() as server, redis.Redis(HOST, server.port) as direct:
        store = open_store(f"redis://{HOST}:{server.port}")
        make_wrong(server, name, kind)
        if kind != "list":
            direct.set(name, kind)
        for call in (lambda: store.generations([tag], soon()), lambda: store.raise_generation(tag, 1, soon())):
            with pytest.raises(TierRefused, match=f"delete the key {name}"):
                call()
        direct.delete(name)
        assert store.raise_generation(tag, 1, soon()) == 1
        store.close()
