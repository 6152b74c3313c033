"""The replacement of vLLM's factories of processor caches.

Owns: which of vLLM's factories are replaced and when vLLM's own caches stay, and the cache of vLLM's warm-up. Does not
own: the sender and the receiver (caches.py).

Invariants: `install` replaces each factory once in a process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from vllm.config import VllmConfig
from vllm.multimodal.cache import MultiModalProcessorOnlyCache, factories

from ....errors import TensordError
from ...identity.engine import processor_namespace
from ..engine.hooks import hook
from .caches import InItem, OutItem, TensordReceiverCache, TensordSenderCache
from .forms import Forms, forms_of
from .hashes import note_hashes
from .items import item_tree


class _LearningCache(MultiModalProcessorOnlyCache):
    """vLLM's cache of its warm-up. It also learns the forms of the items processed there."""

    def __init__(self, model_config: Any) -> None:
        super().__init__(model_config)
        self._forms: Forms = forms_of(processor_namespace(model_config).tag)

    def get_and_update_item(self, mm_item: InItem, mm_hash: str) -> OutItem:
        if mm_item is not None:
            with suppress(TensordError):
                self._forms.learn(item_tree(mm_item[0], []))
        updated: OutItem = super().get_and_update_item(mm_item, mm_hash)
        return updated


def install() -> None:
    """Makes vLLM create these caches in this process. If engines run on other hosts, vLLM's own caches stay.
    Idempotent."""
    for name, make in (
        ("processor_cache_from_config", _sender),
        ("engine_receiver_cache_from_config", _receiver),
        ("worker_receiver_cache_from_config", _no_worker_receiver),
        ("processor_only_cache_from_config", _teaching),
    ):
        original = getattr(factories, name)
        # All modules that have imported its name already.
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith("vllm.") and vars(module).get(name) is original:
                hook(module, name, make)
    note_hashes(lambda cache: cache.model_name if isinstance(cache, TensordSenderCache) else None)


def _sender(original: Callable[..., Any], vllm_config: VllmConfig) -> Any:
    parallel = vllm_config.parallel_config
    local = parallel.local_engines_only or parallel.data_parallel_size_local == parallel.data_parallel_size
    return TensordSenderCache(vllm_config) if _wanted(vllm_config) and local else original(vllm_config)


def _receiver(original: Callable[..., Any], vllm_config: VllmConfig) -> Any:
    return TensordReceiverCache(vllm_config) if _wanted(vllm_config) else original(vllm_config)


def _no_worker_receiver(original: Callable[..., Any], vllm_config: VllmConfig, *rest: Any, **named: Any) -> Any:
    return None if _wanted(vllm_config) else original(vllm_config, *rest, **named)


def _teaching(original: Callable[..., Any], vllm_config: VllmConfig) -> Any:
    return _LearningCache(vllm_config.model_config) if _wanted(vllm_config) else original(vllm_config)


def _wanted(vllm_config: VllmConfig) -> bool:
    model_config = vllm_config.model_config
    if not model_config.supports_multimodal_inputs:
        return False
    return bool(model_config.get_multimodal_config().mm_processor_cache_gb > 0)
