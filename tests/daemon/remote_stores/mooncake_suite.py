"""Mooncake Store as a remote store. Run by `remote/test_network.py`, in a network namespace of its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from mooncake.store import MooncakeDistributedStore

from tensord.daemon.remote_stores.store import RemoteStore
from tensord.errors import TierFull, TierTimedOut, TierUnavailable
from tests.daemon_process import PATIENCE_S, until

from .conformance import MIB, AnyStore, Backend
from .conftest import Opened
from .entries import get, heads, key_of, made, put
from .servers import MooncakeMaster

SEGMENT_BYTES = 256 * MIB


class Cluster(Backend):
    """A master, and one member that has all the memory."""

    def __init__(self, master: MooncakeMaster) -> None:
        self.master = master
        self.url = f"mooncake://{master.address}?host=127.0.0.1"
        self.member: Any = MooncakeDistributedStore()
        assert self.member.setup("127.0.0.1", "P2PHANDSHAKE", SEGMENT_BYTES, 64 * MIB, "tcp", "", master.address) == 0

    def raw(self, key: bytes) -> bytes:
        found: bytes = self.member.get(f"tensord-1-{key.hex()}")
        return found

    def set_raw(self, key: bytes, stored: bytes) -> None:
        assert self.member.upsert(f"tensord-1-{key.hex()}", stored) == 0


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with MooncakeMaster(tmp_path_factory.mktemp("mooncake")) as master:
        cluster = Cluster(master)
        yield cluster
        cluster.member.close()


@pytest.fixture
def backend(cluster: Cluster) -> Cluster:
    cluster.member.remove_all(True)
    return cluster


class TestMooncake(AnyStore):
    replaces_at_once = False


def test_a_master_that_is_stopped_costs_a_call_its_time_and_no_byte(cluster: Cluster, store: RemoteStore) -> None:
    entry = made(1, MIB)
    put(store, entry)
    buffer = memoryview(bytearray(entry.stored_bytes))
    store.timeout_s = 0.1
    with cluster.master.paused():
        for call in (
            lambda: store.get_into(entry.key, buffer),
            lambda: store.look([entry.key]),
            lambda: store.put_from(key_of(2), b"x" * 100, made(2, 100).entry),
        ):
            with pytest.raises(TierTimedOut, match=r"within 0\.1 s"):
                call()
    store.timeout_s = PATIENCE_S
    assert get(store, entry.key) == (entry.payload, entry.entry)
    assert not any(buffer), "a late answer is not written into the caller's memory"


def test_the_end_of_the_clients_process_costs_the_calls_under_way(cluster: Cluster, store: RemoteStore) -> None:
    entry = made(1)
    put(store, entry)
    with cluster.master.paused(), ThreadPoolExecutor(1) as threads:
        under_way = threads.submit(get, store, entry.key)
        process = store._process  # type: ignore[attr-defined]
        until(lambda: not process.idle, "the call is under way")
        process._process.kill()
        with pytest.raises(TierUnavailable, match="process with Mooncake's client has ended"):
            under_way.result()
    assert get(store, entry.key) == (entry.payload, entry.entry)


def test_a_store_is_closed_while_a_call_hangs(cluster: Cluster, backend: Cluster) -> None:
    store = backend.open()
    put(store, made(1))
    with cluster.master.paused():
        store.timeout_s = 0.1
        with pytest.raises(TierTimedOut):
            heads(store, [key_of(1)])
        store.close()


def test_a_master_that_was_killed_is_unavailable_and_serves_again_once_it_is_back(
    cluster: Cluster, store: RemoteStore
) -> None:
    put(store, made(1))
    cluster.master.kill()
    store.timeout_s = 0.5
    try:
        for call in (lambda: heads(store, [key_of(1)]), lambda: put(store, made(2))):
            with pytest.raises(TierUnavailable):
                call()
    finally:
        store.timeout_s = PATIENCE_S
        cluster.master.start()

    def puts() -> bool:
        with suppress(TierUnavailable, TierFull):
            put(store, made(3))
            return True
        return False

    until(puts, "the store serves again")
    assert get(store, key_of(3)) is not None


def test_no_master_is_unavailable_and_no_hang(opened: Opened) -> None:
    with pytest.raises(TierUnavailable):
        heads(opened("mooncake://127.0.0.1:50999", 2.0), [key_of(1)])


def test_a_store_without_room_refuses_a_put_and_takes_the_next_one(store: RemoteStore) -> None:
    put(store, made(1))
    with pytest.raises(TierFull, match="segment=4GiB"):
        put(store, made(2, SEGMENT_BYTES + MIB))
    # Mooncake has evicted others for it.
    put(store, made(3))
    assert get(store, key_of(3)) is not None


def test_generations_outlive_their_hosts_and_a_few_that_are_lost(
    backend: Cluster, store: RemoteStore, opened: Opened
) -> None:
    for wanted in range(1, 21):
        assert store.raise_generation(b"a model.", wanted) == wanted
    other = opened(backend.url)
    assert other.generations([b"a model."]) == [20]
    for lost in (3, 4, 18):
        assert backend.member.remove(f"tensord-1-gen-{b'a model.'.hex()}-{lost}", True) == 0
    assert other.generations([b"a model."]) == opened(backend.url).generations([b"a model."]) == [20]


def test_a_master_may_have_an_address_of_ipv6(opened: Opened) -> None:
    assert opened("mooncake://[::1]").address == "mooncake://[::1]:50051"
