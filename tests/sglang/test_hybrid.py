"""Models with several host pools: SGLang's v2 interface."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from ..daemon_process import Daemon
from .rank import PAGE, Rank, mha_pool, mla_pool

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
def ranks(daemon: Daemon) -> tuple[Hybrid, Hybrid]:
    return Hybrid(daemon), Hybrid(daemon)


def test_pages_of_a_second_pool_are_byte_equal_in_another_engine(ranks: tuple[Hybrid, Hybrid]) -> None:
    first, second = ranks
    hashes, _ = first.stored()
    assert first.storage.batch_set_v2([first.swa(hashes[2:], fill=7)]) == {PoolName.SWA: [True]}
    wanted = second.swa(hashes[2:])
    assert second.storage.batch_exists_v2(hashes, [wanted]).kv_hit_pages == 3
    assert second.storage.batch_get_v2([wanted]) == {PoolName.SWA: [True]}
    got = second.window.get_data_page(int(wanted.host_indices[0])).view(torch.uint8)
    assert (got == 7).all()


def test_a_prefix_is_found_only_if_its_last_pages_are_in_both_pools(ranks: tuple[Hybrid, Hybrid]) -> None:
    first, second = ranks
    hashes, _ = first.stored(4)
    wanted = PoolTransfer(name=PoolName.SWA, keys=hashes[-1:], hit_policy=TRAILING)
    assert second.storage.batch_exists_v2(hashes, [wanted]).kv_hit_pages == 0
    first.storage.batch_set_v2([first.swa([hashes[0], hashes[2]], fill=1)])
    found = second.storage.batch_exists_v2(hashes, [wanted])
    assert found.kv_hit_pages == 3
    assert found.restorable_prefix_pages == [1, 3]
    assert found.extra_pool_hit_pages == {PoolName.KV: 4, PoolName.SWA: 3}


def test_a_pool_that_needs_all_pages_ends_the_prefix_at_its_first_gap(ranks: tuple[Hybrid, Hybrid]) -> None:
    first, second = ranks
    hashes, _ = first.stored(4)
    first.storage.batch_set_v2([first.swa([*hashes[:2], hashes[3]], fill=1)])
    found = second.storage.batch_exists_v2(hashes, [PoolTransfer(name=PoolName.SWA, keys=hashes)])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [1, 2])


def test_a_pool_that_was_never_registered_finds_and_stores_nothing(ranks: tuple[Hybrid, Hybrid]) -> None:
    first, _ = ranks
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
