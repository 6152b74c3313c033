"""The parts that vLLM's offloading connector asks for.

Owns: nothing beside the two constructors' results. Does not own: the parts (scheduler.py, worker.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingSpec

from .scheduler import KVManager
from .worker import KVWorker


class TensordOffloadingSpec(OffloadingSpec):  # type: ignore[misc, unused-ignore]
    """The spec of one engine. `manager` makes its manager, `worker` one of its workers."""

    def __init__(
        self, config: Any, manager: Callable[[], KVManager], worker: Callable[[CanonicalKVCaches], KVWorker]
    ) -> None:
        super().__init__(config)
        self._make_manager = manager
        self._make_worker = worker

    def get_manager(self) -> KVManager:
        return self._make_manager()

    def get_worker(self, kv_caches: CanonicalKVCaches) -> KVWorker:
        return self._make_worker(kv_caches)
