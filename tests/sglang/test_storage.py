"""Pages of SGLang's host pools through a real daemon."""

from __future__ import annotations

from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from sglang.srt.managers.cache_controller import HiCacheController, PrefetchOperation, StorageOperation
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolHitPolicy, PoolName, PoolTransfer

from tensord.client.sglang import TensordHiCacheStorage
from tensord.errors import BadConfiguration

from ..daemon_process import Daemon
from .rank import LAYOUTS, PAGE, Rank, mha_pool, mla_pool, page_hashes, storage_config


def _shared(first: Rank, second: Rank) -> tuple[list[str], Any]:
    """Asserts that the second rank gets, byte by byte, what the first one stores. Returns pages and places."""
    hashes, indices = first.filled()
    assert second.storage.batch_exists(hashes) == 0
    assert first.storage.batch_set_v1(hashes, indices) == [True] * 3
    assert second.storage.batch_exists(hashes) == 3
    room = second.empty()
    assert second.storage.batch_get_v1(hashes, room) == [True] * 3
    assert second.pages(room) == first.pages(indices)
    assert all(map(any, second.pages(room)))
    return hashes, room


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_that_one_engine_stores_is_byte_equal_in_another(daemon: Daemon, layout: str) -> None:
    _shared(Rank(daemon.socket, mha_pool(layout)), Rank(daemon.socket, mha_pool(layout)))


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_ranks_of_an_mla_model_read_the_pages_that_one_rank_writes(daemon: Daemon, layout: str) -> None:
    config = {"is_mla_model": True, "tp_size": 2}
    writer = Rank(daemon.socket, mla_pool(layout), config={**config, "tp_rank": 0})
    reader = Rank(daemon.socket, mla_pool(layout), config={**config, "tp_rank": 1})
    hashes, indices = reader.filled()
    assert reader.storage.batch_set_v1(hashes, indices) == [False] * 3
    assert reader.storage.batch_exists(hashes) == 0
    assert reader.storage.batch_set_v1(*_shared(writer, reader)) == [True] * 3


def test_a_get_ends_at_the_first_missing_page_and_leaves_the_rest_unchanged(ranks: tuple[Rank, Rank]) -> None:
    first, second = ranks
    hashes, indices = first.filled(3)
    assert all(first.storage.batch_set_v1(hashes[:1], indices[:PAGE]))
    assert all(first.storage.batch_set_v1(hashes[2:], indices[2 * PAGE :]))
    _, room = second.filled()
    before = second.pages(room)
    assert second.storage.batch_get_v1(hashes, room) == [True, False, False]
    assert second.pages(room) == [first.pages(indices)[0], *before[1:]]


def test_clear_removes_the_pages_of_the_rank_and_nothing_else(ranks: tuple[Rank, Rank], daemon: Daemon) -> None:
    first, second = ranks
    other = daemon.client()
    assert other.put(b"k" * 32, b"other", wait=True).state in ("stored", "existed")
    hashes, _ = first.stored()
    assert first.storage.clear()
    assert second.storage.batch_exists(hashes) == 0
    assert other.contains(b"k" * 32)


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"tensord.revison": "r1"}, "tensord.revison"),
        ({"tensord.revision": ""}, "tensord.revision"),
        ({"tensord.socket": 5}, "tensord.socket=5"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_it(extra: dict[str, Any], told: str) -> None:
    with pytest.raises(BadConfiguration, match=told):
        TensordHiCacheStorage(storage_config(extra), {})


def test_the_client_is_listed_by_the_name_of_model_and_rank(daemon: Daemon) -> None:
    Rank(daemon.socket, config={"tp_rank": 1, "tp_size": 2})
    assert "sglang tiny tp1 pp0 dp0" in [row["name"] for row in daemon.client_rows()]


def test_pages_leave_the_ring_last_first(ranks: tuple[Rank, Rank], daemon: Daemon) -> None:
    first, second = ranks
    hashes, indices = first.filled(4)
    head = HiCacheStorageExtraInfo(prefix_keys=[])
    assert all(first.storage.batch_set_v1(hashes[:2], indices[: 2 * PAGE], head))
    tail = HiCacheStorageExtraInfo(prefix_keys=hashes[:2])
    assert all(first.storage.batch_set_v1(hashes[2:], indices[2 * PAGE :], tail))
    client = daemon.client()
    keys = second.storage._keys("kv", hashes)
    # A lease on a page keeps those before it, and the end of one ends those after it.
    lease = client.get(keys[1])
    assert lease is not None
    client.evict(keys[2])
    assert second.storage.batch_exists(hashes) == 2
    assert [client.contains(key) for key in keys] == [True, True, False, False]
    lease.release()
    client.evict(keys[0])
    assert [client.contains(key) for key in keys] == [False] * 4


def test_a_page_whose_predecessor_is_gone_is_stored(ranks: tuple[Rank, Rank], daemon: Daemon) -> None:
    first, second = ranks
    hashes, indices = first.filled(3)
    gone = HiCacheStorageExtraInfo(prefix_keys=hashes[:1])
    assert all(first.storage.batch_set_v1(hashes[1:], indices[PAGE:], gone))
    assert second.storage.batch_exists(hashes) == 0
    assert second.storage.batch_exists(hashes[1:]) == 2


def test_pages_that_another_host_has_stored_are_found_through_the_remote_store(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    url = f"dir://{tmp_path / 'store'}"
    with Daemon(remote_url=url) as one, Daemon(remote_url=url) as other:
        first, second = Rank(one.start().socket), Rank(other.start().socket)
        hashes, indices = first.stored()
        # A second use has them written: computing them took a time that nobody knows.
        assert all(first.storage.batch_get_v1(hashes, first.empty()))
        one.until(lambda status: status["store"]["remote"].get("written") == 3, "pages are written")
        assert second.storage.batch_exists(hashes) == 3
        room = second.empty()
        assert second.storage.batch_get_v1(hashes, room) == [True] * 3
        assert second.pages(room) == first.pages(indices)
        other.pause()
        for _ in range(2):
            assert second.storage.batch_exists([*hashes, "0" * 64]) == 3, "without an answer too"
        other.resume()


def _controller(rank: Rank) -> Any:
    """SGLang's own cache controller, where it talks to the storage. Made without its constructor, which needs a GPU's
    streams."""
    controller = object.__new__(HiCacheController)
    controller.storage_backend = rank.storage
    controller.storage_host_pool = rank.pool
    controller.page_size = PAGE
    controller.prefetch_sync_queue = Queue()
    controller.page_get_func = controller._page_get_zero_copy
    controller.page_set_func = controller._page_set_zero_copy
    return controller


def test_a_prompt_that_one_engine_has_backed_up_is_prefetched_by_another(ranks: tuple[Rank, Rank]) -> None:
    first, second = ranks
    prompt = list(range(4 * PAGE))
    hashes = page_hashes(prompt)
    _, indices = first.filled(len(hashes))
    backup = StorageOperation(indices, prompt, hash_value=hashes, prefix_keys=[])
    _controller(first)._page_backup(backup)
    assert backup.completed_tokens == len(prompt)

    # The last page differs.
    controller, tokens = _controller(second), [*prompt[:-1], 7]
    operation = PrefetchOperation("request", tokens, prefix_keys=[])
    operation.hash_value, hit_tokens = controller._storage_hit_query(operation)
    operation.host_indices = second.empty(4)
    assert controller._page_transfer(operation) * PAGE == hit_tokens == 3 * PAGE
    assert second.pages(operation.host_indices)[:3] == first.pages(indices)[:3]


# ---- models with several host pools: SGLang's v2 interface


TRAILING = PoolHitPolicy.TRAILING_PAGES


class Hybrid(Rank):
    """A rank with a second pool, for layers with sliding windows."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(daemon.socket)
        self.window = mha_pool(heads=1)
        self.storage.register_mem_host_pool_v2(self.pool, PoolName.KV)
        self.storage.register_mem_host_pool_v2(self.window, PoolName.SWA)

    def swa(self, hashes: list[str], *, fill: int | None = None) -> PoolTransfer:
        """A transfer of the second pool's pages; with `fill`, after writing this byte into all of them."""
        indices = self.window.alloc(len(hashes) * PAGE)
        assert indices is not None
        for number in range(len(hashes) if fill is not None else 0):
            page = self.window.get_dummy_flat_data_page().view(torch.uint8).fill_(fill)
            self.window.set_from_flat_data_page(int(indices[number * PAGE]), page.view(torch.bfloat16))
        return PoolTransfer(name=PoolName.SWA, host_indices=indices, keys=hashes, hit_policy=TRAILING)


@pytest.fixture
def hybrids(daemon: Daemon) -> tuple[Hybrid, Hybrid]:
    return Hybrid(daemon), Hybrid(daemon)


def test_pages_of_a_second_pool_are_byte_equal_in_another_engine(hybrids: tuple[Hybrid, Hybrid]) -> None:
    first, second = hybrids
    hashes, _ = first.stored()
    assert first.storage.batch_set_v2([first.swa(hashes[2:], fill=7)]) == {PoolName.SWA: [True]}
    wanted = second.swa(hashes[2:])
    assert second.storage.batch_exists_v2(hashes, [wanted]).kv_hit_pages == 3
    assert second.storage.batch_get_v2([wanted]) == {PoolName.SWA: [True]}
    got = second.window.get_data_page(int(wanted.host_indices[0])).view(torch.uint8)
    assert (got == 7).all()


def test_a_prefix_is_found_only_if_its_last_pages_are_in_both_pools(hybrids: tuple[Hybrid, Hybrid]) -> None:
    first, second = hybrids
    hashes, _ = first.stored(4)
    wanted = PoolTransfer(name=PoolName.SWA, keys=hashes[-1:], hit_policy=TRAILING)
    assert second.storage.batch_exists_v2(hashes, [wanted]).kv_hit_pages == 0
    first.storage.batch_set_v2([first.swa([hashes[0], hashes[2]], fill=1)])
    found = second.storage.batch_exists_v2(hashes, [wanted])
    assert found.kv_hit_pages == 3
    assert found.restorable_prefix_pages == [1, 3]
    assert found.extra_pool_hit_pages == {PoolName.KV: 4, PoolName.SWA: 3}


def test_a_pool_that_needs_all_pages_ends_the_prefix_at_its_first_gap(hybrids: tuple[Hybrid, Hybrid]) -> None:
    first, second = hybrids
    hashes, _ = first.stored(4)
    first.storage.batch_set_v2([first.swa([*hashes[:2], hashes[3]], fill=1)])
    found = second.storage.batch_exists_v2(hashes, [PoolTransfer(name=PoolName.SWA, keys=hashes)])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [1, 2])


def test_a_pool_that_was_never_registered_finds_and_stores_nothing(hybrids: tuple[Hybrid, Hybrid]) -> None:
    first, _ = hybrids
    hashes, indices = first.stored()
    unknown = PoolTransfer(name=PoolName.MAMBA, host_indices=indices, keys=hashes)
    assert first.storage.batch_set_v2([unknown]) == {PoolName.MAMBA: [False] * 3}
    assert first.storage.batch_get_v2([unknown]) == {PoolName.MAMBA: [False] * 3}
    assert first.storage.batch_exists_v2(hashes, [unknown]).kv_hit_pages == 0


def test_each_rank_of_an_mla_model_has_its_own_states(daemon: Daemon) -> None:
    config = {"is_mla_model": True, "tp_size": 2}
    ranks = [Rank(daemon.socket, mla_pool(), config={**config, "tp_rank": number}) for number in range(2)]
    hashes, _ = ranks[0].filled()
    for rank in ranks:
        rank.storage.register_mem_host_pool_v2(mha_pool(heads=1), PoolName.MAMBA)
    transfer = PoolTransfer(name=PoolName.MAMBA, host_indices=torch.arange(3 * PAGE), keys=hashes)
    assert ranks[1].storage.batch_set_v2([transfer]) == {PoolName.MAMBA: [True] * 3}
    assert ranks[0].storage.batch_get_v2([transfer]) == {PoolName.MAMBA: [False] * 3}
