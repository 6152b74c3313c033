"""SGLang's own cache controller, where it talks to the storage: its lookups, loads and backups, and its page hashes.

The controller is made without its constructor, which needs a GPU's streams. Its methods run as they are.
"""

from __future__ import annotations

from queue import Queue
from typing import Any

from sglang.srt.managers.cache_controller import HiCacheController, PrefetchOperation, StorageOperation

from .rank import PAGE, Rank, page_hashes


def _controller(rank: Rank) -> Any:
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
