"""LMCache's own storage manager, with its store and prefetch controllers, over the example's adapter."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest

if not find_spec("lmcache"):
    pytest.skip("lmcache is not installed: make test-sglang installs it", allow_module_level=True)

# LMCache looks for a GPU when it is imported.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import parse_args
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.storage_manager import StorageManager

from ..daemon_process import PATIENCE_S, Daemon, until

CHUNKS = 4
_numbers = count(1)
LAYOUT = MemoryLayoutDesc(shapes=[torch.Size([2, 3, 8, 16])], dtypes=[torch.bfloat16])


def _config(socket: Path, **params: Any) -> Any:
    """The configuration that LMCache reads from its command line."""
    given = {
        "type": "plugin",
        "module_path": "lmcache_l2",
        "class_name": "TensordL2Adapter",
        "adapter_params": {"revision": "r1", "socket": str(socket), **params},
    }
    words = ["--l1-size-gb", "0.05", "--no-l1-use-lazy", "--eviction-policy", "LRU", "--l2-adapter", json.dumps(given)]
    config = parse_args(words)
    # Servers of one process would otherwise have one name for their memory.
    config.l1_manager_config.memory_config.shm_name = f"lmcache-test-{os.getpid()}-{next(_numbers)}"
    return config


def _keys(text: str) -> list[ObjectKey]:
    return [ObjectKey(f"{text} {number}".encode(), "tiny", ObjectKey.ComputeKVRank(1, 0, 1, 0)) for number in range(4)]


class Server:
    """The part of an LMCache server that stores chunks."""

    def __init__(self, socket: Path, **params: Any) -> None:
        self._manager = StorageManager(_config(socket, **params))

    def put(self, keys: list[ObjectKey]) -> list[bytes]:
        """Computes chunks; returns their bytes."""
        reserved = self._manager.reserve_write(keys, LAYOUT)
        assert len(reserved) == len(keys)
        for number, chunk in enumerate(reserved.values()):
            chunk.tensor.fill_(number + 1)
        found = [bytes(reserved[key].byte_array) for key in keys]
        self._manager.finish_write(keys)
        return found

    def prefetched(self, keys: list[ObjectKey]) -> list[bytes]:
        """The bytes of the longest prefix of chunks that are found in L2, not in the server's own memory."""
        handle = self._manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, 0, LAYOUT)]))
        result = until(lambda: self._manager.query_prefetch_status(handle), "the end of a prefetch")
        assert result.l1_hit_cells[0].popcount() == 0
        found = keys[: result.l2_hit_cells[0].popcount()]
        if not found:
            return []
        with self._manager.read_prefetched_results(found) as chunks:
            assert chunks is not None
            read = [bytes(chunk.byte_array) for chunk in chunks]
        self._manager.finish_read_prefetched(found)
        return read

    def close(self) -> None:
        self._manager.close()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        yield running.start()


def _stored(daemon: Daemon, count: int) -> None:
    daemon.until(lambda status: status["store"]["entries"] >= count, f"{count} stored chunks")


def test_a_server_finds_the_chunks_of_another_one_that_has_ended(daemon: Daemon) -> None:
    keys = _keys("chunk")
    first = Server(daemon.socket)
    expected = first.put(keys)
    _stored(daemon, CHUNKS)
    first.close()
    second = Server(daemon.socket)
    assert second.prefetched(keys) == expected
    assert len(set(expected)) == CHUNKS
    second.close()
    daemon.until(lambda status: status["pins"] == 0, "locks to end")


@pytest.mark.parametrize("params", [{"revision": "r2"}, {"tenant": "a"}])
def test_servers_with_other_weights_or_tenants_share_nothing(daemon: Daemon, params: dict[str, str]) -> None:
    keys = _keys("chunk")
    first, second = Server(daemon.socket), Server(daemon.socket, **params)
    first.put(keys)
    _stored(daemon, CHUNKS)
    assert second.prefetched(keys) == []
    for server in (first, second):
        server.close()


def test_servers_go_on_while_the_daemon_is_away_and_share_again_afterwards(daemon: Daemon) -> None:
    first, second = Server(daemon.socket), Server(daemon.socket)
    expected = first.put(_keys("before"))
    _stored(daemon, CHUNKS)
    daemon.kill()
    first.put(_keys("lost"))
    assert second.prefetched(_keys("never stored")) == []
    daemon.start()

    def shared() -> bool:
        keys = _keys(f"after {next(_numbers)}")
        put = first.put(keys)
        found = second.prefetched(keys)
        assert found == put[: len(found)]
        return bool(daemon.store("entries") > CHUNKS)

    until(shared, "chunks to be stored again")
    assert second.prefetched(_keys("before")) == expected
    for server in (first, second):
        server.close()


def test_what_a_lookup_has_found_stays_until_it_is_unlocked(daemon: Daemon) -> None:
    keys = _keys("locked")
    server = Server(daemon.socket)
    server.put(keys)
    _stored(daemon, CHUNKS)
    server.close()
    adapter = create_l2_adapter(_config(daemon.socket).l2_adapter_config.adapters[0])
    task = adapter.submit_lookup_and_lock_task(keys, {0: LAYOUT})
    assert select.select([adapter.get_lookup_and_lock_event_fd()], [], [], PATIENCE_S)[0]
    found = adapter.query_lookup_and_lock_result(task)
    assert found is not None
    assert found.popcount() == CHUNKS
    assert adapter.query_lookup_and_lock_result(task) is None
    daemon.until(lambda status: status["pins"] == CHUNKS, "locks")
    adapter.submit_unlock(keys)
    daemon.until(lambda status: status["pins"] == 0, "locks to end")
    adapter.close()


def test_an_adapter_without_a_revision_is_refused() -> None:
    with pytest.raises(ValueError, match="revision is required"):
        create_l2_adapter(_config(Path("none"), revision="").l2_adapter_config.adapters[0])
