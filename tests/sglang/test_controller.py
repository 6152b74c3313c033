"""SGLang's own cache controller, where it talks to the storage: its lookups, loads and backups, and its page hashes.

The controller is made without its constructor, which needs a GPU's streams. Its methods run as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from queue import Queue
from typing import Any

import pytest
import torch
from sglang.srt.managers.cache_controller import HiCacheController, PrefetchOperation, StorageOperation
from sglang.srt.mem_cache.utils import get_storage_hash_str

from ..daemon_process import Daemon
from .rank import PAGE, Rank

_texts = count(1)


@pytest.fixture
def ranks(daemon: Daemon) -> Iterator[tuple[Rank, Rank]]:
    first, second = Rank(daemon.socket), Rank(daemon.socket)
    yield first, second
    first.close()
    second.close()


def _controller(rank: Rank) -> Any:
    controller = object.__new__(HiCacheController)
    controller.storage_backend = rank.storage
    controller.storage_host_pool = rank.pool
    controller.page_size = PAGE
    controller.prefetch_sync_queue = Queue()
    controller.page_get_func = controller._page_get_zero_copy
    controller.page_set_func = controller._page_set_zero_copy
    return controller


def _hashed(tokens: list[int]) -> list[str]:
    try:
        hashes = get_storage_hash_str(tokens, None, page_size=PAGE)
    except RuntimeError as error:
        pytest.skip(f"SGLang builds its hash with g++, ninja and OpenSSL's headers: {error}")
    assert isinstance(hashes, list)
    return hashes


def _backed_up(rank: Rank, tokens: list[int]) -> torch.Tensor:
    """Lets the controller back up the pages of a sequence; returns their host indices."""
    hashes = _hashed(tokens)
    _, indices = rank.filled(f"controller {next(_texts)}", len(hashes))
    operation = StorageOperation(indices, tokens, hash_value=hashes, prefix_keys=[])
    _controller(rank)._page_backup(operation)
    assert operation.completed_tokens == len(tokens)
    return indices


def _prefetched(rank: Rank, tokens: list[int]) -> tuple[torch.Tensor, int]:
    """Lets the controller look a sequence up and load what is stored: its host indices, and the tokens it loaded."""
    controller = _controller(rank)
    operation = PrefetchOperation("request", tokens, prefix_keys=[])
    operation.hash_value, hit_tokens = controller._storage_hit_query(operation)
    operation.host_indices = rank.empty(len(tokens) // PAGE)
    pages = controller._page_transfer(operation)
    assert pages * PAGE == hit_tokens
    return operation.host_indices, hit_tokens


def test_a_prompt_that_one_engine_has_backed_up_is_prefetched_by_another(ranks: tuple[Rank, Rank]) -> None:
    first, second = ranks
    prompt = [next(_texts) * 1000 + number for number in range(4 * PAGE)]
    indices = _backed_up(first, prompt)
    room, tokens = _prefetched(second, prompt)
    assert tokens == len(prompt)
    for number in range(4):
        assert second.page(room, number) == first.page(indices, number)


def test_a_prompt_that_diverges_is_prefetched_up_to_the_last_common_page(ranks: tuple[Rank, Rank]) -> None:
    first, second = ranks
    prompt = [next(_texts) * 1000 + number for number in range(4 * PAGE)]
    indices = _backed_up(first, prompt)
    room, tokens = _prefetched(second, [*prompt[: 2 * PAGE], 5, *prompt[2 * PAGE + 1 :]])
    assert tokens == 2 * PAGE
    for number in range(2):
        assert second.page(room, number) == first.page(indices, number)


def test_a_backup_without_a_daemon_ends_and_is_not_counted(daemon: Daemon, ranks: tuple[Rank, Rank]) -> None:
    first, second = ranks
    prompt = [next(_texts) * 1000 + number for number in range(2 * PAGE)]
    daemon.kill()
    hashes = _hashed(prompt)
    _, indices = first.filled("controller", len(hashes))
    operation = StorageOperation(indices, prompt, hash_value=hashes, prefix_keys=[])
    _controller(first)._page_backup(operation)
    assert operation.completed_tokens == 0
    assert _prefetched(second, prompt)[1] == 0
