"""The replacement of vLLM's factories of processor caches.

Owns: which of vLLM's factories are replaced and when vLLM's own caches stay, and the cache of vLLM's warm-up. Does not
own: the sender and the receiver (caches.py).

Invariants: `install` replaces each factory once in a process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.multimodal.cache import MultiModalProcessorOnlyCache, factories

from ....errors import TensordError
from ...identity.engine import processor_namespace
from ..engine.hooks import hook
from .caches import InItem, OutItem, TensordReceiverCache, TensordSenderCache
from .hashes import note_hashes
from .items import Forms, forms_of, item_tree


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


_MAKES: Final[dict[str, Callable[[VllmConfig], Any]]] = {
    "processor_cache_from_config": TensordSenderCache,
    "engine_receiver_cache_from_config": TensordReceiverCache,
    "worker_receiver_cache_from_config": lambda vllm_config: None,
    "processor_only_cache_from_config": lambda vllm_config: _LearningCache(vllm_config.model_config),
}
"""By the name of vLLM's factory."""


def install() -> None:
    """Makes vLLM create these caches in this process. If engines run on other hosts, vLLM's own caches stay.
    Idempotent."""
    for name in _MAKES:
        original = getattr(factories, name)
        # All modules that have imported its name already.
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith("vllm.") and vars(module).get(name) is original:
                hook(module, name, partial(_make, name))
    note_hashes()


def _make(name: str, original: Callable[..., Any], vllm_config: VllmConfig, *rest: Any, **named: Any) -> Any:
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    wanted = model_config.supports_multimodal_inputs and model_config.get_multimodal_config().mm_processor_cache_gb > 0
    if name == "processor_cache_from_config":
        # Not if this frontend has engines on other hosts.
        local = parallel.local_engines_only or parallel.data_parallel_size_local == parallel.data_parallel_size
        wanted = wanted and local
    return _MAKES[name](vllm_config) if wanted else original(vllm_config, *rest, **named)
